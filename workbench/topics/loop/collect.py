"""`watch`: a loop of one's own, recorded as a study while it runs."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from workbench.checks import check_integer, check_number
from workbench.errors import UsageError, in_one_line
from workbench.findings.diagnosis import Diagnosis
from workbench.instruments.log import listen, numbers, split_of
from workbench.instruments.losses.attention import WINDOW
from workbench.instruments.observer import LoopObserver
from workbench.instruments.parameters import described
from workbench.instruments.rows import Value
from workbench.instruments.taps import TAPS
from workbench.programs.own_config import own_config, own_threshold
from workbench.record.folder import read_json, write_json
from workbench.record.metrics import larger_is_better
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.record.write import StudyWriter, TrialWriter

FLUSH_SECONDS = 1.0
"""Between two writes to disk, each of which costs some milliseconds; more where the disk or the machine is slow, so that they take a four-hundredth of the time and of the processor's."""
_LONGEST_PAUSE = 10.0
_LOG = logging.getLogger(__name__)
_NOTHING = "nothing was recorded yet: the loop runs inside `with wb.watch(...) as run:`."


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    out: str | Path | None = None,
    *,
    name: str | None = None,
    note: str | None = None,
    steps: int | None = None,
    every: int = 50,
    share: float | None = 0.01,
    minimised: bool = True,
) -> WatchedRun:
    """Return a context manager that records the loop inside it: loss, lr, gradient norms, data wait, and what the loop does in which order.

    It observes only: losses are bitwise the same with and without it, and nothing is left behind when it ends. The record is a study's:
    `wb.open`, live view, figures, `run.diagnose()` and the report read it.

        with wb.watch(model, optimizer, out="runs/mine") as run:
            for inputs, targets in loader:
                ...
                run.log(validation_loss=value)  # where there is something to log

    Args:
        model: what is trained; several in a list.
        optimizer: what trains it; several in a list, of which the first counts updates.
        out: the study's folder, or, where that holds one already, the first of "mine-2", "mine-3" ... that holds none (`run.path` tells);
            None is a new one under `runs/`.
        name: of the study; None is the folder's.
        note: a short description; None writes one.
        steps: updates that are planned, where known: a run that ends before is then known to be cut short.
        every: updates between two looks at parameter and update norms.
        share: of the processor's time of a step that looks may take, on the mean over the updates after the first 200, up to 4 * `every` apart;
            ten times as much before, after the first 20, which are all looked at. The rest is passed over, with a loss and as many gradient norms
            as a quarter of that share pays for, all of them where the loop clips. None looks at every update.
        minimised: the loss is to fall; False for policy gradients and the like, whose curves say nothing.

    Raises:
        UsageError: `model` is no module, or `optimizer` no `torch.optim.Optimizer`.
        RecordError: the folder cannot be used.
    """
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for what, given, kind in (("model", models, nn.Module), ("optimizer", optimizers, Optimizer)):
        wrong = next((each for each in given if not isinstance(each, kind)), None)
        if wrong is not None or not given:
            raise UsageError(
                f"watch({what}=...) needs a torch {kind.__name__}, or several in a list; given: {type(wrong).__name__ if given else 'none'}."
            )
    check_integer("every", every)
    if share is not None:
        check_number("share", share, below=1.0)
    if steps is not None:
        check_integer("steps", steps)
    inner = [_innermost(each) for each in optimizers]
    return WatchedRun(
        models, inner, out, name=name, note=note, steps=steps, every=every, share=share, minimised=minimised
    )


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose `step` does the work, where others are wrapped around it, as Accelerate's and Lightning's."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, Optimizer) else optimizer


def _free(out: Path) -> Path:
    """Return the folder, or the first of "mine-2", "mine-3" ... that holds no study yet."""
    number, found = 1, out
    while (found / "study.json").exists():
        number += 1
        found = out.with_name(f"{out.name}-{number}")
    return found


def _label(model: nn.Module) -> str:
    """Name a training by the script that it is in, in a notebook by its model's class."""
    script = Path(sys.argv[0])
    own = script.suffix == ".py" and script.stem not in ("__main__", "ipykernel_launcher")
    return script.stem if own else type(model).__name__


class WatchedRun:
    """A loop that is being recorded; see `watch`.

    Attributes:
        path: the study's folder.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], out: str | Path | None, *, name: str | None, note: str | None,
        steps: int | None, every: int, share: float | None, minimised: bool,
    ) -> None:  # fmt: skip
        self._minimised = minimised
        self._models, self._optimizers, self._steps, self._every = models, optimizers, steps, every
        self._share = share
        self._given = {"name": name, "note": note}
        self._out = None if out is None else Path(out)
        self._writer: StudyWriter | None = None
        self._trial: TrialWriter | None = None
        self._handles: list[RemovableHandle] = []
        self._undo_criteria: Any = None
        self._written = 0
        self._last_loss: float | None = None
        self._best: dict[tuple[str, str], dict[str, float]] = {}  # metric and mode -> best value so far, and its step
        self._peak_lr = -math.inf
        self._broken = self._running = False

    def __enter__(self) -> Self:
        """Begin to record."""
        if self._writer is not None:
            raise UsageError("this watch has been used already: call wb.watch(...) again for another run.")
        fields = self._config({})
        label = _label(self._models[0])
        self._writer = StudyWriter.open(
            self._out and _free(self._out), kind="watch", workload=label, config=fields, settings={"every": self._every, "share": self._share},
            note=self._given["note"] or f"watched training of {label}", name=self._given["name"],
        )  # fmt: skip
        self.path = self._writer.path
        if not self._minimised:
            self._writer.add_facts(minimised=False)
        self._trial = self._writer.trial(fields, stage=Role.BASELINE, train_examples=0)
        self._observer = LoopObserver(
            self._take, optimizers=self._optimizers, models=self._models, every=self._every, share=self._share
        )
        TAPS.add(self._observer, self._tell_once)
        self._handles = self._observer.facts.modes.attach(self._entered)
        self._undo_criteria = TAPS.watch_criteria()
        self._unlisten = listen(self._told)
        self._running = True
        self._flushed, self._pause = time.monotonic(), FLUSH_SECONDS
        self._worked, self._due = time.process_time(), FLUSH_SECONDS
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the rest, and leave the loop as it was."""
        assert self._writer is not None
        for does in (self._detach, partial(self._close, error), self._writer.close):
            self._guarded(does)

    def plan(self, steps: int) -> None:
        """Say how many updates are planned, where that is known only after the watch began."""
        check_integer("steps", steps)
        self._steps = steps

    def log(self, *, split: str = "validation", **values: Value) -> None:
        """Record values of the update in progress.

        `loss` takes the place of the one that `backward` was called on. `validation_loss=0.3` is an evaluated metric of the split
        "validation", as is `accuracy=0.9`, of `split`. A value that is no number is left out.
        """
        loss = values.pop("loss", None)
        if loss is not None:
            self._observer.log(loss=loss.detach() if isinstance(loss, Tensor) else float(loss))
        if not values or self._writer is None or self._trial is None:
            return
        rows = [(*split_of(name, split), value) for name, value in numbers(values).items()]
        for place, metric, value in rows:
            score = larger_is_better(metric)
            if place != "train" and math.isfinite(value) and (score or metric.endswith("loss")):
                one = {"best_value": value, "best_step": self._observer.updates}
                old = self._best.setdefault((f"{place}/{metric}", "max" if score else "min"), one)
                if value > old["best_value"] if score else value < old["best_value"]:
                    old |= one
        columns: dict[str, Any] = {
            "trial": [self._trial.number] * len(rows), "step": [self._observer.updates] * len(rows), "split": [r[0] for r in rows],
            "setting": ["periodic"] * len(rows), "metric": [r[1] for r in rows], "value": [r[2] for r in rows],
            "num_examples": [math.nan] * len(rows), "num_correct": [math.nan] * len(rows), "seconds": [math.nan] * len(rows),
            "subset": [""] * len(rows),
        }  # fmt: skip
        self._guarded(partial(self._writer.evals.add, columns))

    @property
    def record(self) -> TrialRecord:
        """What was recorded so far."""
        if self._trial is None or self._writer is None:
            raise UsageError(_NOTHING)
        if self._running:
            self._observer.flush()
        return self._trial.record if self._writer.path.exists() else TrialRecord(self.path, 0)

    def diagnose(self) -> Diagnosis:
        """Return the diagnosis of what was recorded, and write it as `diagnosis.json` into the folder; `workbench report` makes the page."""
        from workbench.topics.loop.judge import judge_watched

        if self._writer is None:
            raise UsageError(_NOTHING)
        if self._running:
            self._observer.flush()
            self._writer.add_facts(loop=self._observer.facts.to_dict())
        return judge_watched(self.path)

    # ---- nothing in here may end or change the loop

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            if not self._observer.passes_over(args):
                self._observer.entered(module, args)
        except Exception as error:
            self._tell_once(error)

    def _take(self, columns: Mapping[str, list[float]]) -> None:
        if self._writer is None or self._trial is None:
            return
        count = len(next(iter(columns.values())))
        first = self._written
        self._written += count
        whole = {"trial": [self._trial.number] * count, "step": list(range(first, first + count)), **columns}
        self._peak_lr = max(self._peak_lr, *filter(math.isfinite, {*columns.get("lr", ())}), -math.inf)
        self._last_loss = columns["loss"][-1] if "loss" in columns else None
        self._guarded(lambda: self._add(whole))
        if self._undo_criteria is not None and self._written >= WINDOW:
            self._undo_criteria()
            self._undo_criteria = None

    def _add(self, columns: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.steps.add(columns)
        now, busy = time.monotonic(), time.process_time()
        passed, worked = now - self._flushed, busy - self._worked
        if (passed >= self._pause and worked >= self._due) or passed >= _LONGEST_PAUSE or not self._running:
            self._flushed, self._worked = now, busy
            self._writer.flush()
            self._pause = min(max(FLUSH_SECONDS, 400 * (time.monotonic() - now)), _LONGEST_PAUSE)
            self._due = 400 * (time.process_time() - busy)

    def _told(self, values: Mapping[str, Any]) -> None:
        self._guarded(lambda: self.log(**values))

    def _guarded(self, does: Any) -> None:
        try:
            does()
        except Exception as error:
            self._tell_once(error)

    def _tell_once(self, error: Exception) -> None:
        if not self._broken:
            self._broken = True
            _LOG.warning("wb.watch stopped recording (%s); the training continues unchanged.", in_one_line(error))

    def _detach(self) -> None:
        TAPS.remove(self._observer)
        self._unlisten()
        for handle in self._handles:
            handle.remove()
        if self._undo_criteria is not None:
            self._undo_criteria()
        self._handles, self._undo_criteria = [], None
        self._running = False

    def _close(self, error: BaseException | None) -> None:
        assert self._writer is not None
        assert self._trial is not None
        self._observer.flush()
        facts = self._observer.facts
        facts.ended = error is None
        updates = self._observer.updates
        loop = facts.to_dict()
        fields = self._config(loop)
        study = read_json(self.path / "study.json")
        write_json(self.path / "study.json", study | {"config": fields})
        stored = read_json(self._trial.folder / "config.json")
        write_json(self._trial.folder / "config.json", stored | {"config": fields})
        self._writer.add_facts(loop=loop)
        state = "complete" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        if self._last_loss is not None and not math.isfinite(self._last_loss):
            state = "diverged"
        why = {} if error is None else {"error": in_one_line(error)}
        self._trial.event("end", state=state, steps_run=updates, **why, **self._best.get(self._select, {}))
        self._writer.finish()

    @property
    def _select(self) -> tuple[str, str]:
        """Return the metric that says which checkpoint is best, and its mode: the validation loss where it was logged."""
        least = ("train/loss", "min")
        return min(
            self._best, key=lambda m: (not m[0].startswith("validation/"), not m[0].endswith("/loss")), default=least
        )

    def _config(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is known of the config now, as JSON values: `facts` are the loop's, empty before it begins."""
        first = self._optimizers[0]
        return own_config(
            described(first), (self._peak_lr,) if self._peak_lr > -math.inf else (),
            updates=max(self._observer.updates if facts else 0, self._steps or 0), batch_size=facts["loaders"]["batch_size"] if facts else None,
            other=type(first), select=self._select[0], select_mode=self._select[1], max_grad_norm=own_threshold(facts) if facts else None,
        ).to_dict()  # fmt: skip
