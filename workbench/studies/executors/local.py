"""`LocalExecutor`: trials run in this process."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.config import TrainConfig
from workbench.record.read import TrialRecord
from workbench.record.write import StudyWriter
from workbench.train.progress import Progress
from workbench.train.trainer import AnyTrainer
from workbench.workloads.base import Workload

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """Hands the trials to the trainer, here and now."""

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
        return trainer.run_trials(workload, configs, study, stage=stage, progress=progress)

    def close(self) -> None:
        """Nothing is held."""
