"""`ReportFigure`: what is known of a figure of the report before it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.findings.diagnosis import Diagnosis

__all__ = ["NARROW", "ReportFigure"]

NARROW = 5.2
"""Inches of width up to which a figure fits on a phone of 360 pixels with letters that can be read."""


@dataclass(frozen=True)
class ReportFigure:
    """One figure of the report.

    Attributes:
        name: short and unique; prefix of the ids within the figure.
        shows: what is drawn, the start of its text for screen readers.
        caption: how to read it in general, one or two sentences.
        codes: findings whose summaries, beside a few numbers, say what the figure shows here.
        draw: `(record, diagnosis, axes) -> axes`.
        facts: of the record, without which the figure is left out; None draws it always, or says why it cannot.
        kind: of study that the figure belongs to, left out of the reports of all others; None belongs to any.
        size: width and height in inches; up to `NARROW` a figure is read on a phone as it is, a wider one scrolls there.
    """

    name: str
    shows: str
    caption: str
    codes: tuple[str, ...]
    draw: Callable[[Any, Diagnosis, Any], Any]
    facts: str | None = None
    kind: str | None = None
    size: tuple[float, float] = (NARROW, 3.4)

    @property
    def own(self) -> bool:
        """Whether it belongs to a study of its own."""
        return self.facts is not None or self.kind is not None
