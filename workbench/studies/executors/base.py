"""`Executor`: the one question that a study leaves open, where its trials run; `LocalExecutor` is this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workbench.config import TrainConfig
from workbench.errors import UnknownNameError, UsageError, nearest
from workbench.record.read import TrialRecord
from workbench.record.write import StudyWriter
from workbench.train.progress import Progress
from workbench.train.trainer import AnyTrainer
from workbench.workloads.base import Workload

EXECUTORS = ("local", "ray")


class Executor(Protocol):
    """Trains the trials that a study asks for; the study's folder is the same whichever does it."""

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
            WorkloadError: model, data or loss are broken; what was saved is kept.
            StudyInterrupted: Ctrl-C; everything that is there is saved, and the same call goes on.
        """
        ...

    def close(self) -> None:
        """Give back what was held between two calls of `run`; nothing else may be called afterwards."""
        ...


class LocalExecutor:
    """Hands the trials to the trainer, here and now."""

    def run(
        self, workload: Workload, configs: Sequence[TrainConfig], study: StudyWriter, *, stage: str, trainer: AnyTrainer,
        progress: Progress | None = None,
    ) -> list[TrialRecord]:  # fmt: skip
        """Train what is not finished yet and return all records, in the order of `configs`."""
        return trainer.run_trials(workload, configs, study, stage=stage, progress=progress)

    def close(self) -> None:
        """Nothing is held."""


def make_executor(name: str, address: str | None = None) -> Executor:
    """Return the executor of this name; nothing is started before its first trial.

    Raises:
        UsageError: there is no such executor, or the address belongs to another one.
        WorkbenchError: Ray is not installed.
    """
    if name not in EXECUTORS:
        raise UnknownNameError(f"executor={name!r} is not known.{nearest(name, EXECUTORS)}")
    if name == "ray":
        from workbench.studies.executors.on_ray import RayExecutor

        return RayExecutor(address)
    if address is not None:
        raise UsageError(
            f"address={address!r} names a Ray cluster, and executor={name!r} has no use for one. Add executor='ray' "
            "(--executor ray), or leave the address out."
        )
    return LocalExecutor()
