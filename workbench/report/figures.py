"""The figures of the report: each as SVG with its words, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure
from workbench.plots.render import inline_svg, standalone_svg
from workbench.record.folder import write_atomic
from workbench.report.html import shown_line
from workbench.topics.registry import FIGURES


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as SVG and what it shows here, or the reason why there is none."""

    figure: Figure
    here: str
    svg: str | None
    reason: str | None


def draw_figures(record: Any, diagnosis: Diagnosis) -> list[DrawnFigure]:
    """Draw every figure of the report, in the order of the page: those of a study of its own come first there."""
    known = getattr(record, "facts", None) or {}
    kind = getattr(record, "study", {}).get("kind", "diagnosis")
    order = FIGURES if kind == "diagnosis" else sorted(FIGURES, key=lambda figure: not figure.own)
    belong = [f for f in order if (f.facts is None or f.facts in known) and f.kind in (None, kind)]
    drawn = [_drawn(figure, record, diagnosis) for figure in belong]
    return [item for item in drawn if not item.figure.own or item.svg is not None]


def write_figures(drawn: Sequence[DrawnFigure], folder: Path) -> None:
    """Write every figure as `name.svg` into `folder`; an older one that has nothing to show any more is removed.

    Raises:
        RecordError: a file cannot be written.
    """
    shown = {item.figure.name: item.svg for item in drawn if item.svg is not None}
    for figure in FIGURES:
        path = folder / f"{figure.name}.svg"
        if figure.name in shown:
            write_atomic(path, standalone_svg(shown[figure.name]).encode())
        else:
            path.unlink(missing_ok=True)


def shown_here(figure: Figure, record: Any, diagnosis: Diagnosis) -> str:
    """Return one or two sentences with the numbers that a figure draws of this record, "" where there is nothing to say.

    A finding's own sentence where a finding speaks of it, else a few quantiles.
    """
    try:
        numbers = figure.numbers(record, diagnosis) if figure.numbers else ""
    except (KeyError, IndexError, TypeError, ValueError, UsageError):
        numbers = ""  # a record of another kind lacks these columns; the findings still speak
    codes = [] if numbers and figure.alone else [code for code in figure.codes if code in diagnosis]
    quiet = {f.code for f in diagnosis.findings if f.status == "ok" and f.summary.startswith("Not seen")}
    said = [diagnosis[c].summary for c in codes if diagnosis[c].status != "not_measured" and c not in quiet]
    return " ".join(dict.fromkeys(line for line in (numbers, *said) if line))


def _drawn(figure: Figure, record: Any, diagnosis: Diagnosis) -> DrawnFigure:
    here = shown_here(figure, record, diagnosis)
    alt = shown_line(f"{figure.shows} {here}".strip())
    try:
        svg, reason = inline_svg(
            lambda ax: figure.draw(record, diagnosis, ax=ax), key=figure.name, alt=alt, size=figure.size
        )
    except UsageError as error:
        svg, reason = None, str(error).rstrip(".")
    return DrawnFigure(figure, here, svg, reason)
