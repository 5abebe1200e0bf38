"""`replay`: the update that a rise of the loss begins with, made again from the last checkpoint before it: is its batch bad, or the state it met?"""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.curves.spikes import first_update
from workbench.curves.trial_curves import RecordLike, judge
from workbench.errors import UsageError, WorkloadError
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.roles import Role
from workbench.record.write import StudyWriter
from workbench.studies.session import Session
from workbench.train.batches import resolve_device, train_order
from workbench.train.evaluation import values_each
from workbench.train.hooks import Hook, Step
from workbench.train.lane import Lane
from workbench.train.lanes.backend import choose_gradients
from workbench.train.loop import TrainingLoop
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload
from workbench.workloads.items import IndexedDataset, in_its_own_order

WINDOW, OTHERS, MOST = 20, 4, 256
"""Updates whose length is usual, batches to compare with, examples that are kept (rules of thumb)."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one update was, made again from the checkpoint `started`; 0 is the beginning.

    Attributes:
        exact: every loss on the way was the recorded one, bit for bit.
        examples, example_losses: of its batch, largest loss first, under the weights of `back` updates before it.
        batch_before: mean loss of its batch under these weights.
        others_before, others_at, others_after: of the batches before it, under these weights, those right before the update, and those
            after it (the larger one of the next update and `back` updates later); a loss above `limit` stands out.
        update_ratio: length of the update over the median of those before.
        second_moment_ratio: squared gradient over the optimizer's second moment before it, both summed; None without one.
        cause: "data": the batch stands out under weights that others are well with; "state": it does not, and others suffer; "both"; or None.
    """

    trial: int
    update: int
    back: int
    started: int
    exact: bool
    examples: Sequence[int]
    example_losses: Sequence[float]
    batch_before: float
    others_before: float
    others_at: float
    others_after: float
    limit: float
    lr: float
    update_ratio: float
    second_moment_ratio: float | None
    cause: str | None


def replay(
    workload: Workload, record: StudyRecord | TrialRecord, *, trial: int = 0, update: int | None = None, config: TrainConfig | None = None,
    device: str = "auto", back: int = 5, loss_sds: float = 6.0,
) -> Replay:  # fmt: skip
    """Make an update of a trial again, in a folder of its own: record, checkpoints and random state are left bit for bit as they are.

    Args:
        update: None is the one with which the trial's rise in the middle of training begins, or at which its loss jumps furthest.
        config: the trial's; None is the workload's.
        back: updates before it whose weights are asked what they think of its batch (rule of thumb).
        loss_sds: distance from what is usual, in standard deviations, that makes a loss stand out (rule of thumb).

    Raises:
        UsageError: there is no such trial or update, no rise, or the config is another one.
        WorkloadError: the data give no batch a second time, or the replay's losses are not the recorded ones.
    """
    config, curve = config or workload.config, next((c for c in judged(record).curves if c.trial == trial), None)
    if curve is None or any(curve.config.get(name) != value for name, value in config.to_dict().items()):
        raise UsageError(
            f"{record.path} has no trial {trial} of this config: give the config that it was trained with, config=..."
        )
    update = _rise(record, trial) or _jump(curve.loss) if update is None else update
    if update is None or not 0 < update < len(curve.loss):
        raise UsageError(
            f"update={update} of trial {trial}: give one of 1 to {len(curve.loss) - 1}; None looks for a rise."
        )
    if in_its_own_order(workload.train_data):
        raise WorkloadError("an iterable dataset gives no batch a second time, so none can be looked at again")
    on, back = resolve_device(device), min(back, update)
    with isolated_rng():
        seen = _again(workload, config, record.path / f"trials/{trial}/checkpoints", _Watch(update, back), on)
        recorded, made = curve.loss[seen.started : update + 1], np.array(seen.losses[: update + 1 - seen.started])
        if not np.allclose(made, recorded, rtol=1e-3, equal_nan=True):
            raise WorkloadError(
                f"from step {seen.started} on the losses are not those of the record again: something is drawn or kept that no checkpoint holds"
            )
        first, order = (
            max(0, update - OTHERS),
            train_order(len(workload.train_data), config, start_step=max(0, update - OTHERS)),
        )
        *before, batch = [next(order) for _ in range(first, update + 1)]
        others = [example for each in before for example in each]
        look = partial(_losses, workload, config, on)
        each = look(batch, seen.weights["before"])
        held = {name: _finite(look(others, weights).mean()) for name, weights in seen.weights.items()}
    limit = held["before"] + loss_sds * _noise(curve.loss[max(0, update - 50) : update])
    mean, after = _finite(each.mean()), max(held.get("next", 0.0), held.get("later", 0.0))
    told = (
        ("both" if held["at"] > limit else "data")
        if mean > limit
        else "state"
        if max(after, held["at"]) > limit
        else None
    )
    worst = sorted(range(len(batch)), key=lambda i: -_finite(each[i]))[:MOST]
    return Replay(
        trial=trial, update=update, back=back, started=seen.started, exact=bool(np.array_equal(made, recorded, equal_nan=True)),
        examples=[batch[i] for i in worst], example_losses=[float(each[i]) for i in worst], batch_before=mean,
        others_before=held["before"], others_at=held["at"], others_after=after, limit=limit, lr=seen.lr,
        update_ratio=_ratio(seen.lengths[-1], float(np.median(seen.lengths[:-1] or math.nan))), second_moment_ratio=seen.ratio, cause=told,
    )  # fmt: skip


def collect_replay(session: Session) -> None:
    """Store the replay of the baseline's rise in the middle of training, or of its furthest jump, where there is one."""
    trial = session.trial(session.config, stage=Role.BASELINE)
    update = _rise(session.record, trial.number) or _jump(trial.steps["loss"].to_numpy(dtype=np.float64))
    if update is not None and session.workload.minimised:
        how: dict[str, Any] = {
            "trial": trial.number,
            "update": update,
            "config": session.config,
            "device": str(session.device),
        }
        session.collect("replay", lambda: asdict(replay(session.workload, session.record, **how)))


def _rise(record: RecordLike, trial: int) -> int | None:
    """Return the update with which a trial's first rise after its early part begins; None without one."""
    study = judged(record)
    items = judge([c for c in study.curves if c.trial == trial], study.full_length)
    rises = [
        first_update(item.curve, rise, {}) for item in items for rise in item.verdict.rises if rise.when != "early"
    ]
    return next((int(found["update"]) for found in rises if found is not None), None)


def _jump(loss: NDArray[np.float64], sds: float = 30.0) -> int | None:
    """Return where the loss jumps furthest over its usual spread; None for less than `sds` of it (rule of thumb), or below its beginning."""
    spreads = {
        k: (loss[k] - float(np.median(loss[k - 50 : k]))) / _noise(loss[k - 50 : k]) for k in range(50, len(loss))
    }
    jumps = [k for k, spread in spreads.items() if _finite(spread) > sds and loss[k] > np.median(loss[:10])]
    return max(jumps, key=spreads.__getitem__, default=None)


def _noise(losses: NDArray[np.float64]) -> float:
    middle = float(np.median(losses))
    return max(1.4826 * float(np.median(np.abs(losses - middle))), 1e-3 * abs(middle), 1e-30)


def _finite(value: Any) -> float:
    return float(value) if math.isfinite(value) else math.inf


class _Enough(Exception):
    """The replay has seen what it came for."""


class _Watch(Hook):
    """Keeps weights and buffers around one update, and what is known of the updates before it."""

    def __init__(self, update: int, back: int) -> None:
        self._update, self._at = (
            update,
            {update + back: "later", update + 1: "next", update: "at", update - back: "before"},
        )
        self.loop: TrainingLoop | None = None
        self.started, self.lr = 0, math.nan
        self.ratio: float | None = None
        self._moment: float | None = None
        self.weights: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        self.losses: list[float] = []
        self.lengths: list[float] = []

    def on_step(self, step: Step) -> None:
        assert self.loop is not None
        self.losses.append(float(step.loss))
        if step.index in self._at:
            buffers = {name: t.clone() for name, t in self.loop.stack.buffers.items()}
            self.weights[self._at[step.index]] = step.params.clone(), buffers
        if step.index <= self._update:
            self.lr, self.lengths = float(step.lr), [*self.lengths[-WINDOW:], float(step.update.norm())]
        if step.index == self._update and self._moment:
            self.ratio = float(step.grad.double().square().sum()) / self._moment
        if step.index == self._update - 1:
            self._moment = _second_moment(self.loop, self._update)
        if step.index >= max(self._at):
            raise _Enough


def _again(workload: Workload, config: TrainConfig, kept: Path, watch: _Watch, device: torch.device) -> _Watch:
    """Train from the last checkpoint that is `WINDOW` updates before the first weights that are kept, without evaluations."""
    steps = [int(path.name.partition("-")[2]) for path in kept.glob("step-*")]
    watch.started = max((step for step in steps if step <= min(watch._at) - WINDOW), default=0)
    config = config.replace(eval_every_steps=config.total_steps, checkpoint_every_steps=config.total_steps)
    with tempfile.TemporaryDirectory(prefix="workbench-replay-") as folder:
        about: dict[str, Any] = {"kind": "trial", "workload": workload.name, "config": config.to_dict()}
        with (
            contextlib.closing(StudyWriter.open(Path(folder) / "replay", **about)) as study,
            contextlib.suppress(_Enough),
        ):
            writer = study.trial(config.to_dict(), stage=Role.TRIAL, train_examples=len(workload.train_data))
            if watch.started:
                name = f"step-{watch.started:08d}"
                shutil.copytree(kept / name, writer.folder / "checkpoints" / name)
            how: dict[str, Any] = {
                "choose": partial(choose_gradients, wanted="loop"),
                "tracked": None,
                "progress": None,
            }
            watch.loop = TrainingLoop(
                workload, [Lane(config, writer)], study=study, device=device, hooks=[watch], **how
            )
            watch.loop.train()
    return watch


def _second_moment(loop: TrainingLoop, updates: int) -> float | None:
    """Return the sum of Adam's second moment after so many updates, its bias taken out; None for optimizers without one."""
    config, plain = loop.lanes[0].config, loop.updater.plain_state(0)
    named = str(config.optimizer) in ("adam", "adamw", "nadam")
    found = [t for name, t in loop.updater.state(0).items() if name.endswith("exp_avg_sq") or (name == "v" and named)]
    betas = [part[name] for part in (plain, *plain.get("optimizers", ())) for name in part if name.endswith("/betas")]
    beta = _second(betas[0]) if betas else config.beta2
    return float(sum(t.double().sum() for t in found)) / (1 - beta**updates) if found else None


def _second(betas: Any) -> float:
    """Return the second one of a pair as the optimizer's state has it: a tuple, or the list that it was given as."""
    value = next(iter(betas.values()))[1]
    return float.fromhex(value["float"]) if isinstance(value, Mapping) else float(value)


def _ratio(length: float, usual: float) -> float:
    """Return a length over the usual one; infinite where nothing moved before."""
    return length / usual if usual else math.inf if length else math.nan


def _losses(
    workload: Workload, config: TrainConfig, device: torch.device, indices: Sequence[int], weights: tuple[Tensor, Mapping[str, Tensor]]
) -> Tensor:  # fmt: skip
    """Return the loss of each example in evaluation mode; random preprocessing draws the same each time."""
    with isolated_rng():
        torch.manual_seed(0)
        items = IndexedDataset(workload.train_data, split="train").__getitems__(list(indices))
        stack = LaneStack(workload, [config], device)
        stack.values.copy_(weights[0])
        for name, tensor in weights[1].items():
            stack.buffers[name].copy_(tensor)
        how: dict[str, Any] = {"batch_size": config.batch_size, "device": device, "precision": config.precision}
        ((columns, _),) = values_each(workload.replace(validation_data=items), stack.models, split="validation", **how)
    return columns["loss"]
