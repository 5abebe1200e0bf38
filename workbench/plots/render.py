"""A figure as text or as pixels: SVG that follows the colours of its page, alone or side by side; PNG where no page is."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.plots.style import INK, PAPER, HouseFigure, house_style, why_not_measured
from workbench.plots.svg import CHARACTERS_AN_INCH, SVG, block, has_page, sized, themed

Draw = Callable[[Axes], Any]
"""Draws into the axes it is given, as `lambda ax: plot_x(record, ax=ax)`."""


def inline_svg(
    draw: Callable[[Axes], Axes], *, key: str, alt: str, size: tuple[float, float] = (6.8, 3.9)
) -> tuple[str | None, str | None]:
    """Draw a figure and return (svg, None), or (None, the reason) when it says "not measured".

    The SVG is made for pasting into HTML: no header, no reference to another file, ids that start with `key`, text as
    text. Ink, paper, grid and palette become CSS variables with the printed colours as defaults, so that a dark page
    can set them. The same numbers give the same characters.

    Args:
        key: prefix of every id, different for each figure on the page.
        alt: what the figure shows, in words, for those who do not see it.
    """
    with house_style(SVG):
        figure = HouseFigure(figsize=size, layout="constrained", facecolor="none")
        if (reason := why_not_measured(draw(figure.subplots()))) is not None:
            return None, reason
        return themed(figure, key=key, alt=alt), None


def side_by_side(draws: Sequence[Draw], *, alt: str, size: tuple[float, float] = (5.5, 4.0)) -> str:
    """Return figures of `size` inches, each drawn into axes of its own, as HTML, one below the other where the page is narrow, those that are measured if any is."""
    with house_style(SVG):
        figures = [HouseFigure(figsize=size, facecolor="none", layout="constrained") for _ in draws]
        for figure, draw in zip(figures, draws, strict=True):
            draw(figure.subplots())
        figures = [figure for figure in figures if why_not_measured(figure.axes[0]) is None] or figures
        return block([sized(figure, "" if number else alt) for number, figure in enumerate(figures)], alt)


class Picture:
    """Figures as what a notebook shows and stores when it is the last line of a cell: themed SVG on a page, PNG elsewhere.

    Attributes:
        alt: what they show, in words.
    """

    def __init__(
        self, draws: Sequence[Draw], alt: str, *, size: tuple[float, float] = (5.5, 4.0), caption: str = ""
    ) -> None:
        self._draws, self._size, self._caption, self.alt = list(draws), size, caption, alt

    def __repr__(self) -> str:
        """Return what is shown where there are no pictures."""
        return "<Picture>"

    def html(self) -> str:
        """Return the figures as HTML."""
        return side_by_side(self._draws, alt=self.alt, size=self._size)

    def png(self) -> bytes:
        """Return the figures, above the caption, as PNG."""
        wide, high = self._size
        with house_style():
            whole = Figure(figsize=(wide * len(self._draws), high), dpi=100, layout="constrained")
            for draw, ax in zip(self._draws, whole.subplots(1, len(self._draws), squeeze=False)[0], strict=True):
                draw(ax)
            if self._caption:
                said = "\n".join(textwrap.wrap(self._caption, width=int(whole.get_figwidth() * CHARACTERS_AN_INCH)))
                whole.supxlabel(said, x=0.01, ha="left", fontsize=9.5, parse_math=False)
            buffer = io.BytesIO()
            whole.savefig(buffer, format="png")
            return buffer.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        stored: dict[str, Any] = {"text/plain": repr(self), "image/png": self.png()}
        if has_page():
            said = f"<p>{escape(self._caption)}</p>" if self._caption else ""
            stored["text/html"] = self.html() + said
        return stored, {"image/png": {"alt": self.alt}}


def standalone_svg(svg: str) -> str:
    """Return an SVG of `inline_svg` as a file of its own: named as SVG, with a size, on paper, the printed colours."""
    svg = re.sub(r"var\(--[\w-]+, ([^)]*)\)", r"\1", svg).replace("currentColor", INK)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    size = f'width="{found[1]}pt" height="{found[2]}pt" style="background: {PAPER}"'
    return svg.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" {size}', 1) + "\n"
