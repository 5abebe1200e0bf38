"""How every figure looks, and the one way in which a figure says that it has nothing to show.

The style lives inside a `with` block, so that drawing changes no global setting. Colours are those of petroff10
(Petroff, 2021: made for colour-blind readers); whatever a colour tells, a marker or a line style tells too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")  # fmt: skip
GOOD, BAD, BASELINE = PALETTE[0], PALETTE[2], PALETTE[8]
INK, PAPER, GRID = "#22242a", "#fefefe", "#dcdee3"
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
LARGEST = 1e100
"""Finite values are drawn no larger: the margins of a log axis would overflow, and a diverged run passes through them."""
MAX_VECTOR_POINTS = 3000
"""A curve with more points is stored as pixels within a vector file; only the file's size depends on it."""

_ONE_STYLE = threading.RLock()
_EXPONENT = re.compile(r"e\+?(-?)0*")

MAX_SEARCHED_POINTS = 50_000
"""Above this many drawn points the legend goes to the upper right: the search for free space gets slow."""

_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": cycler(color=PALETTE[:6], linestyle=STYLES),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": PAPER,
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.edgecolor": GRID,
    "legend.facecolor": PAPER,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.4,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": INK,
    "xtick.minor.pad": 5.0,
    "ytick.color": INK,
    "ytick.minor.pad": 5.0,
}


@contextmanager
def drawing(ax: Axes | None, *, size: tuple[float, float] = (6.8, 4.0)) -> Iterator[Axes]:
    """Yield `ax`, or a new one of `size` inches, with the house style on; nothing global stays changed."""
    with house_style():
        if ax is None:
            _, ax = plt.subplots(figsize=size, layout="constrained")
        yield ax


@contextmanager
def house_style(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn the house style, and `more` settings, on within the block; threads take turns, because matplotlib has one style."""
    settings: Any = _STYLE | dict(more or {})
    with _ONE_STYLE, mpl.rc_context(settings):
        yield


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
    """Draw y against x, gaps where y is not finite; long curves become pixels within a vector file."""
    values = drawable(y)
    shown = np.where(np.isfinite(values), values, np.nan)
    (line,) = ax.plot(np.asarray(x, dtype=np.float64), shown, rasterized=len(values) > MAX_VECTOR_POINTS, **style)
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


def legend(ax: Axes, **where: Any) -> None:
    """Add a legend when something in `ax` has a label; where it covers least, unless that takes long to find."""
    if ax.get_legend_handles_labels()[0]:
        points = sum(len(np.atleast_1d(line.get_xdata())) for line in ax.lines)
        ax.legend(**{"loc": "best" if points < MAX_SEARCHED_POINTS else "upper right", **where})
