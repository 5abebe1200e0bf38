"""A figure as pixels or as text: PNG, drawn again and again for a panel, and inline SVG that follows the colours of its page.

Of the time that a small figure takes, most goes into its frame: the layout, the ticks with their labels, the grid. While
somebody moves a slider, the frame stays as it is and what is inside moves. So the layout is computed once, the pixels of the
frame are kept, and only what is inside is drawn on top of them. A frame that has changed is drawn with the ticks that are
there already, because making a tick takes matplotlib longer than drawing it. That makes a move two to four times as fast.
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
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator
from PIL import Image

from workbench.plots.style import GRID, INK, PALETTE, PAPER, house_style, why_not_measured

Draw = Callable[[Axes], Any]
"""Draws into the axes it is given, as `lambda ax: plot_x(record, ax=ax)`."""
CHARACTERS_AN_INCH = 15
"""Of a caption; more would leave the figure."""


class _Ticks(NamedTuple):
    """Where the ticks of an axis are, as shares of it, what is written at them, and what at the end of the axis."""

    places: tuple[float, ...]
    labels: tuple[str, ...]
    offset: str

    @classmethod
    def of(cls, axis: Axis, *, minor: bool) -> _Ticks:
        """Return those that lie within the axis."""
        formatter: Any = (axis.minor if minor else axis.major).formatter
        values = np.asarray(axis.get_ticklocs(minor=minor), dtype=np.float64)
        labels = formatter.format_ticks(values)
        ends = axis.get_transform().transform(np.array(axis.get_view_interval(), dtype=np.float64))
        with np.errstate(all="ignore"):
            places = np.round((axis.get_transform().transform(values) - ends[0]) / (ends[1] - ends[0]), 9)
        within = [k for k, place in enumerate(places) if 0 <= place <= 1]
        return cls(tuple(float(places[k]) for k in within), tuple(labels[k] for k in within), formatter.get_offset())


class _Line(NamedTuple):
    """What is drawn of an axis."""

    label: str
    math: bool
    size: Any
    major: _Ticks
    minor: _Ticks

    @classmethod
    def of(cls, axis: Axis) -> _Line:
        """Return what is drawn of `axis`."""
        major, minor = (_Ticks.of(axis, minor=minor) for minor in (False, True))
        size = axis.get_tick_params().get("labelsize")
        return cls(axis.label.get_text(), axis.label.get_parse_math(), size, major, minor)

    def put(self, axis: Axis) -> None:
        """Give the same to an axis from 0 to 1."""
        for ticks, minor in ((self.major, False), (self.minor, True)):
            (axis.set_minor_locator if minor else axis.set_major_locator)(FixedLocator(ticks.places))
            formatter = FixedFormatter(ticks.labels)
            formatter.set_offset_string(ticks.offset)
            (axis.set_minor_formatter if minor else axis.set_major_formatter)(formatter)
        axis.set_tick_params(which="both", labelsize=self.size or "medium")
        axis.set_label_text(self.label, parse_math=self.math)


class _Frame(NamedTuple):
    """What is drawn around a figure."""

    shown: bool
    x: _Line
    y: _Line

    @property
    def widest(self) -> int:
        """Characters of the longest tick label beside the figure."""
        return max((len(text) for ticks in (self.y.major, self.y.minor) for text in ticks.labels), default=0)


class Redrawn:
    """Figures of `size` inches side by side as PNG; the second picture and those after it take a third of the time of the first."""

    def __init__(self, *, size: tuple[float, float] = (5.5, 4.0), dpi: int = 100) -> None:
        self.size, self.dpi = size, dpi
        self._layouts: dict[tuple[Any, ...], tuple[list[int], list[Any]]] = {}
        self._drawn: object = None
        self._pixels: Any = None
        self._frames: list[Axes] = []

    def png(self, draws: Sequence[Draw], *, caption: str = "") -> bytes:
        """Draw into axes side by side, above the caption, and return all as one PNG; nothing stays open."""
        with house_style({"axes.titley": 1.0}):  # matplotlib need not look for room for the titles
            figure, axes = self._figure(len(draws))
            for draw, ax in zip(draws, axes, strict=True):
                draw(ax)
            said = "\n".join(textwrap.wrap(caption, width=int(figure.get_figwidth() * CHARACTERS_AN_INCH)))
            inside = [artist for ax in axes for artist in _inside(ax)]
            frames, places = self._arranged(figure, axes, said)
            shown = [*frames, *(place.bounds for place in places), said]
            if self._drawn != shown:
                self._draw_frames(frames, places, said)
                self._drawn = shown
            canvas: Any = figure.canvas
            renderer = canvas.get_renderer()
            canvas.restore_region(self._pixels)
            for artist in inside:
                artist.draw(renderer)
            buffer = io.BytesIO()
            pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
            Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
            return buffer.getvalue()

    def _figure(self, count: int) -> tuple[Figure, list[Axes]]:
        figure = Figure(figsize=(self.size[0] * count, self.size[1]), dpi=self.dpi)
        FigureCanvasAgg(figure)
        return figure, list(figure.subplots(1, count, squeeze=False)[0])

    def _arranged(self, figure: Figure, axes: Sequence[Axes], said: str) -> tuple[list[_Frame], list[Any]]:
        """Give the axes places at which none of their texts leaves the figure: those of before, where they do."""
        kind = (said.count("\n") + bool(said), *(_kind(ax) for ax in axes))
        widths, places = self._layouts.get(kind, ([], []))
        frames = _placed(axes, places)
        wanted = [frame.widest for frame in frames]
        if not widths or any(own > given for own, given in zip(wanted, widths, strict=True)):
            for ax in axes:
                ax.set_in_layout(True)  # what was given a place takes no part otherwise
            figure.set_layout_engine("constrained")
            if said:
                _say(figure, said)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            places = [ax.get_position() for ax in axes]
            frames = _placed(axes, places)
            self._layouts[kind] = [frame.widest for frame in frames], places
        return frames, places

    def _draw_frames(self, frames: Sequence[_Frame], places: Sequence[Any], said: str) -> None:
        """Draw the frames without what is inside, and keep the pixels."""
        if len(self._frames) != len(frames):
            self._frames = self._figure(len(frames))[1]
        for ax, frame, place in zip(self._frames, frames, places, strict=True):
            ax.set_position(place)
            (ax.set_axis_on if frame.shown else ax.set_axis_off)()
            frame.x.put(ax.xaxis)
            frame.y.put(ax.yaxis)
        figure: Any = self._frames[0].get_figure(root=True)
        _say(figure, said)
        figure.canvas.draw()
        self._pixels = figure.canvas.copy_from_bbox(figure.bbox)


def _say(figure: Figure, said: str) -> None:
    figure.supxlabel(said, x=0.01, ha="left", fontsize=9.5, parse_math=False)


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
    return [_Frame(bool(ax.axison), _Line.of(ax.xaxis), _Line.of(ax.yaxis)) for ax in axes]


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
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", facecolor="none", dpi=144, metadata=nothing)
    return _embed(buffer.getvalue(), key).replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1), None


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
