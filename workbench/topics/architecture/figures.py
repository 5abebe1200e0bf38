"""The largest stable learning rate of each variant of an architecture, over its depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.plots.style import INK, PALETTE, PAPER, STYLES, drawing, legend, log_scale, mark_steps, not_measured
from workbench.topics.architecture.diagnose import architecture_depths

MARKERS = "osD^vPX*"
BESIDE = 1.02
"""Points of one depth stand beside each other by this factor: on a grid of learning rates many coincide."""


def plot_architecture(record: Record, *, ax: Axes | None = None) -> Axes:
    """Draw the largest stable learning rate against depth, one line a variant.

    Healthy: a line that stays level, high up: the practice keeps its learning rate however deep the network gets. Sick: a line
    that falls steeply, a hollow triangle pointing down (nothing that was tried is stable, the truth lies below) or a cross at
    the top (at no learning rate anything was learned). A hollow triangle pointing up is the end of the grid: the truth lies
    above.

    Returns:
        The axes. Each point is bracketed by the grid: the next larger learning rate of it was unstable. Points of one depth
        stand a little beside each other.

    Source: F2.5 (plain against residual with norm), F2.6 and F2.7 (both places of the norm), F2.8 (branches of zero).
    """
    with drawing(ax, size=(8.2, 4.4)) as axes:
        table = architecture_depths(record)
        drawn = table["stable_lr"].fillna(table["unstable_lr"])
        if not np.isfinite(drawn.to_numpy(dtype=np.float64)).any():
            return not_measured(axes, "the study has no variant with a largest stable learning rate")
        untrained = [int(depth) for depth in table.loc[table["censored"] == "untrained", "depth"]]
        variants = list(table.groupby("variant", sort=False))
        for i, (variant, rows) in enumerate(variants):
            beside = BESIDE ** (i - (len(variants) - 1) / 2)
            _draw(axes, rows.sort_values("depth").assign(depth=rows["depth"] * beside), str(variant), i)
        _name_the_ends(axes, table)
        if untrained:
            mark_steps(axes, sorted(set(untrained)), label="some variant learns at no lr")
        axes.set(xlabel="depth (blocks)", ylabel="largest stable learning rate", title="What each practice is worth over depth")  # fmt: skip
        log_scale(axes, "x", "y")
        depths = sorted({int(depth) for depth in table["depth"]})
        axes.set_xticks(depths, [str(depth) for depth in depths], minor=False)
        axes.set_xticks([], minor=True)
        legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return axes


def _draw(ax: Axes, rows: pd.DataFrame, variant: str, place: int) -> None:
    color, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
    stable = rows["stable_lr"].to_numpy(dtype=np.float64)
    ax.plot(
        rows["depth"].to_numpy(dtype=np.float64), stable, color=color, linestyle=STYLES[place % len(STYLES)], marker=marker,
        markersize=6, label=variant,
    )  # fmt: skip
    for end, column, shape in (("above", "stable_lr", "^"), ("below", "unstable_lr", "v")):
        at = rows[rows["censored"] == end]
        ax.plot(
            at["depth"].to_numpy(dtype=np.float64), at[column].to_numpy(dtype=np.float64), linestyle="none", marker=shape,
            markersize=11, markerfacecolor=PAPER, markeredgecolor=color, markeredgewidth=1.6, zorder=3,
        )  # fmt: skip


def _name_the_ends(ax: Axes, table: pd.DataFrame) -> None:
    for end, shape, text in (("above", "^", "all stable: lies above"), ("below", "v", "none stable: lies below")):
        if (table["censored"] == end).any():
            shown: dict[str, Any] = {"markersize": 9, "markerfacecolor": PAPER, "markeredgecolor": INK}
            ax.plot([], [], linestyle="none", marker=shape, label=text, **shown)
