"""`Topic`: one question, and what the report and the pages have to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.findings.diagnosis import Diagnosis

NARROW = 5.2
"""Inches of width up to which a figure fits on a phone of 360 pixels with letters that can be read."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the report.

    Attributes:
        name: short and unique; prefix of the ids within the figure.
        shows: what is drawn, the start of its text for screen readers.
        caption: how to read it in general, one or two sentences.
        codes: findings whose summaries say what the figure shows here.
        draw: `(record, diagnosis, *, ax) -> axes`.
        facts: of the record, without which the figure is left out; None draws it always, or says why it cannot.
        kind: of study that the figure belongs to, left out of the reports of all others; None belongs to any.
        size: width and height in inches; up to `NARROW` a figure is read on a phone as it is, a wider one scrolls there.
        numbers: `(record, diagnosis) -> sentence` with a few numbers of what is drawn, where no finding says them.
        applies: `(record, diagnosis) -> bool`, whether it shows anything that a sentence does not; None is always.
        alone: whether these numbers say all, because the findings speak of the whole study.
    """

    name: str
    shows: str
    caption: str
    codes: tuple[str, ...]
    draw: Callable[..., Any]
    facts: str | None = None
    kind: str | None = None
    size: tuple[float, float] = (NARROW, 3.4)
    numbers: Callable[[Any, Diagnosis], str] | None = None
    applies: Callable[[Any, Diagnosis], bool] | None = None
    alone: bool = False

    @property
    def own(self) -> bool:
        """Whether it belongs to a study of its own."""
        return self.facts is not None or self.kind is not None


@dataclass(frozen=True, kw_only=True)
class StudyKind:
    """How a study of one kind is judged and shown.

    Attributes:
        diagnose: record -> diagnosis; None is sweep and stability.
        pictures: names of the figures that it is looked at with in a notebook.
    """

    diagnose: Callable[..., Diagnosis] | None
    pictures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One question.

    Attributes:
        name: of its folder.
        codes: code -> clause of everything that its diagnoses may report.
        figures: in the order of a report.
        studies: kind, as in `study.json`, -> how it is judged and shown.
    """

    name: str
    codes: Mapping[str, str]
    figures: tuple[Figure, ...] = ()
    studies: Mapping[str, StudyKind] = field(default_factory=dict)
