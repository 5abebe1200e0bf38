"""A figure as text or as pixels: SVG that follows the colours of its page, alone, side by side, or again and again; PNG where no page is.

Of the time that a small figure takes, most goes into finding room for the labels around the axes. While somebody moves a slider,
that room mostly stays as it is; so it is computed once for all figures that need the same.
"""

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


class Redrawn:
    """Figures of `size` inches side by side as HTML, one below the other where the page is narrow."""

    def __init__(self, *, size: tuple[float, float] = (5.5, 4.0)) -> None:
        self.size = size
        self._places: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def html(self, draws: Sequence[Draw], *, alt: str) -> str:
        """Draw each into axes of its own; nothing stays open."""
        with house_style(SVG | {"axes.titley": 1.0}):  # matplotlib need not look for room for the titles
            drawn = [sized(self._arranged(draw), alt if number == 0 else "") for number, draw in enumerate(draws)]
        return block(drawn, alt)

    def _arranged(self, draw: Draw) -> HouseFigure:
        """Draw into axes at a place where none of their texts leaves the figure: that of before, unless labels are wider now."""
        figure = HouseFigure(figsize=self.size, facecolor="none")
        ax = figure.subplots()
        draw(ax)
        kind, widest = _kind(ax), _widest_label(ax)
        given, place = self._places.get(kind, (-1, None))
        if widest <= given:
            ax.set_position(place)
            return figure
        figure.set_layout_engine("constrained")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        self._places[kind] = widest, ax.get_position()
        return figure


def _widest_label(ax: Axes) -> int:
    """Return the number of characters of the longest tick label beside the axes."""
    ax.get_xlim(), ax.get_ylim()  # autoscaling waits for somebody to ask
    axis = ax.yaxis
    low, high = sorted(axis.get_view_interval())
    widest = 0
    for minor, formatter in ((False, axis.get_major_formatter()), (True, axis.get_minor_formatter())):
        ticks = list(axis.get_ticklocs(minor=minor))
        shown = [text for at, text in zip(ticks, formatter.format_ticks(ticks), strict=True) if low <= at <= high]
        widest = max([widest, *map(len, shown)])
    return widest


def _kind(ax: Axes) -> tuple[Any, ...]:
    """Return what decides how much room is needed around `ax`, beside the length of its tick labels: lines of text."""
    lines = [axis.label.get_text().count("\n") + bool(axis.label.get_text()) for axis in (ax.xaxis, ax.yaxis)]
    lines += [ax.get_title(loc).count("\n") for loc in ("left", "center", "right")]
    legend, figure = ax.get_legend(), ax.get_figure(root=True)
    entries = [text.get_text() for text in legend.get_texts()] if legend is not None else []
    height = figure.get_figheight() if figure is not None else 0.0
    return (bool(ax.axison), height, max(map(len, entries), default=0), *lines, len(ax.child_axes))


def png(draws: Sequence[Draw], *, size: tuple[float, float] = (5.5, 4.0), dpi: int = 100, caption: str = "") -> bytes:
    """Draw figures of `size` inches side by side, above the caption, and return them as one PNG; nothing stays open."""
    with house_style():
        whole = Figure(figsize=(size[0] * len(draws), size[1]), dpi=dpi, layout="constrained")
        for draw, ax in zip(draws, whole.subplots(1, len(draws), squeeze=False)[0], strict=True):
            draw(ax)
        if caption:
            said = "\n".join(textwrap.wrap(caption, width=int(whole.get_figwidth() * CHARACTERS_AN_INCH)))
            whole.supxlabel(said, x=0.01, ha="left", fontsize=9.5, parse_math=False)
        buffer = io.BytesIO()
        whole.savefig(buffer, format="png")
        return buffer.getvalue()


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
        return Redrawn(size=self._size).html(self._draws, alt=self.alt)

    def png(self) -> bytes:
        """Return the figures, above the caption, as PNG."""
        return png(self._draws, size=self._size, caption=self._caption)

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
