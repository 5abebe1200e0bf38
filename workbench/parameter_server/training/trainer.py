"""`ParameterServerTrainer`: trials whose parameters live on servers and whose updates come from many workers, asynchronously (T1.2)."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import ConfigError, RecordError, StudyInterrupted, WorkloadError
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.context import PARTS
from workbench.parameter_server.coordinator.dispatch import BACK_S, MAX_ATTEMPTS
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.layout import Partitioner
from workbench.parameter_server.servers.replicas import BufferLog
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import load_placed, packed_state
from workbench.parameter_server.training.executor import ClusterExecutor, Task, trained
from workbench.parameter_server.training.load import load_facts, server_loads
from workbench.parameter_server.training.steps import GENERATORS, WorkerTrial, train_steps
from workbench.parameter_server.training.work_time import ClosureSize, Update, WorkTime
from workbench.progress import Progress, StopRequest, catch_interrupt
from workbench.record.read import TrialRecord
from workbench.record.repro import source_of
from workbench.record.watch import SHOW_SECONDS, early_wanted
from workbench.record.write import StudyWriter, TrialWriter
from workbench.train.checkpoint import Checkpoint
from workbench.train.evaluation import Evaluation, TrackedExamples, check_track, evaluate_each, tracked_examples
from workbench.train.example_values import evaluation_batch
from workbench.train.hooks import Hook
from workbench.train.lane import Lane, check_lanes, record_evaluation
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.train.steps.own_step import check_own_step
from workbench.train.trainer import run_alone
from workbench.workloads.base import Workload

STRETCH = 256
"""Updates between two writes where no evaluation is due (rule of thumb); an interrupt is noticed as late as this."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerTrainer:
    """Trains a trial on workers and parameter servers; studies and diagnoses take it in the place of `Trainer`.

    Each update is one worker's: it reads the parameters, computes a gradient on a batch of `batch_size`, and the servers apply it,
    while others do the same without waiting. So `total_steps` counts updates of all workers together, and with one worker and
    these seeds training is that of `Trainer`. Trials run one after the other. A trial that is resumed goes on from its checkpoint;
    which batches the workers see then is not what it would have been.

    Attributes:
        cluster: that is there, as `connect_to_cluster` returns it, and stays; `workers`, `servers` and `engine` are its own then. None starts
            one for a run on this machine.
        workers: how many compute.
        servers: how many hold parameters.
        engine: "threads" in this process, or "ray", a process each.
        variable_partitioner: splits parameters over servers; None places each whole.
        steps_per_closure: updates that a worker makes each time it is asked (T13.7); "auto" measures what asking costs and chooses (T14.3).
        evaluate_also: splits that are evaluated beside "validation" and the one that selection compares.
        track: examples whose predictions every evaluation writes down; see `Trainer`.
        hooks: told of evaluations only, because parameters are elsewhere.
        device: "cpu": workers compute there.
    """

    cluster: Cluster | None = None
    workers: int = 3
    servers: int = 2
    engine: Literal["threads", "ray"] = "threads"
    variable_partitioner: Partitioner | None = None
    steps_per_closure: int | Literal["auto"] = 1
    evaluate_also: Sequence[str] = ()
    track: int | Sequence[int] = 8
    hooks: Sequence[Hook] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_integer("workers", self.workers)
        check_integer("servers", self.servers)
        if self.steps_per_closure != "auto":
            check_integer("steps_per_closure", self.steps_per_closure)
        if self.engine not in ("threads", "ray"):
            raise ConfigError(f"engine={self.engine!r} is not known. Allowed: 'threads', 'ray'.")
        if self.device not in ("cpu", "auto"):
            raise ConfigError(
                f"device={self.device!r}: workers of a parameter server compute on the CPU here. Leave it out."
            )
        check_track(self.track)

    def run(
        self,
        workload: Workload,
        config: TrainConfig | None = None,
        *,
        out: str | Path | None = None,
        name: str | None = None,
        note: str | None = None,
        progress: bool = False,
    ) -> TrialRecord:
        """Train `workload` once and return its record; see `Trainer.run`."""
        own = self.cluster or self.hooks or self.variable_partitioner is not None  # no text stands for the user's own
        how: dict[str, Any] = {"out": out, "name": name, "note": note, "progress": progress}
        device, source = torch.device("cpu"), None if own else source_of(self)
        return run_alone(self, workload, config, self.run_trials, device=device, source=source, **how)

    def run_trials(
        self,
        workload: Workload,
        configs: Sequence[TrainConfig],
        study: StudyWriter,
        *,
        stage: str,
        progress: Progress | None = None,
    ) -> list[TrialRecord]:
        """Train trials one after the other on one cluster; finished ones are only returned. See `Trainer.run_trials`."""
        sizes = check_lanes(workload, configs)
        check_own_step(workload, configs, workers=self.workers)
        tracked = tracked_examples(workload, self.track)
        writers = [study.trial(c.to_dict(), stage=stage, train_examples=sizes["train"]) for c in configs]
        left = [(config, writer) for config, writer in zip(configs, writers, strict=True) if not writer.finished]
        if not left:
            return [writer.record for writer in writers]
        with isolated_rng(), self._cluster() as cluster:
            about: dict[str, Any] = {"study": study, "cluster": cluster, "tracked": tracked, "progress": progress}
            for config, writer in left:
                _to_its_end(lambda lane: PlacedRun(self, workload, lane, **about), config, writer)
        return [writer.record for writer in writers]

    def _cluster(self) -> contextlib.AbstractContextManager[Cluster]:
        if self.cluster is not None:
            return contextlib.nullcontext(self.cluster)
        return create_in_process_cluster(self.workers, self.servers, engine=self.engine)


def _to_its_end(begin: Callable[[Lane], PlacedRun], config: TrainConfig, writer: TrialWriter) -> None:
    """Train a trial; where a server dies it goes on from its newest checkpoint as soon as all are there again (T14.6)."""
    deaths: Counter[int] = Counter()  # by the update of the checkpoint that training went on from
    while True:
        run = begin(Lane(config, writer))
        first = run.step
        try:
            return run.train()
        except UnavailableError as error:
            deaths[first] += 1
            if error.job != "ps" or deaths[first] >= MAX_ATTEMPTS:
                raise
            run.coordinator.meet_servers(lambda: None, BACK_S)


class PlacedRun:
    """A trial from its first step, or its newest checkpoint, to its end.

    for each stretch up to the next evaluation or checkpoint:
        schedule its updates, steps_per_closure at a time      any worker takes any of them
        join, write their rows in the order in which the servers applied them
        evaluate and checkpoint on the coordinator
    """

    def __init__(
        self,
        trainer: ParameterServerTrainer,
        workload: Workload,
        lane: Lane,
        *,
        study: StudyWriter,
        cluster: Cluster,
        tracked: TrackedExamples | None,
        progress: Progress | None,
    ) -> None:
        self.workload, self.lane, self.study = workload, lane, study
        self.strategy = ParameterServerStrategy(cluster, variable_partitioner=trainer.variable_partitioner)
        self._executor = ClusterExecutor(self.strategy)
        self.coordinator = self._executor.coordinator
        splits = {"validation", *trainer.evaluate_also}
        self._evaluates: dict[str, Any] = {"splits": splits, "tracked": tracked, "hooks": trainer.hooks}
        self._asked, self._progress = trainer.steps_per_closure, progress
        self._time = WorkTime(cluster.num_workers)
        self._size = ClosureSize(self._asked, self._time)
        self._stack = LaneStack(workload, [lane.config], torch.device("cpu"))
        self._model = self._stack.models[0]
        names = zip(self._stack.names, self._stack.slices, strict=True)
        self._values = {name: self._stack.values[0, where] for name, where in names}
        self.step = lane.start_step
        self._buffers = BufferLog({})
        self._served: dict[tuple[str, int], float] = {}
        self._accounted_at = time.perf_counter()

    def train(self) -> None:
        """Train to the end; leave a readable, resumable record whatever happens."""
        config, number, coordinator = self.lane.config, self.lane.number, self.coordinator
        placed = self.strategy.place(
            self._model, config.replace(max_grad_norm=None), name=f"trial_{number}", embeddings="whole"
        )
        try:
            if self.lane.start is not None:
                self._model.load_state_dict(self.lane.start.model)
                load_placed(placed, self.lane.start)
            cluster = self.strategy.cluster
            self.lane.begin(
                lanes=1, gradients="parameter_server", workers=cluster.num_workers, servers=cluster.num_ps,
                engine=cluster.engine.name, data_plane=cluster.engine.plane.name, steps_per_closure=self._asked,
            )  # fmt: skip
            self._buffers = BufferLog(dict(self._model.named_buffers()))
            frozen = {k: v for k, v in self._model.named_parameters() if not v.requires_grad}
            local = {k: v.detach().clone() for k, v in [*self._model.named_buffers(), *frozen.items()]}
            make = partial(WorkerTrial, self.workload, config, self.step, cluster.num_workers, local)
            trial = coordinator.per_worker(make, what="trials")
            with catch_interrupt() as stop:
                self._train(trial, placed, stop)
            facts = load_facts(coordinator, placed, seconds=self.lane.seconds, asked=self._asked)
            known = self.study.record.facts.get("parameter_server") or {}
            self.study.add_facts(parameter_server=known | {str(number): facts | self._time.to_dict()})
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._write()
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            with contextlib.suppress(RecordError):
                self.lane.writer.event("ended", state=state, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            placed.delete()
        if stop.requested and self.step < config.total_steps:
            raise StudyInterrupted(
                f"stopped after step {self.step} of {config.total_steps}; everything is saved in {self.study.path}, and the same "
                "call resumes from there."
            )

    def _train(self, trial: Any, placed: Any, stop: StopRequest) -> None:
        self._on_cadence(placed)
        while self.step < self.lane.config.total_steps and not stop.requested:
            count, size = self._size.plan(min(self.lane.next_due(self.step), self.step + STRETCH) - self.step)
            until = self.step + count
            begun = time.perf_counter()
            tasks = [(train_steps, (trial, placed, min(size, until - at))) for at in range(self.step, until, size)]
            updates = self._stretch(tasks)
            spent = ((update.worker, update._asdict()) for update in updates)
            self._size.note(time.perf_counter() - begun, len(tasks), spent)
            self.step = until
            if self._write_rows(updates, server_loads(self.coordinator)):
                return
            self._on_cadence(placed)
        if stop.requested and self.step < self.lane.config.total_steps:
            self._read(placed)
            self._checkpoint(placed)
            self._write()
            self.lane.end("stopped", step=self.step)

    def _write_rows(self, updates: Sequence[Update], loads: Sequence[dict[str, Any]]) -> bool:
        """Write the rows of a stretch; True where the loss is not finite any more, which ends the trial."""
        bad = next((k for k, update in enumerate(updates) if not np.isfinite(update.loss)), None)
        if bad is not None and updates[bad].step == 0:
            raise WorkloadError(
                f"workload {self.workload.name!r}: the loss is not finite at step 0, before any update. Look at the data, at the "
                "model's initialisation, and at logarithms or divisions in the loss."
            )
        columns = self._columns(updates if bad is None else updates[: bad + 1])
        steps = columns["step"]
        for server, load in enumerate(loads):  # traffic an update since the stretch before, at the last step
            for name, now in (("bytes", load["bytes_in"] + load["bytes_out"]), ("requests", load["requests"])):
                column = columns[f"server_{name}/{server}"] = np.full(len(steps), np.nan, np.float32)
                column[-1:] = (now - self._served.get((name, server), 0)) / max(1, len(steps))
                self._served[name, server] = now
        self.study.steps.add(columns)
        if self._progress is not None:
            self._progress(len(updates))
        if bad is None:
            return False
        self._write()
        self._account()
        self.lane.end("diverged", step=self.step, diverged_at=int(steps[-1]))
        return True

    def _stretch(self, tasks: Sequence[Task]) -> list[Update]:
        """Return the updates of these functions in the servers' order; while somebody looks on, show those before the first gap."""
        updates: list[Update] = []
        shown_at = time.perf_counter()
        with contextlib.closing(trained(self._executor, tasks, self._buffers)) as results:  # type: ignore[type-var]
            for _, made in results:
                updates += made.updates
                if early_wanted() and time.perf_counter() - shown_at >= SHOW_SECONDS:
                    updates.sort()
                    ends = (k for k, update in enumerate(updates) if update.step != self.step + k)
                    shown = updates[: next(ends, len(updates))]
                    bad = next((k + 1 for k, update in enumerate(shown) if not np.isfinite(update.loss)), len(shown))
                    self.study.steps.show(self._columns(shown[:bad]))
                    shown_at = time.perf_counter()
        return sorted(updates)

    def _columns(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the rows of these updates, but for what the servers say."""

        def column(name: str, dtype: type) -> Any:
            return np.array([getattr(update, name) for update in updates], dtype)

        steps = column("step", np.int64)
        columns: dict[str, Any] = {"trial": np.full(len(updates), self.lane.number, np.int32), "step": steps}
        columns |= {name: column(name, np.float64) for name in ("loss", "loss_se")} | {"lr": self.lane.lrs[steps]}
        columns |= {"grad_norm": column("grad_norm", np.float64), "clipped": column("clipped", np.int8)}
        spent = {name: column(name, np.float32) for name in PARTS}
        late = np.maximum(0, column("staleness_steps", np.float32))
        return columns | spent | {
            "step_time_s": sum(spent.values()), "staleness_steps": late, "worker": column("worker", np.float32)
        }  # fmt: skip

    def _on_cadence(self, placed: Any) -> None:
        """Evaluate and checkpoint where this step calls for it."""
        lane, step = self.lane, self.step
        evaluates, saves = lane.evaluation_due(step), lane.checkpoint_due(step)
        if evaluates or saves:
            self._read(placed)
        if evaluates:
            record_evaluation(self.workload, self.study, [lane], step, self._evaluate, **self._evaluates)
        if saves:
            self._checkpoint(placed)
        if evaluates or saves:
            self._write()
        if step == lane.config.total_steps:
            self._account()
            lane.end("complete", step=step)

    def _read(self, placed: Any) -> None:
        """Bring the coordinator's model up to date: parameters from the servers, buffers from the workers."""
        placed.pull_into(self._values)
        merged = self._buffers.merged()
        for name, buffer in self._model.named_buffers():
            buffer.copy_(merged[name])

    def _evaluate(self, split: str, tracked: TrackedExamples | None) -> list[list[Evaluation]]:
        config, device = self.lane.config, self._stack.device
        with GENERATORS, self._stack.untouched():
            size = evaluation_batch(self.workload, config, device)
            how: dict[str, Any] = {"batch_size": size, "device": device, "precision": config.precision}
            return evaluate_each(self.workload, [self._model], split=split, tracked=tracked, **how)

    def _checkpoint(self, placed: Any) -> None:
        self._account()
        model = {name: tensor.detach().cpu().clone() for name, tensor in self._model.state_dict().items()}
        state = placed.state_dict() | {"buffers": {}}  # those of the coordinator's model are in `model`
        meta = {"evaluated": self.lane.evaluated_at == self.step, "seconds": self.lane.seconds, "optimizer": {}}
        self.lane.checkpoints.add(Checkpoint(self.step, model, packed_state(state, model), meta), self.lane.selected)

    def _write(self) -> None:
        self.study.flush()
        self.lane.checkpoints.write(self.lane.selected)

    def _account(self) -> None:
        now = time.perf_counter()
        self.lane.seconds += now - self._accounted_at
        self._accounted_at = now
