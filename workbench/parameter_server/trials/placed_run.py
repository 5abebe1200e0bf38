"""One trial on parameter servers: updates are scheduled from one evaluation or checkpoint to the next, and written down.

for each stretch up to the next evaluation or checkpoint:
    schedule its updates, steps_per_closure at a time      any worker takes any of them
    join, write their rows in the order in which the servers applied them
    evaluate and checkpoint on the coordinator
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from workbench.errors import RecordError, StudyInterrupted, WorkloadError
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.trials.closure_size import closure_size
from workbench.parameter_server.trials.load import load_facts
from workbench.parameter_server.trials.work_time import WorkTime
from workbench.parameter_server.trials.worker_trial import GENERATORS, Made, Update, WorkerTrial, train_steps
from workbench.parameter_server.workers.closure import RemoteValue
from workbench.parameter_server.workers.replica_buffers import ReplicaBuffers, merged_buffers
from workbench.record.watch import SHOW_SECONDS, early_wanted
from workbench.record.write import StudyWriter
from workbench.train.checkpoint import Checkpoint
from workbench.train.coupled_losses import evaluation_batch
from workbench.train.evaluation import Evaluation, TrackedExamples, evaluate_each
from workbench.train.hooks import Hook
from workbench.train.lane import Lane, record_evaluation
from workbench.train.lane_stack import LaneStack
from workbench.train.progress import Progress, StopRequest, catch_interrupt
from workbench.workloads.base import Workload

STRETCH = (
    256  # rule of thumb: updates between two writes where no evaluation is due; an interrupt is noticed as late as this
)

MEASURED = 4  # updates a worker, one by one, before steps_per_closure="auto" is chosen (rule of thumb)


class PlacedRun:
    """A trial from its first step, or its newest checkpoint, to its end.

    Args:
        study: where rows go.
        strategy: where parameters go.
        splits: evaluated beside "validation" and the one that selection compares.
        tracked: examples whose predictions are kept at every evaluation; None is none.
        hooks: told of evaluations.
        steps_per_closure: updates that a worker makes each time it is asked; "auto" measures what asking costs first.
        progress: called with the number of updates made.
    """

    def __init__(
        self,
        workload: Workload,
        lane: Lane,
        *,
        study: StudyWriter,
        strategy: ParameterServerStrategy,
        splits: Sequence[str],
        tracked: TrackedExamples | None,
        hooks: Sequence[Hook],
        steps_per_closure: int | Literal["auto"],
        progress: Progress | None,
    ) -> None:
        self.workload, self.lane, self.study, self.strategy = workload, lane, study, strategy
        self._splits = {"validation", *splits}
        self._tracked, self._hooks, self._progress = tracked, hooks, progress
        self._asked = steps_per_closure
        self._time = WorkTime(strategy.num_workers)
        self._costs: tuple[float, list[float]] | None = None
        self._replicas: dict[int, ReplicaBuffers] = {}
        self._stack = LaneStack(workload, [lane.config], torch.device("cpu"))
        self._model = self._stack.models[0]
        names = zip(self._stack.names, self._stack.slices, strict=True)
        self._values = {name: self._stack.values[0, where] for name, where in names}
        self.step = lane.start_step
        self._start: dict[str, torch.Tensor] = {}
        self._before: dict[int, dict[str, float]] = {}
        self._accounted_at = time.perf_counter()

    def train(self) -> None:
        """Train to the end; leave a readable, resumable record whatever happens."""
        config = self.lane.config
        coordinator = ClusterCoordinator(self.strategy)
        placed = self.strategy.place(self._model, config.replace(max_grad_norm=None), name=f"trial_{self.lane.number}")
        try:
            if self.lane.start is not None:
                self._load(placed)
            cluster = self.strategy.cluster
            self.lane.begin(
                lanes=1, gradients="parameter_server", workers=cluster.num_workers, servers=cluster.num_ps,
                engine=cluster.engine.name, data_plane=cluster.engine.plane.name, steps_per_closure=self._asked,
            )  # fmt: skip
            self._start = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
            frozen = {k: v.detach().clone() for k, v in self._model.named_parameters() if not v.requires_grad}
            make = partial(WorkerTrial, self.workload, config, self.step, cluster.num_workers, self._start | frozen)
            trial = coordinator.per_worker(make, what="trials")
            with catch_interrupt() as stop:
                self._train(coordinator, trial, placed, stop)
            self.study.add_facts(parameter_server=self._facts(coordinator, placed))
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            placed.delete()
        if stop.requested and self.step < config.total_steps:
            raise StudyInterrupted(
                f"stopped after step {self.step} of {config.total_steps}; everything is saved in {self.study.path}, and the same "
                "call goes on from there."
            )

    def _train(self, coordinator: ClusterCoordinator, trial: Any, placed: Any, stop: StopRequest) -> None:
        self._on_cadence(placed)
        while self.step < self.lane.config.total_steps and not stop.requested:
            until = self._until()
            counts = _counts(until - self.step, self._closure_size(until - self.step))
            begun = time.perf_counter()
            values = [coordinator.schedule(train_steps, args=(trial, placed, count)) for count in counts]
            self._show(values)
            coordinator.join()
            seconds, made = time.perf_counter() - begun, [value.fetch() for value in values]
            updates = sorted(update for each in made for update in each.updates)
            if self.step:  # the first update of all makes the replicas
                self._time.add(seconds, len(counts), updates)
            self._keep_buffers(made)
            self.step = until
            if self._write_rows(updates):
                return
            self._on_cadence(placed)
        if stop.requested and self.step < self.lane.config.total_steps:
            self._read(placed)
            self._checkpoint(placed)
            self._write()
            self.lane.end("stopped", step=self.step)

    def _until(self) -> int:
        """Return the step up to which updates are scheduled at once."""
        if not self.step:
            return 1
        until = min(self.lane.next_due(self.step), self.step + STRETCH)
        measuring = self._asked == "auto" and not self._time.updates
        return min(until, self.step + MEASURED * self.strategy.num_workers) if measuring else until

    def _closure_size(self, updates: int) -> int:
        if self._asked != "auto":
            return self._asked
        if not self._time.updates:
            return 1
        if self._costs is None:
            self._costs = self._time.dispatch_s, self._time.step_s
        return closure_size(*self._costs, updates)

    def _keep_buffers(self, made: Sequence[Made]) -> None:
        """Keep the newest buffers of each worker."""
        for each in made:
            known = self._replicas.get(each.worker)
            if known is None or each.buffers.updates > known.updates:
                self._replicas[each.worker] = each.buffers

    def _write_rows(self, updates: Sequence[Update]) -> bool:
        """Write the rows of a stretch; True where the loss is not finite any more, which ends the trial."""
        bad = next((k for k, update in enumerate(updates) if not np.isfinite(update.loss)), None)
        if bad is not None and updates[bad].step == 0:
            raise WorkloadError(
                f"workload {self.workload.name!r}: the loss is not finite at step 0, before any update. Look at the data, at the "
                "model's initialisation, and at logarithms or divisions in the loss."
            )
        columns = self._columns(updates if bad is None else updates[: bad + 1])
        steps = columns["step"]
        self.study.steps.add(columns | self._traffic(steps))
        if self._progress is not None:
            self._progress(len(updates))
        if bad is None:
            return False
        self._write()
        self._account()
        self.lane.end("diverged", step=self.step, diverged_at=int(steps[-1]))
        return True

    def _show(self, values: Sequence[RemoteValue[Made]]) -> None:
        """While somebody looks on, show the rows that are there, up to the first update that is still on its way."""
        shown_at = time.perf_counter()
        for value in values if early_wanted() else ():
            while not value.done():
                with contextlib.suppress(Exception):  # not yet, or an error, which `join` raises
                    value.fetch(SHOW_SECONDS)
                if time.perf_counter() - shown_at >= SHOW_SECONDS:
                    self.study.steps.show(self._columns(self._made_so_far(values)))
                    shown_at = time.perf_counter()

    def _made_so_far(self, values: Sequence[RemoteValue[Made]]) -> list[Update]:
        updates: list[Update] = []
        for value in values:
            if value.done():
                with contextlib.suppress(Exception):
                    updates += value.fetch().updates
        updates.sort()
        gap = next((k for k, update in enumerate(updates) if update.step != self.step + k), len(updates))
        bad = next((k + 1 for k, update in enumerate(updates) if not np.isfinite(update.loss)), gap)
        return updates[: min(gap, bad)]

    def _columns(self, kept: Sequence[Update]) -> dict[str, Any]:
        """Return the rows of these updates, but for what the servers say."""
        steps = np.array([update.step for update in kept], np.int64)
        columns: dict[str, Any] = {
            "trial": np.full(len(kept), self.lane.number, np.int32),
            "step": steps,
            "loss": np.array([update.loss for update in kept]),
            "loss_se": np.array([update.loss_se for update in kept]),
            "lr": self.lane.lrs[steps],
            "grad_norm": np.array([update.grad_norm for update in kept]),
            "clipped": np.array([update.clipped for update in kept], np.int8),
        }
        for name in ("data_wait_s", "pull_s", "compute_s", "push_s"):
            columns[name] = np.array([getattr(update, name) for update in kept], np.float32)
        columns["step_time_s"] = columns["data_wait_s"] + columns["pull_s"] + columns["compute_s"] + columns["push_s"]
        columns["staleness_steps"] = np.array([max(0, update.staleness_steps) for update in kept], np.float32)
        columns["worker"] = np.array([update.worker for update in kept], np.float32)
        return columns

    def _traffic(self, steps: np.ndarray) -> dict[str, Any]:
        """Return what each server sent, received and answered an update, since it was asked last; at the last step of the stretch."""
        found: dict[str, Any] = {}
        for server, load in enumerate(self._load_of_servers()):
            before = self._before.get(server, {})
            for name in ("bytes", "requests"):
                column = np.full(len(steps), np.nan, np.float32)
                if len(steps):
                    column[-1] = (load[name] - before.get(name, 0)) / len(steps)
                found[f"server_{name}/{server}"] = column
            self._before[server] = load
        return found

    def _load_of_servers(self) -> list[dict[str, float]]:
        plane, cluster = self.strategy.cluster.engine.plane, self.strategy.cluster
        found = []
        for server in range(cluster.num_ps):
            blocks = plane.ask(server, "load_report").values()
            found.append({
                "bytes": sum(block["bytes_in"] + block["bytes_out"] for block in blocks),
                "requests": sum(block["requests"] for block in blocks),
            })  # fmt: skip
        return found

    def _on_cadence(self, placed: Any) -> None:
        """Evaluate and checkpoint where this step calls for it."""
        lane, step = self.lane, self.step
        due = lane.evaluation_due(step), lane.checkpoint_due(step)
        if any(due):
            self._read(placed)
        if due[0]:
            self._evaluate()
        if due[1]:
            self._checkpoint(placed)
        if any(due):
            self._write()
        if step == lane.config.total_steps:
            self._account()
            lane.end("complete", step=step)

    def _read(self, placed: Any) -> None:
        """Bring the coordinator's model up to date: parameters from the servers, buffers from the workers."""
        placed.pull_into(self._values)
        merged = merged_buffers(self._start, self._replicas)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(merged[name])

    def _evaluate(self) -> None:
        config, device = self.lane.config, self._stack.device

        def evaluate(split: str, tracked: TrackedExamples | None) -> list[list[Evaluation]]:
            with GENERATORS, self._stack.untouched():
                size = evaluation_batch(self.workload, config, device)
                how: dict[str, Any] = {"batch_size": size, "device": device, "precision": config.precision}
                return evaluate_each(self.workload, [self._model], split=split, tracked=tracked, **how)

        record_evaluation(
            self.workload, self.study, [self.lane], self.step, evaluate, splits=self._splits, tracked=self._tracked,
            hooks=self._hooks,
        )  # fmt: skip

    def _checkpoint(self, placed: Any) -> None:
        self._account()
        state = placed.state_dict()
        model = {name: tensor.detach().cpu().clone() for name, tensor in self._model.state_dict().items()}
        trainer = {
            f"optimizer/{slot}/{name}": value for slot, whole in state["slots"].items() for name, value in whole.items()
        }
        trainer |= {f"plain/{slot}": value for slot, value in state["plain_slots"].items()}
        meta = {"evaluated": self.lane.evaluated_at == self.step, "seconds": self.lane.seconds, "optimizer": {}}
        self.lane.checkpoints.add(Checkpoint(self.step, model, trainer, meta), self.lane.selected)

    def _load(self, placed: Any) -> None:
        checkpoint = self.lane.start
        assert checkpoint is not None
        self._model.load_state_dict(checkpoint.model)
        slots: dict[str, dict[str, Any]] = {}
        for name, tensor in checkpoint.trainer.items():
            kind, rest = name.split("/", 1)
            if kind == "optimizer":
                slot, parameter = rest.split("/", 1)
                slots.setdefault(slot, {})[parameter] = tensor
        plain = {name.split("/", 1)[1]: t for name, t in checkpoint.trainer.items() if name.startswith("plain/")}
        trained = dict(zip(self._stack.names, self._stack.parameters[0], strict=True))
        parameters = {name: p.detach() for name, p in trained.items()}
        placed.load_state_dict(
            {"parameters": parameters, "buffers": dict(self._model.named_buffers()), "slots": slots, "plain_slots": plain,
             "steps": checkpoint.step}
        )  # fmt: skip

    def _facts(self, coordinator: ClusterCoordinator, placed: Any) -> dict[str, Any]:
        before = self.study.record.facts.get("parameter_server") or {}
        return before | {
            str(self.lane.number): load_facts(
                coordinator, placed, seconds=self.lane.seconds, time=self._time, asked=self._asked
            )
        }

    def _write(self) -> None:
        self.study.flush()
        self.lane.checkpoints.write(self.lane.selected)

    def _account(self) -> None:
        now = time.perf_counter()
        self.lane.seconds += now - self._accounted_at
        self._accounted_at = now

    def _abandon(self, error: BaseException) -> None:
        """After an error: keep what there is, and say how the trial ended."""
        with contextlib.suppress(Exception):  # the first error is the one to report
            self._write()
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        with contextlib.suppress(RecordError):
            self.lane.writer.event("ended", state=state, error=f"{type(error).__name__}: {error}")


def _counts(steps: int, most: int) -> list[int]:
    """Return how many updates each closure makes."""
    return [min(most, steps - done) for done in range(0, steps, most)]
