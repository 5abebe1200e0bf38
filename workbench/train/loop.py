"""`TrainingLoop`: K trials that train together, step by step.

for step in range(total_steps):
    evaluate, checkpoint                       every fixed number of steps (P2.8); lanes that ended leave the stack
    batch -> loss, gradient -> norm -> clip    of every lane
    update = rule(gradient, lr(step))
    hooks.on_step                              they observe, nothing else
    parameters -= update
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import CheckpointError, RecordError, StudyInterrupted, WorkloadError, in_one_line
from workbench.progress import Progress, StopRequest, catch_interrupt
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.watch import SHOW_SECONDS, early_wanted
from workbench.record.write import StudyWriter
from workbench.train.batches import DataStream
from workbench.train.checkpoint import Checkpoint, host_copies, until_written
from workbench.train.distributed.batch_norm import merged_running_statistics, synchronise_batch_norm
from workbench.train.distributed.data_parallel import (
    average_gradients,
    check_same_weights,
    evaluate_on_hosts,
    exchange_room,
    gather_states,
    own_state,
    running_statistics,
)
from workbench.train.distributed.process_group import ALONE, HostGroup
from workbench.train.evaluation import Evaluation, TrackedExamples
from workbench.train.example_values import evaluation_batch
from workbench.train.forward import MicroBatches, explained
from workbench.train.gradients import fault_of_weights, is_own_config
from workbench.train.hooks import Hook, Run, Step, watchers
from workbench.train.lane import Lane, LaneLog, common_backend, record_evaluation
from workbench.train.lanes.backend import Chosen
from workbench.train.optimizers import Updater, UpdateRule, make_updater
from workbench.train.rng import capture_rng, seed_all
from workbench.train.stacked_weights import LaneStack, update_unless_overflown
from workbench.train.steps.own_step import OwnStep, first_update
from workbench.train.update_rules import clip_by_norm, clip_thresholds, global_norm
from workbench.workloads.base import Workload

FLUSH_STEPS = 64  # rule of thumb: rows leave the device this often; a diverged lane is noticed as late as this
FLUSH_SECONDS = 5.0  # rule of thumb: what a crash may cost in rows; a resumed run trains them again


class TrainingLoop:
    """One stack of lanes from the step that they begin with to the end of the longest."""

    def __init__(
        self,
        workload: Workload,
        lanes: Sequence[Lane],
        *,
        study: StudyWriter,
        device: torch.device,
        hooks: Sequence[Hook],
        tracked: TrackedExamples | None,
        choose: Callable[..., Chosen],
        progress: Progress | None,
        splits: Sequence[str] = (),
        hosts: HostGroup = ALONE,
        synchronised: bool = False,
    ) -> None:
        self.workload, self.study, self.device, self.hosts = workload, study, device, hosts
        self.lanes, self.hooks, self.progress = list(lanes), hooks, progress
        self._splits = {"validation", *splits}
        self._choose, self._tracked = choose, tracked
        self.step = lanes[0].start_step
        seeds = sorted({lane.config.per_host_seed for lane in lanes})
        configs = [lane.config for lane in lanes]
        if hosts.size == 1:
            evaluation_batch(workload, configs[0], device)  # remembered: it builds a model, before there is another one
        self.stack = LaneStack(workload, configs, device, streams=[seeds.index(c.per_host_seed) for c in configs])
        self.own = None if workload.step is None else OwnStep(workload, configs[0], self.stack, start=self.step)
        trained = self.stack.values, self.stack.parameters, self.stack.models
        self.updater: Updater | OwnStep = self.own or make_updater(configs, *trained)
        unread = hosts.size == 1 and not any(hook.reads_gradient for hook in hooks)
        self._in_gradient = unread and isinstance(self.updater, UpdateRule)  # so that the update takes no memory
        if hosts.rank:  # dropout differs from host to host (P7.6)
            seed_all(configs[0].shared_seed, configs[0].per_host_seed, hosts.rank)
            self.stack.rng.load(0, capture_rng())
        if hosts.size > 1 and synchronised:
            self.stack.models[0] = synchronise_batch_norm(self.stack.models[0])
        check_same_weights(hosts, self.stack.values, self.stack.names)
        self._exchanged = self.stack.make_room(exchange_room(hosts)) if hosts.size > 1 else self.stack.grad
        self.streams = [self._stream(seed) for seed in seeds]
        self._load()
        if any(lane.apart for lane in lanes):
            self.stack.rng.keep_apart()
        self._set_constants()
        self.log = LaneLog(study.steps)
        self._gradients: Chosen | None = None
        self.began = [lane.number for lane in lanes]
        slices = dict(zip(self.stack.names, self.stack.slices, strict=True))
        self.run = Run(self.stack.models, workload, configs, device, slices, tuple(self.began), self.step)
        self._next = self.step
        self._flushed_at = self._accounted_at = self._shown_at = time.perf_counter()

    def train(self) -> None:
        """Train to the end; leave a readable, resumable record whatever happens."""
        started: list[Hook] = []
        steps = max(lane.config.total_steps for lane in self.lanes)
        try:
            attached, watched = watchers(self.stack.models[0]), None
            for hook in self.hooks:
                started.append(hook)
                hook.on_start(self.run)
                if watched is None and watchers(self.stack.models[0]) != attached:
                    watched = type(hook).__name__
            for model in self.stack.models:
                model.train()
            with catch_interrupt() as stop:
                self._gradients = gradients = self._choose_backend(watched)
                how = {"lanes": len(self.lanes), **gradients.describe()}
                for lane in self.lanes:
                    lane.begin(**how)
                self._train(gradients, stop)
                if self.lanes:  # interrupted: every lane is saved so that it goes on from this very step
                    self._flush()
                    self._account()
                    self._keep_checkpoints([lane.checkpoints.latest != self.step for lane in self.lanes])
                    self._write()
                    for lane in self.lanes:
                        lane.end("stopped", step=self.step)
        except BaseException as error:
            self._abandon(error)
            for later in self._end(started):
                error.add_note(f"Then a hook's on_end raised {type(later).__name__}: {later}")
            raise
        finally:
            if self._gradients is not None:
                self._gradients.close()
        for first in self._end(started):
            raise first
        if stop.requested:
            raise StudyInterrupted(
                f"stopped after step {self.step} of {steps}; the same command or cell resumes from what is kept in {self.study.path}."
            )

    def _choose_backend(self, watched: str | None) -> Chosen:
        configs = [lane.config for lane in self.lanes]
        with explained(self.workload, f"at step {self.step}"):
            return self._choose(
                self.workload, configs, self.stack, self.streams, steps=max(c.total_steps for c in configs) - self.step,
                watched=watched, study=self.study, before=common_backend(self.lanes), excused=self._excused, own=self.own,
            )  # fmt: skip

    def _excused(self, row: int, error: Exception, batches: MicroBatches, training: bool) -> bool:
        """Tell whether a lane whose code raised has diverged; the person's own training says what it raises."""
        lane = self.lanes[row]
        own = self.hosts.size > 1 or self.step == 0 or is_own_config(self.workload, lane.config)
        at_fault = partial(fault_of_weights, self.workload, lane.config, self.device, update=first_update)
        excused = not own and at_fault(error=error, batches=batches, training=training)
        if excused:
            lane.writer.event("raised", step=self.step, error=in_one_line(error))
        return excused

    def _train(self, gradients: Chosen, stop: StopRequest) -> None:
        fell_back = False
        self._on_cadence()
        before = time.perf_counter()
        while self.lanes and not self._stopped(stop):
            self.run.step = step = self.step
            self.run.batches = batches = [stream.next() for stream in self.streams]
            try:
                batch = gradients(batches)
            except Exception:
                where = f"at step {step}"
                if gradients.lane is not None and len(self.began) > 1:
                    where += f" of {self.lanes[gradients.lane].name}"
                with explained(self.workload, where):  # only now: a step that succeeds pays nothing
                    raise
            if gradients.fell_back and not fell_back:
                fell_back = True
                for lane in self.lanes:
                    lane.writer.event("changed", step=step, **gradients.describe())
            values, grad, lr = self.stack.values, self.stack.grad, self._lr[step]
            if self.hosts.size > 1:
                share = self.lanes[0].config.batch_size // self.hosts.size
                batch = average_gradients(self.hosts, self._exchanged, batch, examples=share)
            core = {"loss": batch.loss, "loss_se": batch.squared_se, "grad_norm": global_norm(grad), **batch.core}
            norm = core["grad_norm"]
            if self._thresholds is not None:
                _, core["clipped"] = clip_by_norm(grad, norm, self._thresholds, out=grad)
            how = lr, step, self._host_lr[step]
            out = grad if self._in_gradient else None
            update, scaling = update_unless_overflown(self.stack.scale, self.updater, values, grad, *how, out=out)
            now = time.perf_counter()
            wait_s = sum(stream.wait_s for stream in self.streams)
            event = Step(step, batch.loss, norm, lr[:, 0], values, grad, update, wait_s, now - before, self.run.trials)
            event.recorded.update({**scaling, **batch.recorded})
            before = now
            for hook in self.hooks:
                hook.on_step(event)
            values.sub_(update) if self.own is None else values.copy_(self.own.after)
            self.log.append(step, core, event.recorded)
            self.step = step + 1
            if self.step >= self._next or len(self.log) >= FLUSH_STEPS:
                self._on_cadence()
                before = self._shown_at = time.perf_counter()
            elif now - self._shown_at >= SHOW_SECONDS and early_wanted():  # an observer does not wait for the flush
                self.log.show(self.lanes)
                before = self._shown_at = time.perf_counter()

    def _on_cadence(self) -> None:
        """Evaluate, checkpoint and flush where this step calls for it; lanes that diverged or ended leave."""
        step = self.step
        self._flush()
        if evaluated := [lane for lane in self.lanes if lane.evaluation_due(step)]:
            self._evaluate(evaluated)
        self._keep_checkpoints([lane.checkpoint_due(step) for lane in self.lanes])
        if any(lane.checkpoints.due for lane in self.lanes):
            self._write()
        if ended := [lane for lane in self.lanes if step == lane.config.total_steps]:
            self.study.flush()
            self._finish("complete", dict.fromkeys(ended))
        self._next = 1 if step == 0 else min((lane.next_due(step) for lane in self.lanes), default=step)

    def _flush(self) -> None:
        """Hand the rows on; lanes that are not finite any more are recorded and leave."""
        self.stack.rng.check_host()
        steps = len(self.log)
        diverged = self.log.flush(self.lanes)
        if len(diverged) == len(self.lanes) and set(diverged.values()) == {0}:
            raise WorkloadError(
                f"workload {self.workload.name!r}: the loss is not finite at step 0, before any update. Look at the data "
                "(NaN or infinite inputs), at the model's initialisation, and at logarithms or divisions in the loss."
            )
        if self.progress is not None and steps:
            self.progress(steps * len(self.lanes))
        if diverged or time.perf_counter() - self._flushed_at > FLUSH_SECONDS:
            self.study.flush()
            self._flushed_at = time.perf_counter()
        if diverged:
            self._finish("diverged", {self.lanes[row]: at for row, at in diverged.items()})

    def _finish(self, state: str, ended: Mapping[Lane, int | None]) -> None:
        """Record how lanes ended, and at which step they diverged; pack the rest together."""
        self._account()
        for lane, diverged_at in ended.items():
            lane.checkpoints.write(lane.selected)
            lane.end(state, step=self.step, diverged_at=diverged_at)
        rows = [row for row, lane in enumerate(self.lanes) if lane not in ended]
        self.lanes = [self.lanes[row] for row in rows]
        if rows:
            self.stack.keep(rows)
            self.updater.keep(rows)
            self._set_constants()
            read = sorted(set(self.stack.streams))
            self.streams = [self.streams[stream] for stream in read]
            self.stack.streams = [read.index(stream) for stream in self.stack.streams]
        self.run.models = self.stack.models if rows else []
        self.run.trials = tuple(lane.number for lane in self.lanes)
        self.run.configs = [lane.config for lane in self.lanes]

    def _evaluate(self, lanes: Sequence[Lane]) -> None:
        gradients = self._gradients
        assert gradients is not None
        noted, config, model = gradients.evaluated_alone, lanes[0].config, self.stack.models[0]
        rows = [self.lanes.index(lane) for lane in lanes]

        def evaluate(split: str, tracked: TrackedExamples | None) -> list[list[Evaluation]]:
            if self.hosts.size == 1:
                batch_size = evaluation_batch(self.workload, config, self.device)
                return gradients.evaluate(split, batch_size, rows=rows, tracked=tracked)
            with self.stack.untouched(), merged_running_statistics(model):
                found = evaluate_on_hosts(
                    self.hosts, self.workload, model, split=split, batch_size=config.evaluation_batch, device=self.device,
                    precision=config.precision, tracked=tracked,
                )  # fmt: skip
            return [found]

        how: dict[str, Any] = {"splits": self._splits, "tracked": self._tracked, "hooks": self.hooks}
        record_evaluation(self.workload, self.study, lanes, self.step, evaluate, **how)
        if gradients.evaluated_alone != noted:
            for lane in self.lanes:
                lane.writer.event("evaluated alone", step=self.step, why=gradients.evaluated_alone)

    def _stopped(self, stop: StopRequest) -> bool:
        """Whether to stop now; many processes agree on it when rows are flushed, so that they stop at the same step."""
        if self.hosts.size > 1:
            if len(self.log):
                return False
            stop.requested = self.hosts.any(stop.requested)
        return stop.requested

    def _keep_checkpoints(self, due: Sequence[bool]) -> None:
        for row in np.flatnonzero(due).tolist():
            self.lanes[row].checkpoints.add(self._checkpoint(row), self.lanes[row].selected)

    def _checkpoint(self, row: int) -> Checkpoint:
        """Return everything that lane `row` goes on from."""
        self._account()
        lane, trained = self.lanes[row], self.stack.models[row]
        own = {
            "rng": self.stack.rng.state(row),
            "data": self.streams[self.stack.streams[row]].state(),
            "statistics": running_statistics(self.hosts, trained),
        }
        states = {f"{kind}/{name}": t for kind, tensors in own.items() for name, t in tensors.items()}
        states = gather_states(self.hosts, host_copies(states))
        with merged_running_statistics(trained) if self.hosts.size > 1 else contextlib.nullcontext():
            model = (host_copies if self.hosts.size > 1 else until_written)(trained.state_dict())
        optimizer = until_written({f"optimizer/{name}": t for name, t in self.updater.state(row).items()})
        plain = self.updater.plain_state(row)
        meta = {"evaluated": lane.evaluated_at == self.step, "seconds": lane.seconds, "optimizer": plain}
        meta |= {} if self.stack.scale is None else self.stack.scale.state()
        return Checkpoint(self.step, model, optimizer | states, meta)

    def _load(self) -> None:
        """Go back to the lanes' checkpoints, random state included."""
        for row, lane in enumerate(self.lanes):
            checkpoint = lane.start
            if checkpoint is None:
                continue
            parts = self._parts(checkpoint)
            try:
                self.stack.models[row].load_state_dict(checkpoint.model)
                self.updater.load(row, parts["optimizer"], checkpoint.meta["optimizer"])
            except (RuntimeError, LookupError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint of step {checkpoint.step} does not fit the model "
                    f"({str(error).splitlines()[-1].strip()}). The code of the workload has changed since: give a new folder "
                    "with out=..."
                ) from error
            if self.stack.scale is not None:
                self.stack.scale.load(checkpoint.meta)
            for name, tensor in running_statistics(self.hosts, self.stack.models[row]).items():
                tensor.copy_(parts["statistics"].get(name, tensor))
            if parts["rng"]:
                self.stack.rng.load(row, parts["rng"])

    def _parts(self, checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
        """Return optimizer, rng, data and statistics; the last three are this process's own, and a new one has none."""
        stored = {n: t for n, t in checkpoint.trainer.items() if n.startswith("optimizer/")}
        stored |= own_state(self.hosts, checkpoint.trainer) or {}
        kinds = ("optimizer", "rng", "data", "statistics")
        return {k: {n.split("/", 1)[1]: t for n, t in stored.items() if n.startswith(f"{k}/")} for k in kinds}

    def _stream(self, seed: int) -> DataStream:
        lane = next(lane for lane in self.lanes if lane.config.per_host_seed == seed)
        state = None if lane.start is None else self._parts(lane.start)["data"]
        place = {"rank": self.hosts.rank, "hosts": self.hosts.size}
        return DataStream(self.workload, lane.config, self.device, start_step=self.step, state=state, **place)

    def _set_constants(self) -> None:
        """Put what differs between lanes and steps on the device: learning rates and clipping thresholds."""
        self._host_lr = np.zeros((max((len(lane.lrs) for lane in self.lanes)), len(self.lanes)))  # 0 after a lane's end
        for row, lane in enumerate(self.lanes):
            self._host_lr[: len(lane.lrs), row] = lane.lrs
        dtype = self.stack.values.dtype
        self._lr = torch.as_tensor(self._host_lr, dtype=dtype).to(self.device).unsqueeze(2)
        configs = [] if self.own else [lane.config for lane in self.lanes]
        self._thresholds = clip_thresholds(configs, self.stack.values)

    def _account(self) -> None:
        """Share the time since the last call equally among the lanes."""
        now = time.perf_counter()
        for lane in self.lanes:
            lane.seconds += (now - self._accounted_at) / len(self.lanes)
        self._accounted_at = now

    def _write(self) -> None:
        self.study.flush()
        self._flushed_at = time.perf_counter()
        for lane in self.lanes:
            if lane.start is None:  # else it has not begun again, and does not know its best checkpoints yet
                lane.checkpoints.write(lane.selected)

    def _abandon(self, error: BaseException) -> None:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        with contextlib.suppress(Exception):  # the first error is the one to report
            self.log.flush(self.lanes)
            self._write()
        for lane in self.lanes:
            with contextlib.suppress(RecordError):
                lane.writer.event("ended", state=state, error=f"{type(error).__name__}: {error}")

    def _end(self, started: Sequence[Hook]) -> list[Exception]:
        """Call `on_end` of every hook that was started, whatever the others do, and return what they raised."""
        errors: list[Exception] = []
        path, numbers = self.study.path, self.began
        record = TrialRecord(path, numbers[0]) if len(numbers) == 1 else StudyRecord(path, frozenset(numbers))
        for hook in started:
            try:
                hook.on_end(record)
            except Exception as error:
                errors.append(error)
        return errors
