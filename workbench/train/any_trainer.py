"""`AnyTrainer`: what a study asks of whoever trains its trials, in one process or on many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol

from workbench.config import TrainConfig
from workbench.record.read import TrialRecord
from workbench.record.write import StudyWriter
from workbench.train.hooks.base import Hook
from workbench.train.progress import Progress
from workbench.workloads.base import Workload

__all__ = ["AnyTrainer"]


class AnyTrainer(Protocol):
    """A frozen dataclass that trains trials into a study's folder: `Trainer`, `ParameterServerTrainer`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def device(self) -> str:
        """Where trials compute."""
        ...

    @property
    def hooks(self) -> Sequence[Hook]:
        """Observers."""
        ...

    @property
    def evaluate_also(self) -> Sequence[str]:
        """Splits that are evaluated beside "validation" and the one that selection compares."""
        ...

    def run_trials(
        self,
        workload: Workload,
        configs: Sequence[TrainConfig],
        study: StudyWriter,
        *,
        stage: str,
        progress: Progress | None = None,
    ) -> list[TrialRecord]:
        """Train what is not finished yet and return all records, in the order of `configs`."""
        ...
