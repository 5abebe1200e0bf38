"""`ParameterServerTrainer`: trials whose parameters live on servers and whose updates come from many workers, asynchronously (T1.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.strategy import ParameterServerStrategy, Partitioner
from workbench.parameter_server.training.placed_run import PlacedRun
from workbench.progress import Progress
from workbench.record.read import TrialRecord
from workbench.record.repro import source_of
from workbench.record.write import StudyWriter
from workbench.train.evaluation import check_track, tracked_examples
from workbench.train.hooks import Hook
from workbench.train.lane import Lane, check_lanes
from workbench.train.rng import isolated_rng
from workbench.train.steps.own_step import check_own_step
from workbench.train.trainer import run_alone
from workbench.workloads.base import Workload


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
            for config, writer in left:
                PlacedRun(
                    workload, Lane(config, writer), study=study, splits=self.evaluate_also, tracked=tracked, hooks=self.hooks,
                    strategy=ParameterServerStrategy(cluster, variable_partitioner=self.variable_partitioner),
                    steps_per_closure=self.steps_per_closure, progress=progress,
                ).train()  # fmt: skip
        return [writer.record for writer in writers]

    def _cluster(self) -> contextlib.AbstractContextManager[Cluster]:
        if self.cluster is not None:
            return contextlib.nullcontext(self.cluster)
        return create_in_process_cluster(self.workers, self.servers, engine=self.engine)
