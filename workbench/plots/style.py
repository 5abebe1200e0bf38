"""How every figure looks, and the one way in which a figure says that it has nothing to show.

The style lives inside a `with` block, so that drawing changes no global setting. There is one palette, in a light and a dark
variant; whatever a colour tells, a marker or a line style tells too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation, blended_transform_factory
from numpy.typing import NDArray

from workbench.curves.smoothing import kept
from workbench.errors import UsageError
from workbench.plots.palette import (
    BAD,
    BASELINE,
    DARK_SEQUENCE,
    GOOD,
    INK,
    PALETTE,
    PAPER,
    SEQUENCE,
    STYLES,
    house_style,
)
from workbench.plots.svg import CHARACTERS_AN_INCH, figure_html, show_themed

__all__ = [
    "BAD",
    "BASELINE",
    "DARK_SEQUENCE",
    "GOOD",
    "INK",
    "PALETTE",
    "PAPER",
    "SEQUENCE",
    "STYLES",
    "drawing",
    "house_style",
]

Floats = NDArray[np.float64]

Size = Literal["page", "column"]
"""How large a figure is: as each is drawn on a page, or `COLUMN_IN` inches wide with letters of 7 to 8 points, for a paper's column; words beside its axes break after `IN_MARGIN` letters."""
COLUMN_IN, SHRINK, IN_MARGIN = 3.3, 0.7, 16

LARGEST = 1e100
"""Finite values are drawn no larger: the margins of a log axis would overflow, and a diverged run passes through them."""
MAX_COLUMNS = 500
"""Into which a long curve is divided: of each its lowest and highest value are drawn; most figures are as wide in points (rule of thumb)."""

POINTS: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3}
"""How a value is drawn that was not measured at every update: a line would tell what lies between."""

_EXPONENT = re.compile(r"e\+?(-?)0*")

MAX_SEARCHED_POINTS = 50_000
"""Above this many drawn points the legend goes to the upper right: the search for free space gets slow."""

_COLUMN: dict[str, Any] = {
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.titlesize": 8,
    "font.size": 7.5,
    "legend.fontsize": 7,
    "lines.linewidth": 1.1,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


class HouseFigure(Figure):
    """A matplotlib figure whose notebook shows it in the colours of the page, with its legend below the data."""

    house: Mapping[str, Any] = {}
    bare_height: float | None = None
    handles: Sequence[Any] = ()

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Write the figure in the house style, whoever saves it: matplotlib makes some ticks only then."""
        with house_style(self.house):
            super().savefig(fname, **kwargs)

    def __repr__(self) -> str:
        """Return what matplotlib says of any figure."""
        return super().__repr__().replace("<HouseFigure", "<Figure", 1)

    def _repr_html_(self) -> str | None:
        return figure_html(self)


@contextmanager
def drawing(ax: Axes | None, size: Size = "page", shape: tuple[float, float] = (6.8, 4.0)) -> Iterator[Axes]:
    """Yield `ax`, or that of a new figure, with the house style on; nothing global stays changed.

    Args:
        ax: where to draw; `size` is then that of its figure.
        size: "page" is `shape` inches, "column" is made for a paper.
        shape: width and height on a page.
    """
    if size not in ("page", "column"):
        raise UsageError(
            f'size is "page" or "column", not {size!r}; for another size draw into axes of your own: ax=...'
        )
    more = _COLUMN if size == "column" and ax is None else {}
    with house_style(more):
        if ax is None:
            width, height = shape if size == "page" else (COLUMN_IN, max(2.0, SHRINK * shape[1]))
            figure, ax = plt.subplots(figsize=(width, height), layout="constrained", FigureClass=HouseFigure)
            if isinstance(figure, HouseFigure):
                figure.house = more
        show_themed(ax.get_figure(root=True))
        yield ax
        if more:
            _fit_column(ax)


def _fit_column(ax: Axes) -> None:
    """Make marks and words that a figure sizes itself smaller, and break titles that are wider than the column."""
    for line in ax.lines:
        line.set_markersize(SHRINK * line.get_markersize())
    for text, usual in [*((text, 7.5) for text in ax.texts), *((tick, 7.0) for tick in ax.get_yticklabels())]:
        if text.get_fontsize() != usual:
            text.set_fontsize(0.75 * float(text.get_fontsize()))
    if isinstance(ax.yaxis.get_major_locator(), FixedLocator):
        ax.set_yticks(ax.get_yticks(), [_wrapped(tick.get_text(), IN_MARGIN) for tick in ax.get_yticklabels()])
    for text in ax.texts:
        text.set_text(_wrapped(text.get_text(), IN_MARGIN))
    beside = max((len(line) for tick in ax.get_yticklabels() for line in tick.get_text().split("\n")), default=0)
    wide = int(COLUMN_IN * CHARACTERS_AN_INCH) - max(15, beside)
    ax.set_title("\n".join(textwrap.wrap(ax.get_title(loc="left"), wide)), loc="left")
    ax.set_xlabel("\n".join(textwrap.wrap(ax.get_xlabel(), wide)))
    figure = ax.get_figure(root=True)
    if isinstance(figure, HouseFigure) and figure.handles:
        legend(ax, figure.handles)


def _wrapped(text: str, wide: int) -> str:
    """Return lines that are no longer than so many characters; a text of several lines stays as it is."""
    return text if "\n" in text else "\n".join(textwrap.wrap(text, wide))


def not_measured(ax: Axes, why: str) -> Axes:
    """Write "not measured" and the reason into an empty `ax`: silence would read as health."""
    ax.set_axis_off()
    place: dict[str, Any] = {"transform": ax.transAxes, "ha": "center", "va": "center", "wrap": True}
    ax.text(0.5, 0.5, f"not measured\n{why}", gid="not_measured", **place)
    return ax


def why_not_measured(ax: Axes) -> str | None:
    """Return the reason that `not_measured` wrote into `ax`, None for a figure with something in it."""
    written = (text.get_text().partition("\n")[2] for text in ax.texts if text.get_gid() == "not_measured")
    return next(written, None)


def short(value: float) -> str:
    """Return `value` with three digits, as labels show it: 0.0512, 1e-5, 2.5e36."""
    return _EXPONENT.sub(r"e\1", f"{value:.3g}")


def draw_curve(ax: Axes, x: Sequence[float] | Floats, y: Sequence[float] | Floats, **style: Any) -> Line2D:
    """Draw y against x, gaps where y is not finite; a long curve is thinned to what can be seen of it."""
    values = drawable(y)
    there = kept(np.arange(len(values)), values, MAX_COLUMNS)
    shown = np.where(np.isfinite(values), values, np.nan)[there]
    (line,) = ax.plot(np.asarray(x, dtype=np.float64)[there], shown, **style)
    return line


def drawable(y: Sequence[float] | Floats) -> Floats:
    """Return y with its finite values within the range in which matplotlib can lay out a log axis."""
    values = np.asarray(y, dtype=np.float64)
    return np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)


def mark_steps(
    ax: Axes, x: Sequence[float] | Floats, *, label: str, marker: str = "x", color: str = BAD, height: float = 0.97
) -> Line2D:
    """Mark positions along the top edge of `ax` (a rug): what has no place on the y axis still shows."""
    (line,) = ax.plot(
        np.asarray(x, dtype=np.float64),
        np.full(len(x), height),
        transform=ax.get_xaxis_transform(),
        linestyle="none",
        marker=marker,
        markersize=7,
        markeredgewidth=1.8,
        color=color,
        label=label,
        clip_on=False,
        zorder=4,
    )
    return line


def log_scale(ax: Axes, *axes: str) -> None:
    """Make the x or y axis of `ax` logarithmic, with plain numbers on its ticks."""
    for name in axes:
        axis = ax.xaxis if name == "x" else ax.yaxis
        low, high = ax.dataLim.intervalx if name == "x" else ax.dataLim.intervaly
        if 0 < low == high:  # matplotlib finds no range around a single value by itself
            (ax.set_xlim if name == "x" else ax.set_ylim)(low / 1.5, high * 1.5)
        (ax.set_xscale if name == "x" else ax.set_yscale)("log")
        axis.set_major_formatter(_PlainLog())
        axis.set_minor_formatter(_PlainLog(labelOnlyBase=False, minor_thresholds=(1.0, 0.5)))


class _PlainLog(LogFormatter):
    """Ticks of a log axis as 0.001, 1, 50 or 1e-5 rather than as powers of ten; 2 and 5 between, on up to two decades."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        text = _EXPONENT.sub(r"e\1", f"{x:g}")
        if not self.labelOnlyBase and self.axis is not None:
            low, high = sorted(self.axis.get_view_interval())
            if 10 * low < high <= 100 * low:
                return text if f"{x:e}"[0] in "125" else ""
        return text if LogFormatter.__call__(self, x, pos) else ""


def ticks_at(ax: Axes, sizes: Sequence[float], *, margin: float | None = None) -> None:
    """Put one tick at each size on a logarithmic x axis, which ends `margin` times beyond the last ones where that is given."""
    places = sorted(set(sizes))
    ax.set_xscale("log", base=2)
    if margin is not None:
        ax.set_xlim(places[0] / margin, places[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(places))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{int(size):,}" for size in places])


def legend(ax: Axes, handles: Sequence[Any] | None = None) -> None:
    """Add a legend when something in `ax` has a label: below the axes, where the figure's layout makes room for it, else where it covers least.

    A `HouseFigure` grows by it.
    """
    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    figure = ax.get_figure(root=True)
    if not handles or figure is None:
        return
    house = isinstance(figure, HouseFigure)
    if not house and not isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        points = sum(len(np.atleast_1d(line.get_xdata())) for line in ax.lines)
        ax.legend(handles=handles, loc="best" if points < MAX_SEARCHED_POINTS else "upper right")
        return
    letter, text = float(mpl.rcParams["legend.fontsize"]), float(mpl.rcParams["font.size"])
    width = figure.get_figwidth() * (1 if house else ax.get_position().width)
    room = int(width * CHARACTERS_AN_INCH * 8.5 / letter)  # 6 of them for the sample of the line, and the gap
    labels = ["\n".join(textwrap.wrap(str(handle.get_label()), max(20, room - 6))) for handle in handles]
    lines = sum(label.count("\n") + 1 for label in labels)
    columns = max(1, min(len(handles), room // (max(map(len, labels)) + 6)))
    if isinstance(figure, HouseFigure):
        figure.handles, figure.bare_height = handles, figure.bare_height or figure.get_figheight()
        figure.set_figheight(figure.bare_height + 1.6 * letter / 72 * -(-lines // columns))
    more = [ax.xaxis.label.get_text().count("\n"), *(tick.get_text().count("\n") for tick in ax.get_xticklabels())]
    depth = (3.1 + 1.4 * more[0] + 1.4 * max(more[1:], default=0)) * text + 6
    below = ScaledTranslation(0, -depth / 72, figure.dpi_scale_trans)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.01, 0)}
    place["bbox_transform"] = (
        blended_transform_factory(figure.transFigure if house else ax.transAxes, ax.transAxes) + below
    )
    ax.legend(handles, labels, ncols=columns, frameon=False, borderaxespad=0, borderpad=0, **place)
