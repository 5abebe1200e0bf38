"""`RayExecutor`: chunks of trials as tasks on the machines of a Ray cluster, written by this process alone."""

from __future__ import annotations

import builtins
import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

from workbench import errors
from workbench.config import TrainConfig
from workbench.errors import ClusterError, StudyInterrupted, UsageError, WorkbenchError
from workbench.progress import Progress, catch_interrupt
from workbench.ray.cluster import RayCluster, WorkerLost, node_of_this_worker, require_ray
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.write import StudyWriter, TrialWriter
from workbench.studies.executors.inbox import Inbox, Mailbox
from workbench.studies.executors.shipping import Shipment, pack_shipment, packed_configs
from workbench.studies.executors.worker import Ended, pack_chunk, train_chunk
from workbench.train.batches import resolve_device
from workbench.train.lane import SHARED, check_lanes
from workbench.train.lanes.backend import FACT, decide_for
from workbench.train.trainer import AnyTrainer, Trainer
from workbench.workloads.base import Workload

MOST_CPUS = 4  # rule of thumb: lanes in one process share each call; threads of one process get in each other's way
RERUNS = 3  # rule of thumb: a chunk that loses more workers than this is the reason for it
STOP_SECONDS = 60.0  # rule of thumb: what finishing a step and saving it may take
POLL_S = 0.1  # rule of thumb: how often it is looked for what workers have told
GONE_S = 5.0  # rule of thumb: a cluster without machines for so long gets none
PATIENCE_S = 30.0  # rule of thumb: whoever waits longer than this for a free CPU wants to know why


def plan_chunks(configs: Sequence[TrainConfig], workers: int) -> list[list[int]]:
    """Return positions in `configs`, chunk by chunk, the most work first."""
    groups: dict[Hashable, list[int]] = {}
    for position, config in enumerate(configs):
        key = (config.per_host_seed, *(getattr(config, name) for name in SHARED))
        groups.setdefault(key, []).append(position)
    lanes = math.ceil(len(configs) / max(1, workers))
    chunks: list[list[int]] = []
    for group in groups.values():
        # neighbours apart: in a sweep those with the highest learning rates end early, and their workers would stand idle
        count = math.ceil(len(group) / lanes)
        chunks += [group[first::count] for first in range(count)]
    work = [config.total_steps * config.batch_size for config in configs]
    return sorted(chunks, key=lambda chunk: -sum(work[position] for position in chunk))


class RayExecutor:
    """Runs chunks of trials as tasks of a cluster, whose processes stay between two calls of `run`."""

    def __init__(self, address: str | None = None, connect: Callable[[str | None], RayCluster] | None = None) -> None:
        if connect is None:
            require_ray()
        self._address, self._connect = address, connect or RayCluster.connect
        self._cluster: RayCluster | None = None
        self._mailbox: Any = None
        self._shipped: tuple[Workload, Trainer, Any] | None = None

    def run(
        self,
        workload: Workload,
        configs: Sequence[TrainConfig],
        study: StudyWriter,
        *,
        stage: str,
        trainer: AnyTrainer,
        progress: Progress | None = None,
    ) -> list[TrialRecord]:
        """Train what is not finished yet and return all records, in the order of `configs`."""
        if not isinstance(trainer, Trainer):
            raise UsageError(
                f"executor='ray' spreads trials that each run in one process; {type(trainer).__name__} spreads one trial over several. "
                "Leave the executor out."
            )
        sizes = check_lanes(workload, configs)
        finished = [trial.config for trial in StudyRecord(study.path) if TrialWriter(study, trial.number).finished]
        if any(config.to_dict() not in finished for config in configs):
            # before a trial gets its folder: an address may be wrong
            sweep = self._sweep(workload, trainer, configs[0], Inbox(study, progress), stage)
        writers = [study.trial(c.to_dict(), stage=stage, train_examples=sizes["train"]) for c in configs]
        todo = [(c, w) for c, w in zip(configs, writers, strict=True) if not w.finished]
        if todo:
            device, unfinished = resolve_device(trainer.device), [config for config, _ in todo]
            decide_for(workload, unfinished, study, device, wanted=trainer.gradients, beside=configs)
            stopped = sweep.run(todo, configs)
            left = sum(not writer.finished for _, writer in todo)
            if left or stopped:
                raise StudyInterrupted(
                    f"stopped with {left} of {len(todo)} trials unfinished; the same command or cell resumes from what is kept in {study.path}."
                )
        study.flush()
        return [TrialRecord(study.path, writer.number) for writer in writers]

    def __enter__(self) -> Self:
        """Return itself; nothing is started before the first trial."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the cluster, and end it where it was started here."""
        if self._cluster is not None:
            if self._mailbox is not None:
                self._cluster.kill(self._mailbox.worker)
            self._cluster.close()
        self._cluster = self._mailbox = self._shipped = None

    def _sweep(self, workload: Workload, trainer: Trainer, config: TrainConfig, inbox: Inbox, stage: str) -> _Sweep:
        """Return what trains the study's chunks on the cluster, which is joined the first time."""
        if self._cluster is None:
            self._cluster = self._connect(self._address)
        resource = "GPU" if resolve_device(trainer.device).type == "cuda" else "CPU"
        _machines(self._cluster, resource)
        if self._shipped is None or self._shipped[0] is not workload or self._shipped[1] is not trainer:
            shipment: Shipment = pack_shipment(self._cluster.pack, workload, trainer, config)
            self._shipped = (workload, trainer, self._cluster.share(shipment))
        if self._mailbox is None:
            self._mailbox = self._cluster.begin(Mailbox)
        return _Sweep(self._cluster, self._mailbox, self._shipped[2], inbox, stage, resource)


def _machines(cluster: RayCluster, resource: str) -> list[int]:
    """Return how many CPUs or GPUs each machine of the cluster has; a `ClusterError` where there is none."""
    if counts := [count for count in cluster.machines(resource) if count]:
        return counts
    other = ", or train with Trainer(device='cpu')" if resource == "GPU" else ""
    raise ClusterError(
        f"the Ray cluster has no {resource}. Add a machine that has with `ray start --address=...`{other}."
    )


@dataclass
class _Task:
    """A chunk on its way to being finished: its trials, how many workers it has lost, and where it trains now."""

    trials: list[tuple[TrainConfig, TrialWriter]]
    key: str = ""
    lost: int = 0
    where: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"node {self.where['ray_node'][:8]}, process {self.where['pid']}"


@dataclass
class _Sweep:
    """Brings chunks to their end on a cluster; this process alone writes what they find."""

    cluster: RayCluster
    mailbox: Any
    shipment: Any
    inbox: Inbox
    stage: str
    resource: str
    _together: Sequence[TrainConfig] = ()
    _cpus: int = 1
    _running: dict[Any, _Task] = field(default_factory=dict)
    _error: Exception | None = None
    _stop_by: float | None = None
    _waiting_since: float = field(default_factory=time.monotonic)

    def run(self, todo: Sequence[tuple[TrainConfig, TrialWriter]], configs: Sequence[TrainConfig]) -> bool:
        """Train until all trials are done, which were asked for with those of `configs`; after an interrupt, until all that runs has stopped."""
        self._together = configs
        counts = _machines(self.cluster, self.resource)
        if self.resource == "CPU":
            self._cpus = min(count // math.ceil(count / MOST_CPUS) for count in counts)
        room = sum(count // self._cpus for count in counts)
        try:
            for chunk in plan_chunks([config for config, _ in todo], room):
                self._submit(_Task([todo[position] for position in chunk]))
            with catch_interrupt() as stop:
                while self._running:
                    if stop.requested or self._error is not None:
                        self._stop()
                    done = self.cluster.ready(list(self._running), POLL_S)
                    self._read()  # all that was told before a task ended is there by now
                    for call in done:
                        self._ended(call, self._running.pop(call))
                    self._check()
        except WorkerLost as lost:  # the mailbox
            raise ClusterError(
                f"the Ray cluster is gone ({lost}). Everything that arrived is saved, and the same call resumes."
            ) from lost
        finally:
            for call in self._running:  # an error or a second Ctrl-C: nobody listens to them any more
                self.cluster.cancel(call)
            self._running.clear()
            self.inbox.flush()
        if self._error is not None:
            raise self._error
        return stop.requested

    def _submit(self, task: _Task) -> None:
        self.inbox.flush()
        task.key, task.where = uuid4().hex, {}
        own = [config for config, _ in task.trials]
        others = [config for config in self._together if config not in own]
        configs = packed_configs(self.cluster.pack, [*own, *others])
        numbers = [writer.number for _, writer in task.trials]
        chunk = pack_chunk(self.inbox.study, numbers, key=task.key, stage=self.stage, configs=configs)
        call = self.cluster.submit(
            train_chunk, self.shipment, chunk, self.mailbox, node_of_this_worker, self._cpus,
            cpus=self._cpus, gpus=int(self.resource == "GPU"),
        )  # fmt: skip
        self._running[call] = task

    def _read(self) -> None:
        """Write what was told since the last time."""
        tasks = {task.key: task for task in self._running.values()}
        for key, messages in self.mailbox.take():
            if key in tasks:  # else of a worker that nobody listens to any more
                self.inbox.apply(messages, tasks[key].where)

    def _ended(self, call: Any, task: _Task) -> None:
        self._waiting_since = time.monotonic()
        try:
            ended: Ended = self.cluster.result(call)
        except WorkerLost as lost:
            if self._stop_by is None:
                self._again(task, str(lost))
            return
        if found := ended.facts.get(FACT):  # later chunks go the same way
            known = self.inbox.study.record.facts.get(FACT, {})
            self.inbox.study.add_facts(**{FACT: {**found, **known}})
        if ended.state == "failed" and self._error is None:
            self._error = _error_of(ended, task.place)
        elif ended.state == "stopped" and self._stop_by is None:  # asked by another than this process
            self._again(task, "it was interrupted")

    def _again(self, task: _Task, why: str) -> None:
        """Run a chunk again from the newest checkpoints that have arrived, or give it up."""
        task.trials = [(config, writer) for config, writer in task.trials if not writer.finished]
        task.lost += 1
        if not task.trials:
            return
        if task.where:
            for _, writer in task.trials:
                writer.event("worker_lost", **task.where, why=why)
        if task.lost <= RERUNS:
            return self._submit(task)
        numbers = ", ".join(str(writer.number) for _, writer in task.trials)
        said = (
            f"trials {numbers} lost their worker {task.lost} times (the last one, {task.place}: "
            f"{why}). All that is finished is kept, and the same call resumes. A worker that is killed again and again is often out "
            "of memory: give the machines more, or fewer CPUs to Ray; executor='local' shows a crash of the code."
        ) if task.where else (
            f"no worker can be started on the Ray cluster ({why}). Every machine needs the same versions of Python, "
            "Ray and this package, and `python -c 'import workbench'` must work there."
        )  # fmt: skip
        self._error = self._error or ClusterError(said)

    def _stop(self) -> None:
        """Ask all that run to stop, once; give up those that have not begun, and those that do not stop in time."""
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self.mailbox.stop([task.key for task in self._running.values()])
        late = time.monotonic() > self._stop_by
        for call in [call for call, task in self._running.items() if late or not task.where]:
            self.cluster.cancel(call)
            del self._running[call]

    def _check(self) -> None:
        """Where no chunk trains and none has begun for a while, say why.

        Raises:
            ClusterError: the cluster has no machine left that could train one.
        """
        now = time.monotonic()
        if any(task.where for task in self._running.values()) or not self._running:
            self._waiting_since = now
        elif now - self._waiting_since > GONE_S:
            total = sum(self.cluster.machines(self.resource))
            if not total:
                raise ClusterError(
                    f"the Ray cluster has no {self.resource} any more: its machines are gone, or were asleep for so long that "
                    "Ray gave them up. Everything that arrived is saved, and the same call goes on on a cluster that has."
                )
            if now - self._waiting_since > PATIENCE_S:
                self._waiting_since = now
                logging.getLogger(__name__).warning(
                    "waiting for a free %s on the Ray cluster: it has %d in all. `ray status` shows who uses them.",
                    self.resource,
                    total,
                )


def _error_of(ended: Ended, where: str) -> Exception:
    """Return what a worker raised as an error of the same class, with the worker's traceback as a note."""
    kind = getattr(errors, ended.kind, None) or getattr(builtins, ended.kind, None)
    error: Exception = WorkbenchError(f"{ended.kind}: {ended.said}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            error = kind(ended.said)
    error.add_note(f"Raised on {where}:\n{ended.details}")
    return error
