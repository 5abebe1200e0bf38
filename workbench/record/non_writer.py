"""`SilentStudy`: the study of a host that trains along and writes nothing, because one host writes for all (P7.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.record.parts import PartWriter
from workbench.record.read import TrialRecord
from workbench.record.write import StudyWriter, TrialWriter

__all__ = ["SilentStudy", "SilentTrial"]


class SilentParts(PartWriter):
    """A table that nothing is written to."""

    def __init__(self) -> None:
        self.written = 0

    def add(self, block: Mapping[str, Any]) -> None:
        """Drop the rows."""

    def show(self, columns: Mapping[str, Any]) -> None:
        """Show nothing."""

    def flush(self) -> None:
        """Write nothing."""

    def merge(self, keep: Callable[[pd.DataFrame], pd.Series] | None = None) -> None:
        """Join nothing."""


class SilentStudy(StudyWriter):
    """A study folder that another host writes.

    Args:
        path: the folder, as the host that writes it calls it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.created = path, False
        self.steps = self.evals = self.predictions = SilentParts()

    def trial(self, config: Mapping[str, Any], *, stage: str, train_examples: int) -> SilentTrial:  # noqa: ARG002
        """Return a trial whose number and state the writing host will say."""
        return SilentTrial(self, 0)

    def add_facts(self, **facts: Any) -> None:
        """Store nothing."""

    def finish(self) -> None:
        """Mark nothing."""

    def close(self) -> None:
        """Release nothing."""


class SilentTrial(TrialWriter):
    """A trial that another host writes."""

    writes = False

    @property
    def record(self) -> TrialRecord:
        """The trial as a reader sees it who has the same folder."""
        return TrialRecord(self.study.path, self.number)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def event(self, event: str, **values: Any) -> None:
        """Note nothing."""

    def rewind(self, step: int) -> None:
        """Drop nothing."""
