"""`RayExecutor`: chunks of trials on the machines of a Ray cluster, written by this process alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from workbench.config import TrainConfig
from workbench.errors import StudyInterrupted, UsageError
from workbench.ray.cluster import RayCluster, require_ray
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.write import StudyWriter, TrialWriter
from workbench.studies.executors.crew import Crew
from workbench.studies.executors.inbox import Inbox
from workbench.studies.executors.shipping import Shipment, pack_shipment
from workbench.studies.executors.sweep import Sweep, Task
from workbench.train.batches import resolve_device
from workbench.train.lane_groups import SHARED, check_lanes
from workbench.train.progress import Progress
from workbench.train.trainer import AnyTrainer, Trainer
from workbench.workloads.base import Workload

__all__ = ["RayExecutor"]


def plan_chunks(configs: Sequence[TrainConfig], workers: int) -> list[list[int]]:
    """Return positions in `configs`, chunk by chunk, the most work first.

    A chunk holds trials that can train as lanes of one stack on one stream of data. Neighbours go to different chunks:
    in a sweep those with the highest learning rates end early, and their workers would stand idle.

    Args:
        configs: of the trials to train.
        workers: how many chunks can train at once.
    """
    groups: dict[Hashable, list[int]] = {}
    for position, config in enumerate(configs):
        key = (config.per_host_seed, *(getattr(config, name) for name in SHARED))
        groups.setdefault(key, []).append(position)
    lanes = math.ceil(len(configs) / max(1, workers))
    chunks: list[list[int]] = []
    for group in groups.values():
        count = math.ceil(len(group) / lanes)
        chunks += [group[first::count] for first in range(count)]
    return sorted(chunks, key=lambda chunk: -sum(_cost(configs[position]) for position in chunk))


def _cost(config: TrainConfig) -> int:
    return config.total_steps * config.batch_size


class RayExecutor:
    """Runs chunks of trials in the processes of a cluster, which stay between two calls of `run`.

    Args:
        address: of the cluster; None takes the one that this process is connected to, or starts one on this machine.
        connect: joins it.
    """

    def __init__(self, address: str | None = None, connect: Callable[[str | None], RayCluster] | None = None) -> None:
        if connect is None:
            require_ray()
        self._address, self._connect = address, connect or RayCluster.connect
        self._cluster: RayCluster | None = None
        self._crew: Crew | None = None
        self._shipped: tuple[Workload, Trainer, Shipment] | None = None

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
        """Train what is not finished yet and return all records, in the order of `configs`.

        Raises:
            UsageError: the trainer is not the one that runs in one process.
            ClusterError: no cluster answers, or it loses its workers again and again.
            WorkloadError: the workload is broken, cannot be sent to a worker, or is another one there.
            StudyInterrupted: Ctrl-C; what has arrived is saved, and the same call goes on.
        """
        if not isinstance(trainer, Trainer):
            raise UsageError(
                f"executor='ray' spreads trials that each run in one process; {type(trainer).__name__} spreads one trial over several. "
                "Leave the executor out."
            )
        sizes = check_lanes(workload, configs)
        if _unfinished(study, configs):  # before a trial gets its folder: an address may be wrong
            crew = self._ready_crew(trainer)
            shipment = self._shipment(workload, trainer, configs[0])
        writers = [study.trial(c.to_dict(), stage=stage, train_examples=sizes["train"]) for c in configs]
        todo = [(c, w) for c, w in zip(configs, writers, strict=True) if not w.finished]
        if todo:
            self._train(todo, crew, shipment, Inbox(study, progress), stage)
        study.flush()
        return [TrialRecord(study.path, writer.number) for writer in writers]

    def close(self) -> None:
        """End the workers, and the cluster where it was started here."""
        if self._crew is not None:
            self._crew.dismiss()
        if self._cluster is not None:
            self._cluster.close()
        self._crew = self._cluster = None

    def _train(
        self, todo: list[tuple[TrainConfig, TrialWriter]], crew: Crew, shipment: Shipment, inbox: Inbox, stage: str
    ) -> None:
        chunks = plan_chunks([config for config, _ in todo], crew.room())
        tasks = [Task([todo[position] for position in chunk]) for chunk in chunks]
        sweep = Sweep(crew, shipment, inbox, stage)
        stopped = sweep.run(tasks)
        left = sum(not writer.finished for _, writer in todo)
        if left or stopped:
            raise StudyInterrupted(
                f"stopped with {left} of {len(todo)} trials unfinished; everything that arrived is saved in "
                f"{inbox.study.path}, and the same call goes on from there."
            )

    def _ready_crew(self, trainer: Trainer) -> Crew:
        gpu = resolve_device(trainer.device).type == "cuda"
        if self._cluster is None:
            self._cluster = self._connect(self._address)
        if self._crew is None or self._crew.gpu != gpu:
            if self._crew is not None:
                self._crew.dismiss()
            self._crew = Crew(self._cluster, gpu=gpu)
        self._crew.room()
        return self._crew

    def _shipment(self, workload: Workload, trainer: Trainer, config: TrainConfig) -> Shipment:
        if self._shipped is None or self._shipped[0] is not workload or self._shipped[1] is not trainer:
            assert self._cluster is not None
            shipment = pack_shipment(self._cluster.pack, workload, trainer, config)
            self._shipped = (workload, trainer, shipment)
        return self._shipped[2]


def _unfinished(study: StudyWriter, configs: Sequence[TrainConfig]) -> bool:
    """Whether one of the trials is not there yet, or not to its end."""
    finished = [trial.config for trial in StudyRecord(study.path) if TrialWriter(study, trial.number).finished]
    return any(config.to_dict() not in finished for config in configs)
