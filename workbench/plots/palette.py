"""The colours of every figure and the style around them, in one palette with a light and a dark variant."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from cycler import cycler

PALETTE = ("#3384dd", "#c77b12", "#a30b12", "#2f6b66", "#7a2bb0", "#b0708a", "#d9480f", "#5f7f1f", "#4d5159", "#0e9bbd")  # fmt: skip
DARK_PALETTE = ("#5ea6f0", "#fbb93b", "#f0492f", "#a9d3c6", "#a44ff0", "#d99aae", "#ff9966", "#d8d98a", "#8f96a5", "#5fdbe6")  # fmt: skip
"""The same colours by number on a dark page. Each has a contrast of 3 and more with its page (WCAG 2.1, 1.4.11); the first six
stay apart for readers who confuse red and green."""
SEQUENCE = ("#1b2a8f", "#1a6fb5", "#128a80", "#5c8a1e", "#b97a00", "#c23b22")
DARK_SEQUENCE = ("#8aa0ff", "#4fc3f7", "#4dd0b0", "#b5d334", "#ffc233", "#ff7a5c")
"""Small to large: from blue to red, so that neighbours differ in hue, each with such a contrast."""
GOOD, BAD, BASELINE = PALETTE[0], PALETTE[2], PALETTE[8]
INK, PAPER, GRID = "#22242a", "#fefefe", "#dcdee3"
DARK_INK, DARK_PAPER, DARK_GRID = "#e6e8ec", "#1d2026", "#383d47"
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

_ONE_STYLE = threading.RLock()

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
    "pdf.fonttype": 42,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": INK,
    "xtick.minor.pad": 5.0,
    "ytick.color": INK,
    "ytick.minor.pad": 5.0,
}


@contextmanager
def house_style(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn the house style, and `more` settings, on within the block; threads take turns, because matplotlib has one style."""
    settings: Any = _STYLE | dict(more or {})
    with _ONE_STYLE, mpl.rc_context(settings):
        yield
