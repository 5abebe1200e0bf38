"""`Redrawn`: one figure that is drawn again and again, for a panel: what stays the same is drawn once.

Of the time that a small figure takes, most goes into its frame: the layout, the ticks with their labels, the grid. While
somebody moves a slider, the frame stays as it is and what is inside moves. So the layout is computed once, the pixels of the
frame are kept, and only what is inside is drawn on top of them; a frame that has changed is drawn anew.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image

from workbench.plots._style import house_style

__all__ = ["Draw", "Redrawn"]

Draw = Callable[[Axes], Any]
"""Draws into the axes it is given, as `lambda ax: plot_x(record, ax=ax)`."""
CHARACTERS_AN_INCH = 15
"""Of a caption; more would leave the figure."""


class Redrawn:
    """Figures side by side as PNG; the second picture and those after it take a third of the time of the first.

    Args:
        size: width and height of each figure, in inches.
        dpi: pixels per inch.
    """

    def __init__(self, *, size: tuple[float, float] = (5.5, 4.0), dpi: int = 100) -> None:
        self.size, self.dpi = size, dpi
        self._layout: object = None
        self._places: list[Bbox] = []
        self._frame: object = None
        self._pixels: Any = None

    def png(self, draws: Sequence[Draw], *, caption: str = "") -> bytes:
        """Draw into axes side by side and return all as one PNG; nothing stays open.

        Args:
            draws: one for each axes.
            caption: text below them.
        """
        with house_style({"axes.titley": 1.0}):  # matplotlib need not look for room for the titles
            figure = Figure(figsize=(self.size[0] * len(draws), self.size[1]), dpi=self.dpi)
            canvas = FigureCanvasAgg(figure)
            axes: list[Axes] = list(figure.subplots(1, len(draws), squeeze=False)[0])
            for draw, ax in zip(draws, axes, strict=True):
                draw(ax)
            lines = textwrap.wrap(caption, width=int(figure.get_figwidth() * CHARACTERS_AN_INCH))
            if lines:
                figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=9.5, parse_math=False)
            inside = [artist for ax in axes for artist in _inside(ax)]
            frames = [_frame(ax) for ax in axes]
            rooms = [_room(ax, frame) for ax, frame in zip(axes, frames, strict=True)]
            self._arrange(figure, axes, [*rooms, len(lines)])
            if self._pixels is None or self._frame != [*frames, caption]:
                self._draw_frames(canvas, inside)
                self._frame = [*frames, caption]
            renderer = canvas.get_renderer()
            canvas.restore_region(self._pixels)
            for artist in inside:
                artist.draw(renderer)
            return _encoded(np.asarray(canvas.buffer_rgba()))

    def _arrange(self, figure: Figure, axes: Sequence[Axes], layout: object) -> None:
        """Give the axes the places that they had; find new ones where their labels need other room."""
        if self._layout != layout:
            figure.set_layout_engine("constrained")
            figure.draw_without_rendering()  # type: ignore[no-untyped-call]
            figure.set_layout_engine("none")
            self._layout, self._places, self._pixels = layout, [ax.get_position() for ax in axes], None
        for ax, place in zip(axes, self._places, strict=True):
            ax.set_position(place)

    def _draw_frames(self, canvas: Any, inside: Sequence[Artist]) -> None:
        """Draw the figure without what is inside the frames, and keep the pixels."""
        for artist in inside:
            artist.set_animated(True)
        canvas.draw()
        self._pixels = canvas.copy_from_bbox(canvas.figure.bbox)
        for artist in inside:
            artist.set_animated(False)


def _inside(ax: Axes) -> list[Artist]:
    """Return what moves, in the order in which it is drawn: all but the axis lines, ticks and labels."""
    frame = {id(artist) for artist in (ax.patch, ax.xaxis, ax.yaxis, *ax.spines.values())}
    found = [artist for artist in ax.get_children() if id(artist) not in frame and artist.get_visible()]
    return sorted(found, key=lambda artist: artist.get_zorder())


def _frame(ax: Axes) -> tuple[Any, ...]:
    """Return all that the frame of `ax` shows."""
    limits = (*ax.get_xlim(), *ax.get_ylim())  # first: autoscaling waits for it
    return ax.axison, limits, _axis(ax.xaxis), _axis(ax.yaxis)


def _axis(axis: Axis) -> tuple[Any, ...]:
    shown: list[Any] = [axis.get_scale(), axis.label.get_text()]
    for ticks, minor in ((axis.major, False), (axis.minor, True)):
        places = np.asarray(axis.get_ticklocs(minor=minor), dtype=np.float64)
        shown += [tuple(places), tuple(ticks.formatter.format_ticks(places)), ticks.formatter.get_offset()]
    return tuple(shown)


def _room(ax: Axes, frame: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what decides how much room is needed around `ax`: lines and lengths of its texts."""
    _, _, x, y = frame
    legend = ax.get_legend()
    widest = max((len(text) for at in (3, 6) for text in y[at]), default=0)
    return (
        ax.axison, widest, *(axis[1].count("\n") for axis in (x, y)), bool(x[1]), bool(y[1]),
        *(ax.get_title(loc).count("\n") for loc in ("left", "center", "right")),
        0 if legend is None or legend.get_bbox_to_anchor() is ax.bbox else len(legend.get_texts()), len(ax.child_axes),
    )  # fmt: skip


def _encoded(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels[..., :3])).save(buffer, format="png", compress_level=1)
    return buffer.getvalue()
