"""A figure as text or as pixels: SVG that follows the colours of its page, alone, side by side, or again and again; PNG where no page is.

Of the time that a small figure takes, most goes into finding room for the labels around the axes. While somebody moves a slider,
that room mostly stays as it is; so it is computed once for all figures that need the same.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.plots.style import (
    CHARACTERS_AN_INCH,
    DARK_GRID,
    DARK_INK,
    DARK_PALETTE,
    DARK_PAPER,
    GRID,
    INK,
    PALETTE,
    PAPER,
    HouseFigure,
    house_style,
    why_not_measured,
)

Draw = Callable[[Axes], Any]
"""Draws into the axes it is given, as `lambda ax: plot_x(record, ax=ax)`."""
_SVG: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif"}

_ROLES = {INK: "currentColor", PAPER: f"var(--paper, {PAPER})", GRID: f"var(--grid, {GRID})"} | {
    color: f"var(--plot-{index}, {color})" for index, color in enumerate(PALETTE)
}
DARK_COLORS = "; ".join(f"--plot-{index}: {color}" for index, color in enumerate(DARK_PALETTE))
"""What a dark page sets, as CSS; the light colours are the defaults."""
_DARK = f"color: {DARK_INK}; --paper: {DARK_PAPER}; --grid: {DARK_GRID}; {DARK_COLORS}"
_THEMED = f"""<style>
.wb-figures {{ color: {INK}; display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: flex-start }}
.wb-figures svg {{ display: block; flex: 0 1 auto; max-width: 100%; height: auto }}
.wb-figures .wb-untrusted {{ display: none }}
[data-jp-theme-light="false"] .wb-figures, .vscode-dark .wb-figures {{ {_DARK} }}
@media screen and (prefers-color-scheme: dark) {{ body:not([data-jp-theme-light], .vscode-light) .wb-figures {{ {_DARK} }} }}
</style>"""
"""JupyterLab and VS Code say on the page's body which theme it has; any other page follows the reader's setting."""
_UNTRUSTED = "This figure is shown once the cell has run here, or the notebook is trusted."
"""What is left of a figure in a notebook of which JupyterLab takes style and SVG away; its letters are outlines, of which nothing is left."""


def is_live(live: bool | None = None) -> bool:
    """Return whether a page is there that controls can be used on.

    Args:
        live: None asks the environment: `WORKBENCH_LIVE=0`, as papermill, nbval and make set it, means that nobody is looking.
    """
    return os.environ.get("WORKBENCH_LIVE") != "0" if live is None else live


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
    with house_style(_SVG):
        figure = HouseFigure(figsize=size, layout="constrained", facecolor="none")
        if (reason := why_not_measured(draw(figure.subplots()))) is not None:
            return None, reason
        return _themed(figure, key=key, alt=alt), None


def figure_html(figure: Figure) -> str | None:
    """Return a figure as a notebook shows it on a page, None where there will be none: there the PNG is enough."""
    return _block([_sized(figure, _said(figure))], _said(figure)) if has_page() else None


def has_page() -> bool:
    """Return whether what a cell shows will be seen on a page: somebody looks, or `workbench notebook` writes one."""
    return is_live() or os.environ.get("WORKBENCH_FIGURES") == "html"


class Redrawn:
    """Figures of `size` inches side by side as HTML, one below the other where the page is narrow."""

    def __init__(self, *, size: tuple[float, float] = (5.5, 4.0)) -> None:
        self.size = size
        self._places: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def html(self, draws: Sequence[Draw], *, alt: str) -> str:
        """Draw each into axes of its own; nothing stays open."""
        with house_style(_SVG | {"axes.titley": 1.0}):  # matplotlib need not look for room for the titles
            drawn = [_sized(self._arranged(draw), alt if number == 0 else "") for number, draw in enumerate(draws)]
        return _block(drawn, alt)

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


def _block(svgs: Sequence[str], alt: str) -> str:
    said = f'<p class="wb-untrusted">{escape(alt)} {_UNTRUSTED}</p>'
    return f'<div class="wb-figures">{_THEMED}{said}{"".join(svgs)}</div>'


def _said(figure: Figure) -> str:
    """Return what a figure shows, from its own words."""
    titles = (f"{ax.get_title(loc='left')}: {ax.get_ylabel()} against {ax.get_xlabel()}." for ax in figure.axes[:1])
    return " ".join(" ".join(titles).split())


def _sized(figure: Figure, alt: str) -> str:
    """Return a figure as SVG of its own size, with ids that no other figure has."""
    svg = _themed(figure, key="KEY", alt=alt, letters="path")
    key = "f" + hashlib.sha256(svg.encode()).hexdigest()[:10]
    width, height = (round(96 * side) for side in figure.get_size_inches())
    return svg.replace("KEY-", f"{key}-").replace("<svg", f'<svg width="{width}" height="{height}"', 1)


def _themed(figure: Figure, *, key: str, alt: str, letters: str = "none") -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with house_style({**getattr(figure, "house", {}), **_SVG, "svg.fonttype": letters}):
        Figure.savefig(figure, buffer, format="svg", facecolor="none", dpi=144, metadata=nothing)
    named = f'role="img" aria-label="{escape(alt)}"' if alt else 'aria-hidden="true"'
    return _embed(buffer.getvalue(), key).replace("<svg", f"<svg {named}", 1)


def standalone_svg(svg: str) -> str:
    """Return an SVG of `inline_svg` as a file of its own: named as SVG, with a size, on paper, the printed colours."""
    svg = re.sub(r"var\(--[\w-]+, ([^)]*)\)", r"\1", svg).replace("currentColor", INK)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    size = f'width="{found[1]}pt" height="{found[2]}pt" style="background: {PAPER}"'
    return svg.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" {size}', 1) + "\n"


def _embed(svg: str, key: str) -> str:
    """Cut the header, prefix the ids, hand the colours to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'href="#', f'href="#{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    for color, role in _ROLES.items():
        svg = re.sub(rf"(?<=[ :]){color}(?![0-9a-f])", role, svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans, sans-serif)", svg)
    head, rest = svg.split(">", 1)
    return re.sub(r'\s(width|height|version)="[^"]*"', "", head) + ">" + rest
