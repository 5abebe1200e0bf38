"""One trial, step by step.

for step in range(total_steps):
    evaluate, checkpoint                       every fixed number of steps (P2.8)
    batch -> loss, gradient -> norm -> clip
    update = rule(gradient, lr(step))
    hooks.on_step                              they observe, nothing else
    parameters -= update
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from workbench.config import TrainConfig
from workbench.errors import RecordError, StudyInterrupted, WorkloadError
from workbench.record import TrialRecord, select_best
from workbench.record_writer import TrialWriter
from workbench.train.batches import train_batches
from workbench.train.checkpoint import latest_checkpoint, load_checkpoint, prune, save_checkpoint
from workbench.train.clipping import clip_by_norm, global_norm
from workbench.train.evaluation import evaluate
from workbench.train.explain import explained
from workbench.train.gradients import LoopGradients
from workbench.train.hooks.base import Hook, Run, Step
from workbench.train.interrupt import StopRequest, catch_interrupt
from workbench.train.progress import Progress
from workbench.train.state import TrialState
from workbench.train.step_log import StepLog
from workbench.workloads.base import Workload

__all__ = ["TrialRun"]

FLUSH_STEPS = 64  # rule of thumb: rows leave the device this often; a diverged trial is noticed as late as this
FLUSH_SECONDS = 5.0  # rule of thumb: what a crash may cost in rows; a resumed run trains them again


SYNC_SECONDS = 5.0  # rule of thumb: what a power cut, unlike a killed process, may cost in checkpoints


class TrialRun:
    """One trial from its first step, or its checkpoint, to its end."""

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        *,
        writer: TrialWriter,
        device: torch.device,
        hooks: Sequence[Hook],
        progress: Progress | None,
    ) -> None:
        self.workload, self.config, self.writer, self.device = workload, config, writer, device
        self.hooks, self.progress = hooks, progress
        self.state = TrialState(workload, config, device)
        self.gradients = LoopGradients(workload, self.state.model, self.state.flat, device, config.precision)
        self.log = StepLog(writer, self.state.lrs)
        self.checkpoints = writer.folder / "checkpoints"
        self.selected: dict[int, float] = {}
        self.seconds_before = 0.0
        self.last_flush = self.last_sync = self.began = time.perf_counter()

    def train(self) -> None:
        """Train to the end; leave a readable, resumable record whatever happens."""
        self._resume()
        slices = dict(zip(self.state.flat.names, self.state.flat.slices, strict=True))
        run = Run(self.state.model, self.workload, self.config, self.device, slices, self.state.step)
        started: list[Hook] = []
        self.began = time.perf_counter()
        try:
            for hook in self.hooks:
                started.append(hook)
                hook.on_start(run)
            with catch_interrupt() as stop:
                self._train(run, stop)
            self._finish("diverged" if self.log.diverged_at is not None else "stopped" if self._left() else "complete")
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.log.flush()
                self.writer.study.flush()
            with contextlib.suppress(RecordError):
                self.writer.event(
                    "ended", state="stopped" if stopped else "failed", error=f"{type(error).__name__}: {error}"
                )
            for later in self._end(started):
                error.add_note(f"Then a hook's on_end raised {type(later).__name__}: {later}")
            raise
        for first in self._end(started):
            raise first
        if self._left() and self.log.diverged_at is None:
            raise StudyInterrupted(
                f"stopped after step {self.state.step} of {self.config.total_steps}; everything is saved in "
                f"{self.writer.study.path}, and the same call goes on from there."
            )

    def _end(self, started: Sequence[Hook]) -> list[Exception]:
        """Call `on_end` of every hook that was started, whatever the others do, and return what they raised."""
        errors: list[Exception] = []
        record = TrialRecord(self.writer.study.path, self.writer.number)
        for hook in started:
            try:
                hook.on_end(record)
            except Exception as error:
                errors.append(error)
        return errors

    def _train(self, run: Run, stop: StopRequest) -> None:
        state, config = self.state, self.config
        batches = train_batches(self.workload, config, self.device, start_step=state.step)
        state.model.train()
        before = time.perf_counter()
        while state.step < config.total_steps and not stop.requested and self._on_cadence():
            run.step = step = state.step
            waiting = time.perf_counter()
            micro_batches = next(batches)
            data_wait_s = time.perf_counter() - waiting
            try:
                batch = self.gradients(micro_batches)
            except Exception:
                with explained(self.workload, f"at step {step}"):  # only now: a step that succeeds pays nothing for it
                    raise
            grad, lr = state.flat.grad, state.lr[step]
            norm = global_norm(grad)
            core = {"loss": batch.loss, "loss_se": batch.squared_se, "grad_norm": norm}
            if config.max_grad_norm is not None:
                clipped_grad, core["clipped"] = clip_by_norm(grad, norm, config.max_grad_norm)
                grad.copy_(clipped_grad)
            update = state.updater.update(state.flat.values, grad, lr, step, float(state.lrs[step]))
            now = time.perf_counter()
            event = Step(
                step, batch.loss.view(1), norm, lr[:, 0], state.flat.values, grad, update, data_wait_s, now - before
            )
            before = now
            for hook in self.hooks:
                hook.on_step(event)
            state.flat.values.sub_(update)
            self.log.append(step, core, event.recorded)
            state.step, state.evaluated = step + 1, False
        if state.step == config.total_steps:
            self._on_cadence()

    def _on_cadence(self) -> bool:
        """Evaluate, checkpoint and flush where this step calls for it; False once the trial has diverged."""
        step, config = self.state.step, self.config
        end = step == config.total_steps
        evaluation = (end or step % config.eval_interval == 0) and not self.state.evaluated
        checkpoint = (end or step % config.checkpoint_interval == 0) and step not in self._saved()
        if not (evaluation or checkpoint or len(self.log) >= FLUSH_STEPS or step == 1):
            return True
        self._flush(disk=checkpoint)
        if self.log.diverged_at is not None:
            return False
        if evaluation:
            self._evaluate()
        if checkpoint:
            self._checkpoint()
        return True

    def _flush(self, *, disk: bool) -> None:
        before = len(self.log)
        self.log.flush()
        if self.log.diverged_at == 0:
            raise WorkloadError(
                f"workload {self.workload.name!r}: the loss is not finite at step 0, before any update. Look at the data "
                "(NaN or infinite inputs), at the model's initialisation, and at logarithms or divisions in the loss."
            )
        if disk or time.perf_counter() - self.last_flush > FLUSH_SECONDS:
            self.writer.study.flush()
            self.last_flush = time.perf_counter()
        if self.progress is not None:
            self.progress(before)

    def _evaluate(self) -> None:
        config, step = self.config, self.state.step
        selected, metric = config.select.split("/", 1)
        rows = [
            {"trial": self.writer.number, "step": step, "split": split, "setting": "periodic", **result._asdict()}
            for split in sorted({"validation", selected})
            for result in evaluate(
                self.workload,
                self.state.model,
                split=split,
                batch_size=config.evaluation_batch,
                device=self.device,
                precision=config.precision,
            )
        ]
        for row in rows:
            if (row["split"], row["metric"]) == (selected, metric):
                self.selected[step] = float(str(row["value"]))
            for hook in self.hooks:
                hook.on_evaluation(MappingProxyType(row))
        self.writer.study.evals.add(_columns(rows))
        self.state.evaluated = True

    def _checkpoint(self) -> None:
        self.writer.study.flush()
        now = time.perf_counter()
        sync = not self._left() or now - self.last_sync > SYNC_SECONDS
        if sync:
            self.last_sync = now
        save_checkpoint(self.checkpoints, self.state.checkpoint(seconds=self._seconds()), sync=sync)
        prune(self.checkpoints, self.selected, keep_best=self.config.keep_best, mode=self.config.select_mode)

    def _saved(self) -> set[int]:
        latest = latest_checkpoint(self.checkpoints)
        return set() if latest is None else {int(latest.name.removeprefix("step-"))}

    def _resume(self) -> None:
        latest = latest_checkpoint(self.checkpoints)
        if latest is None:
            if self.writer.started:
                self.writer.rewind(-1)
            self.writer.event("started", state="running")
            return
        checkpoint = load_checkpoint(latest)
        self.state.load(checkpoint)
        self.seconds_before = float(checkpoint.meta["seconds"])
        self.writer.rewind(self.state.step)
        split, metric = self.config.select.split("/", 1)
        evals = self.writer.record.evals
        rows = evals[(evals["split"] == split) & (evals["metric"] == metric)]
        self.selected = dict(zip(rows["step"].astype(int).tolist(), rows["value"].tolist(), strict=True))
        self.writer.event("resumed", state="running", step=self.state.step)

    def _finish(self, state: str) -> None:
        self.log.flush()
        if state == "stopped":
            self._checkpoint()
        self.writer.study.flush()
        best = self._best()
        steps_run = self.state.step if self.log.diverged_at is None else self.log.diverged_at + 1
        self.writer.event(
            "ended",
            state=state,
            steps_run=steps_run,
            seconds=self._seconds(),
            best_step=None if best is None else best[0],
            best_value=None if best is None else best[1],
            diverged_at=self.log.diverged_at,
        )

    def _best(self) -> tuple[int, float] | None:
        return select_best(list(self.selected), list(self.selected.values()), mode=self.config.select_mode)

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _left(self) -> bool:
        return self.state.step < self.config.total_steps


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["num_correct"] = np.array([np.nan if v is None else v for v in columns["num_correct"]], dtype=np.float64)
    return columns
