"""A figure as pixels or as text: PNG, drawn again and again for a panel, and inline SVG that follows the colours of its page.

Of the time that a small figure takes, most goes into its frame: the layout, the ticks with their labels, the grid. While
somebody moves a slider, the frame mostly stays as it is and what is inside moves. So the layout is computed once, the pixels of
the frame are kept, and what is inside is drawn on top of them.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from workbench.plots.style import GRID, INK, PALETTE, PAPER, house_style, why_not_measured

Draw = Callable[[Axes], Any]
"""Draws into the axes it is given, as `lambda ax: plot_x(record, ax=ax)`."""
CHARACTERS_AN_INCH = 15
"""Of a caption or a legend; more would leave the figure."""
LEGEND_ROW_IN = 0.19
"""Height of a legend's row, in inches."""


class Redrawn:
    """Figures of `size` inches side by side as PNG; while the frame stays as it is, a picture takes a third of the time of the first."""

    def __init__(self, *, size: tuple[float, float] = (5.5, 4.0), dpi: int = 100) -> None:
        self.size, self.dpi = size, dpi
        self._layouts: dict[tuple[Any, ...], tuple[list[int], list[Any]]] = {}
        self._drawn: object = None
        self._pixels: Any = None

    def png(self, draws: Sequence[Draw], *, caption: str = "") -> bytes:
        """Draw into axes side by side, above the caption, and return all as one PNG; nothing stays open."""
        with house_style({"axes.titley": 1.0}):  # matplotlib need not look for room for the titles
            figure = Figure(figsize=(self.size[0] * len(draws), self.size[1]), dpi=self.dpi)
            canvas: Any = FigureCanvasAgg(figure)
            axes = list(figure.subplots(1, len(draws), squeeze=False)[0])
            for draw, ax in zip(draws, axes, strict=True):
                draw(ax)
            said = "\n".join(textwrap.wrap(caption, width=int(figure.get_figwidth() * CHARACTERS_AN_INCH)))
            if said:
                figure.supxlabel(said, x=0.01, ha="left", fontsize=9.5, parse_math=False)
            inside = [artist for ax in axes for artist in _inside(ax)]
            frames = self._arrange(figure, axes, said)
            shown = [*frames, *(ax.get_position().bounds for ax in axes), said]
            if self._drawn != shown:
                for artist in inside:
                    artist.set_visible(False)
                canvas.draw()
                self._pixels, self._drawn = canvas.copy_from_bbox(figure.bbox), shown
                for artist in inside:
                    artist.set_visible(True)
            renderer = canvas.get_renderer()
            canvas.restore_region(self._pixels)
            for artist in inside:
                artist.draw(renderer)
            buffer = io.BytesIO()
            pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
            Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
            return buffer.getvalue()

    def _arrange(self, figure: Figure, axes: Sequence[Axes], said: str) -> list[_Frame]:
        """Give the axes places at which none of their texts leaves the figure, those of before where they do; return their frames."""
        kind = (said.count("\n") + bool(said), *(_kind(ax) for ax in axes))
        widths, places = self._layouts.get(kind, ([], []))
        frames = _placed(axes, places)
        if not widths or any(frame.widest > given for frame, given in zip(frames, widths, strict=True)):
            for ax in axes:
                ax.set_in_layout(True)  # what was given a place takes no part otherwise
            figure.set_layout_engine("constrained")
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            frames = _placed(axes, places := [ax.get_position() for ax in axes])
            self._layouts[kind] = [frame.widest for frame in frames], places
        return frames


class _Frame(NamedTuple):
    """What is drawn around a figure: limits, label and tick labels of both axes."""

    shown: bool
    axes: tuple[Any, ...]
    widest: int

    @classmethod
    def of(cls, ax: Axes) -> _Frame:
        """Return that of `ax`; `widest` is the number of characters of the longest tick label beside it."""
        seen: list[Any] = []
        widest = 0
        for axis in (ax.xaxis, ax.yaxis):
            for minor in (False, True):
                ticks = list(axis.get_ticklocs(minor=minor))
                formatter = axis.get_minor_formatter() if minor else axis.get_major_formatter()
                labels = formatter.format_ticks(ticks)
                low, high = sorted(axis.get_view_interval())
                inside = [text for at, text in zip(ticks, labels, strict=True) if low <= at <= high]
                widest = max([widest, *map(len, inside)]) if axis is ax.yaxis else 0
                seen.append((tuple(ticks), tuple(labels), formatter.get_offset()))
            size = axis.get_tick_params().get("labelsize")
            seen.append((axis.get_scale(), tuple(axis.get_view_interval()), axis.label.get_text(), size))
        return cls(bool(ax.axison), tuple(seen), widest)


def _inside(ax: Axes) -> list[Artist]:
    """Return what moves, in the order in which it is drawn: all but the axis lines, ticks and labels."""
    frame = {id(artist) for artist in (ax.patch, ax.xaxis, ax.yaxis, *ax.spines.values())}
    found = [artist for artist in ax.get_children() if id(artist) not in frame and artist.get_visible()]
    return sorted(found, key=lambda artist: artist.get_zorder())


def _placed(axes: Sequence[Axes], places: Sequence[Any]) -> list[_Frame]:
    """Put the axes in their places, where there are some, and return what their frames show there."""
    for ax, place in zip(axes, places, strict=False):
        ax.set_position(place)
    for ax in axes:
        ax.get_xlim(), ax.get_ylim()  # autoscaling waits for somebody to ask
    return [_Frame.of(ax) for ax in axes]


def _kind(ax: Axes) -> tuple[int, ...]:
    """Return what decides how much room is needed around `ax`, beside the length of its tick labels: lines of text."""
    legend = ax.get_legend()
    around = legend is not None and legend.get_bbox_to_anchor() is not ax.bbox
    lines = [axis.label.get_text().count("\n") + bool(axis.label.get_text()) for axis in (ax.xaxis, ax.yaxis)]
    lines += [ax.get_title(loc).count("\n") for loc in ("left", "center", "right")]
    entries = len(legend.get_texts()) if legend is not None and around else 0
    return (bool(ax.axison), *lines, entries, len(ax.child_axes))


_ROLES = {INK: "currentColor", PAPER: f"var(--paper, {PAPER})", GRID: f"var(--grid, {GRID})"} | {
    color: f"var(--plot-{index}, {color})" for index, color in enumerate(PALETTE)
}


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
    with house_style({"svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif"}):
        ax = draw(Figure(figsize=size, layout="constrained", facecolor="none").subplots())
        if (reason := why_not_measured(ax)) is not None:
            return None, reason
        figure = ax.get_figure(root=True)
        assert figure is not None
        _legend_below(ax, figure)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", facecolor="none", dpi=144, metadata=nothing)
    return _embed(buffer.getvalue(), key).replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1), None


def _legend_below(ax: Axes, figure: Figure) -> None:
    """Move the legend from the data to below the axes, in as many columns as fit, and make the figure taller by its rows."""
    legend = ax.get_legend()
    if legend is None or len(figure.axes) > 1:
        return
    handles = [handle for handle in legend.legend_handles if handle is not None]
    labels = [text.get_text() for text in legend.get_texts()]
    legend.remove()
    widest = max(map(len, labels)) + 6  # the sample of the line, and the gap
    columns = max(1, min(len(labels), int(figure.get_figwidth() * CHARACTERS_AN_INCH) // widest))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_IN * rows)
    figure.legend(handles=handles, labels=labels, loc="outside lower left", ncols=columns, frameon=False)


def png(draws: Sequence[Draw], *, size: tuple[float, float] = (5.5, 4.0), dpi: int = 100) -> bytes:
    """Draw figures of `size` inches side by side and return them as one PNG; nothing stays open."""
    return Redrawn(size=size, dpi=dpi).png(draws)


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
