"""`Lane`: one trial in the record, from its first step or its checkpoint to its end; which of them train together, and their rows."""

import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError, WorkbenchError
from workbench.record.read import periodic_rows, select_best
from workbench.record.tables import PartWriter
from workbench.record.write import StudyWriter, TrialWriter
from workbench.schedules import lr_values
from workbench.train.checkpoint import CheckpointStore, SilentStore, latest_checkpoint, load_checkpoint
from workbench.train.evaluation import TRACKED_SPLIT, Evaluation, TrackedExamples, check_first, evaluation_columns
from workbench.train.forward import is_out_of_memory
from workbench.train.hooks import Hook
from workbench.train.rng import LateDraws
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_selection
from workbench.workloads.subsets import subset_of

SHARED = ("batch_size", "accumulate_steps", "precision", "evaluation_batch", "bn_stat_examples")
"""What the lanes of a stack have in common; everything else may differ."""
STATE_SHARE = 0.5  # rule of thumb: of the bound, for weights, gradients and optimizers; activations get the rest
FREE_SHARE = 0.8  # rule of thumb: of what is free now; the rest is for what nobody counted
OPTIMIZER_COPIES = 4  # two moments, the update and what it is made from: the most of a built-in rule, per parameter
_CORE = ("loss", "loss_se", "lr", "grad_norm", "clipped")


class Lane:
    """One trial as the loop sees it: its config, what was selected so far, and where its rows and checkpoints go."""

    def __init__(self, config: TrainConfig, writer: TrialWriter, *, apart: bool = False) -> None:
        self.config, self.writer = config, writer
        self.apart = apart  # whether Python's and NumPy's random numbers are its own from the first step on
        self.lrs = lr_values(config)
        folder = writer.folder / "checkpoints"
        self.checkpoints: CheckpointStore | SilentStore = SilentStore()
        if writer.writes:
            self.checkpoints = CheckpointStore(folder, keep_best=config.keep_best, mode=config.select_mode)
        self.selected: dict[int, float] = {}
        self.seconds = 0.0
        self.evaluated_at = -1
        path = latest_checkpoint(folder) if writer.writes else None
        self.start = None if path is None else load_checkpoint(path)

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self.writer.number

    @property
    def start_step(self) -> int:
        """Updates made before this call."""
        return 0 if self.start is None else self.start.step

    @property
    def name(self) -> str:
        """How an error calls it."""
        return f"trial {self.number} (peak_lr={self.config.peak_lr:g}, shared_seed={self.config.shared_seed})"

    def begin(self, **how: Any) -> None:
        """Drop the rows that come again, and note that the trial is running and how."""
        if self.start is None:
            if self.writer.events:
                self.writer.rewind(-1)
            self.writer.event("started", state="running", **how)
            return
        self.seconds = float(self.start.meta["seconds"])
        self.evaluated_at = self.start.step if self.start.meta["evaluated"] else -1
        self.writer.rewind(self.start.step)
        if self.writer.writes:
            split, metric = self.config.select.split("/", 1)
            evals = periodic_rows(self.writer.record.evals)
            rows = evals[(evals["split"] == split) & (evals["metric"] == metric)]
            self.selected = dict(zip(rows["step"].astype(int).tolist(), rows["value"].tolist(), strict=True))
        self.writer.event("resumed", state="running", step=self.start.step, **how)
        self.start = None

    def evaluation_due(self, step: int) -> bool:
        """Whether the trial is evaluated at this step: at fixed numbers of steps, the first and the last (P2.8)."""
        return self.evaluated_at != step and (step == self.config.total_steps or step % self.config.eval_interval == 0)

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is made at this step."""
        due = step == self.config.total_steps or step % self.config.checkpoint_interval == 0
        return due and self.checkpoints.latest != step

    def next_due(self, step: int) -> int:
        """Return the first step after `step` at which something of this trial is due."""
        every = (self.config.eval_interval, self.config.checkpoint_interval)
        return min(self.config.total_steps, *(interval * (step // interval + 1) for interval in every))

    def rows(self, step: int, split: str, results: Sequence[Evaluation], *, subset: str = "") -> list[dict[str, Any]]:
        """Return the rows of `.evals` for one evaluated split, and remember what selection compares."""
        for result in results:
            if f"{split}/{result.metric}" == self.config.select:
                self.selected[step] = result.value
        self.evaluated_at = step
        place = {"trial": self.number, "step": step, "split": split, "setting": "periodic"}
        return [{**place, **result._asdict(), "subset": subset} for result in results]

    def end(self, state: str, *, step: int, diverged_at: int | None = None) -> None:
        """Note how the trial ended."""
        best = select_best(list(self.selected), list(self.selected.values()), mode=self.config.select_mode)
        self.writer.event(
            "ended",
            state=state,
            steps_run=step if diverged_at is None else diverged_at + 1,
            seconds=self.seconds,
            best_step=None if best is None else best[0],
            best_value=None if best is None else best[1],
            diverged_at=diverged_at,
        )


def check_lanes(workload: Workload, configs: Sequence[TrainConfig]) -> dict[str, int]:
    """Check every config against the workload before anything is written; return the sizes of the splits."""
    if not configs:
        raise UsageError("configs is empty: give at least one TrainConfig to train.")
    seen: dict[TrainConfig, int] = {}
    sizes: dict[str, int] = {}
    for number, config in enumerate(configs):
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"configs[{number}] must be a TrainConfig, not {type(config).__name__}.")
        if config in seen:
            raise ConfigError(
                f"configs[{seen[config]}] and configs[{number}] are the same (peak_lr={config.peak_lr:g}, "
                f"shared_seed={config.shared_seed}): a trial is trained once. Leave one out, or give it another seed."
            )
        seen[config] = number
        try:
            sizes = check_data(workload, config)
            check_selection(workload, config)
            lr_values(config)
        except WorkbenchError as error:
            if len(configs) > 1:
                raise type(error)(f"configs[{number}] (peak_lr={config.peak_lr:g}): {error}") from error
            raise
    return sizes


def group_lanes(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Return the lanes stack by stack: of one batch size, precision and first step; those of a rule side by side, so that it works on a slice."""
    groups: dict[Hashable, list[Lane]] = {}
    for lane in lanes:
        # each scales its loss, and skips steps of its own
        alone = lane.number if lane.config.precision == "float16" else None
        key = (lane.start_step, alone, *(getattr(lane.config, name) for name in SHARED))
        groups.setdefault(key, []).append(lane)
    return [
        sorted(group, key=lambda lane: (str(lane.config.optimizer), lane.config.rules)) for group in groups.values()
    ]


def train_stacks(lanes: Sequence[Lane], train: Callable[[Sequence[Lane]], None], *, fit: int) -> None:
    """Train all lanes, at most `fit` at a time in stacks of about equal size; one that runs out of memory after all is halved."""
    count = -(-len(lanes) // max(1, fit))
    for piece in range(count):
        stack = lanes[piece * len(lanes) // count : (piece + 1) * len(lanes) // count]
        again, apart = (len(stack) + 1) // 2, any(lane.apart for lane in stack)
        try:
            train(stack)
            continue
        except LateDraws:
            again, apart = len(stack), True
        except Exception as error:
            if len(stack) == 1 or not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():  # outside the handler, whose traceback holds the stack that failed
            torch.cuda.empty_cache()
        left = [Lane(lane.config, lane.writer, apart=apart) for lane in stack if not lane.writer.finished]
        for group in group_lanes(left):  # their newest checkpoints need not be of the same step
            train_stacks(group, train, fit=again)


def lane_bytes(stack: LaneStack) -> int:
    """Return the bytes that one more lane adds to a stack."""
    trained = stack.values[0].nbytes * (2 + OPTIMIZER_COPIES)
    return trained + sum(t[0].nbytes for t in (*stack.frozen.values(), *stack.buffers.values()))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device now; what torch holds without using it counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what the machine has is a guess that leaves room
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def lanes_in_a_stack(workload: Workload, lanes: Sequence[Lane], device: torch.device, bound: int | None) -> int:
    """Return how many of the lanes fit in memory together, of which `bound` bytes may be taken; None is a share of what is free."""
    if len(lanes) < 2 or workload.step is not None:
        return 1
    allowed = available_bytes(device) * FREE_SHARE if bound is None else bound
    return max(1, int(allowed * STATE_SHARE) // lane_bytes(LaneStack(workload, [lanes[0].config], device)))


def room_for_calls(stack: LaneStack, *, bound: int | None) -> int:
    """Return the bytes that the activations of a stack may take; `bound` is for all of it, None a share of what is free."""
    if bound is not None:
        return max(0, bound - lane_bytes(stack) * len(stack))
    return int(available_bytes(stack.device) * FREE_SHARE)


def common_backend(lanes: Sequence[Lane]) -> dict[str, Any] | None:
    """Return the event that says which gradient backend trained lanes that go on from checkpoints; None where they differ."""
    events = [[e for e in lane.writer.events if "gradients" in e] if lane.start else [] for lane in lanes]
    last = [each[-1] if each else None for each in events]
    keys = ("gradients", "lanes_per_call", "threads")
    return last[0] if len({tuple((event or {}).get(key) for key in keys) for event in last}) == 1 else None


def record_evaluation(
    workload: Workload,
    study: StudyWriter,
    lanes: Sequence[Lane],
    step: int,
    evaluate: Callable[[str, TrackedExamples | None], list[list[Evaluation]]],
    *,
    splits: Collection[str],
    tracked: TrackedExamples | None,
    hooks: Sequence[Hook],
) -> None:
    """Evaluate lanes on `splits` and those that their selection names, write the rows down and call the hooks."""
    rows: list[dict[str, Any]] = []
    selected = [lane.config.select.split("/", 1)[0] for lane in lanes]
    for split in sorted({*splits, *selected}):
        part = subset_of(workload.data(split))
        to_track = tracked if split == TRACKED_SPLIT else None
        results = evaluate(split, to_track)
        if to_track is not None:
            study.predictions.add(to_track.columns([lane.number for lane in lanes], step))
        for lane, own, found in zip(lanes, selected, results, strict=True):
            if step == 0:
                check_first(workload, split, found)
            if split in {*splits, own}:
                rows += lane.rows(step, split, found, subset="" if part is None else part.id)
    for row in rows:
        for hook in hooks:
            hook.on_evaluation(MappingProxyType(row))
    study.evals.add(evaluation_columns(rows))


class LaneLog:
    """Collects the rows of K lanes between two flushes; the lanes may change only when it is empty."""

    def __init__(self, steps: PartWriter) -> None:
        self._steps = steps
        self._first = 0
        self._core: dict[str, list[Tensor]] = {"loss": [], "loss_se": [], "grad_norm": [], "clipped": []}
        self._extra: dict[str, list[tuple[int, Any]]] = {}

    def __len__(self) -> int:
        """Steps not yet handed on."""
        return len(self._core["loss"])

    def append(self, step: int, core: Mapping[str, Tensor], extra: Mapping[str, Tensor | float]) -> None:
        """Keep one step: tensors of shape (lanes,), or plain numbers that all lanes share."""
        if not self._core["loss"]:
            self._first = step
        for name, tensor in core.items():
            self._core[name].append(tensor)
        for name, value in extra.items():
            self._extra.setdefault(name, []).append((step - self._first, value))

    def flush(self, lanes: Sequence[Lane]) -> dict[int, int]:
        """Hand the rows to the record, up to a lane's first non-finite loss; return row -> step of each lane that has one."""
        if not len(self):
            return {}
        block, bad = self._block(lanes, self._extra)
        self._steps.add(block)
        for values in self._core.values():
            values.clear()
        self._extra.clear()
        return bad

    def show(self, lanes: Sequence[Lane]) -> None:
        """Show the rows to observers; they stay here, and what is flushed later is the same."""
        if len(self):
            timed = {name: pairs for name, pairs in self._extra.items() if name == "step_time_s"}
            self._steps.show(self._block(lanes, timed)[0])

    def _block(
        self, lanes: Sequence[Lane], extra: Mapping[str, list[tuple[int, Any]]]
    ) -> tuple[dict[str, Any], dict[int, int]]:
        """Return the rows, and what `flush` returns."""
        count, first = len(self), self._first
        shape = (len(lanes), count)
        columns = {name: _stack(values, len(lanes)) for name, values in self._core.items() if values}
        columns["loss_se"] = np.sqrt(columns["loss_se"])
        columns["lr"] = np.stack([lane.lrs[first : first + count] for lane in lanes])
        columns["clipped"] = columns.get("clipped", np.zeros(shape)).astype(np.int8)
        columns = {name: columns[name] for name in _CORE}
        for name, pairs in extra.items():  # NaN where nothing was measured
            measured = [value for _, value in pairs]
            if isinstance(measured[0], Tensor):
                values = _stack(measured, len(lanes))
            else:
                values = np.broadcast_to(np.array(measured, dtype=np.float32), (len(lanes), len(measured)))
            columns[name] = np.full(shape, np.nan, dtype=values.dtype)
            columns[name][:, [i for i, _ in pairs]] = values
        bad = ~np.isfinite(columns["loss"])
        ends = np.where(bad.any(1), bad.argmax(1) + 1, count)
        kept = np.arange(count) < ends[:, None]
        block: dict[str, Any] = {
            "trial": np.repeat(np.array([lane.number for lane in lanes], np.int32), count)[kept.ravel()],
            "step": np.tile(np.arange(count) + first, len(lanes))[kept.ravel()],
        }
        block |= {name: values[kept] for name, values in columns.items()}
        return block, {int(row): int(first + ends[row] - 1) for row in np.flatnonzero(bad.any(1))}


def _stack(values: list[Tensor], lanes: int) -> np.ndarray:
    """Return shape (lanes, steps)."""
    stacked = torch.stack([v.detach().reshape(-1).expand(lanes) for v in values], dim=1).cpu()
    short = stacked.dtype in (torch.bfloat16, torch.float16)  # NumPy has no bfloat16
    return (stacked.float() if short else stacked).numpy()
