"""The figures of the report, drawn: each as SVG with its words, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import NARROW, Figure
from workbench.plots.render import inline_svg, standalone_svg
from workbench.plots.words import counted
from workbench.record.parts import write_atomic
from workbench.report.captions import shown_here
from workbench.report.html import folded, redact, text
from workbench.topics.registry import FIGURES

__all__ = ["DrawnFigure", "draw_figures", "figures_section", "write_figures"]


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as SVG, or the reason why there is none."""

    figure: Figure
    here: str
    svg: str | None
    reason: str | None


def draw_figures(record: Any, diagnosis: Diagnosis) -> list[DrawnFigure]:
    """Draw every figure of the report, in the order of the page: those of a study of its own come first there."""
    known = getattr(record, "facts", None) or {}
    kind = getattr(record, "study", {}).get("kind", "diagnosis")
    order = FIGURES if kind == "diagnosis" else sorted(FIGURES, key=lambda figure: not figure.own)
    belong = [f for f in order if f.facts is None or f.facts in known]
    drawn = [_drawn(figure, record, diagnosis) for figure in belong if figure.kind in (None, kind)]
    return [item for item in drawn if not item.figure.own or item.svg is not None]


def figures_section(drawn: Sequence[DrawnFigure]) -> str:
    """Every figure with its caption; those with nothing to show as one list of reasons."""
    shown, missing = [], []
    for item in drawn:
        figure = item.figure
        if item.svg is not None:
            here = f"<p>{text(redact(item.here))}</p>\n" if item.here else ""
            how = f'<p class="soft small">{text(figure.shows)} {text(figure.caption)}</p>'
            wide = ' class="wide"' if figure.size[0] > NARROW else ""
            shown.append(
                f'<figure id="figure-{figure.name}"{wide}>\n<div class="scroll">{item.svg}</div>\n'
                f"<figcaption>\n{here}{how}\n</figcaption>\n</figure>"
            )
        else:
            reason = str(item.reason)
            missing.append(f"<li>{text(figure.shows)} {text(reason[:1].upper() + reason[1:])}.</li>")
    parts = ["<h2>Figures</h2>", *shown]
    if missing:
        parts.append(
            folded(f"{counted(len(missing), 'figure')} not measured", "<ul>\n" + "\n".join(missing) + "\n</ul>")
        )
    return "\n".join(parts)


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


def _drawn(figure: Figure, record: Any, diagnosis: Diagnosis) -> DrawnFigure:
    here = shown_here(figure, record, diagnosis)
    alt = redact(f"{figure.shows} {here}".strip())
    try:
        svg, reason = inline_svg(
            lambda ax: figure.draw(record, diagnosis, ax=ax), key=figure.name, alt=alt, size=figure.size
        )
    except UsageError as error:
        svg, reason = None, str(error).rstrip(".")
    return DrawnFigure(figure, here, svg, reason)
