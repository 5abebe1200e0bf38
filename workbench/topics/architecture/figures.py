"""The largest stable learning rate of each variant of an architecture, over its depth."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.plots.palette import INK, PALETTE, PAPER, STYLES
from workbench.plots.style import Size, drawing, legend, log_scale, mark_steps, not_measured
from workbench.topics.architecture.diagnose import architecture_depths, lr_sensitivity

MARKERS = "osD^vPX*"
ENDS = (("above", "stable_lr", "^", "all stable: lies above"), ("below", "unstable_lr", "v", "none stable: lies below"))
BESIDE = 1.02  # points of one depth stand beside each other by this factor: on a grid of learning rates many coincide


def plot_architecture(record: Record, *, size: Size = "page", ax: Axes | None = None) -> Axes:
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
    with drawing(ax, size, (8.2, 4.4)) as axes:
        table = architecture_depths(record)
        drawn = table["stable_lr"].fillna(table["unstable_lr"])
        if not np.isfinite(drawn.to_numpy(dtype=np.float64)).any():
            return not_measured(axes, "the study has no variant with a largest stable learning rate")
        untrained = [int(depth) for depth in table.loc[table["censored"] == "untrained", "depth"]]
        variants = list(table.groupby("variant", sort=False))
        for i, (variant, rows) in enumerate(variants):
            rows = rows.sort_values("depth").astype({"depth": float, "stable_lr": float, "unstable_lr": float})  # noqa: PLW2901
            depths = rows["depth"] * BESIDE ** (i - (len(variants) - 1) / 2)
            color, marker, style = (each[i % len(each)] for each in (PALETTE, MARKERS, STYLES))
            line: dict[str, Any] = {"color": color, "linestyle": style, "marker": marker, "markersize": 6}
            axes.plot(depths, rows["stable_lr"], label=variant, **line)
            for end, column, shape, _ in ENDS:
                at = rows["censored"] == end
                hollow: dict[str, Any] = {
                    "markersize": 11,
                    "markerfacecolor": PAPER,
                    "markeredgewidth": 1.6,
                    "zorder": 3,
                }
                axes.plot(depths[at], rows[column][at], shape, markeredgecolor=color, **hollow)
        for end, _, shape, text in ENDS:
            if (table["censored"] == end).any():
                axes.plot([], [], shape, label=text, markersize=9, markerfacecolor=PAPER, markeredgecolor=INK)
        if untrained:
            mark_steps(axes, sorted(set(untrained)), label="some variant learns at no lr")
        axes.set(xlabel="depth (blocks)", ylabel="largest stable learning rate", title="What each practice is worth over depth")  # fmt: skip
        log_scale(axes, "x", "y")
        depths = sorted({int(depth) for depth in table["depth"]})
        axes.set_xticks(depths, [str(depth) for depth in depths], minor=False)
        axes.set_xticks([], minor=True)
        legend(axes)
    return axes


def plot_sensitivity(record: Record, *, size: Size = "page", ax: Axes | None = None) -> Axes:
    """Draw the loss at the end against the learning rate, one line a variant and depth, with the sensitivity of each.

    Healthy: wide, level valleys, and the same for every depth. Sick: walls that stand closer the deeper or wider the model is.

    Source: F1.4; Wortsman et al. 2023, arXiv:2309.14322, figure 1.
    """
    with drawing(ax, size, (8.2, 4.6)) as axes:
        table = lr_sensitivity(record)
        if table.empty:
            return not_measured(axes, "the study has no variant with losses at several learning rates")
        variants, depths = list(dict.fromkeys(table["variant"])), sorted(set(table["depth"]))
        for (variant, depth), rows in table.groupby(["variant", "depth"], sort=False):
            i, k = variants.index(variant), depths.index(depth)
            label = f"{variant}, {depth}: {rows['sensitivity'].iloc[0]:.3f}"
            line: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}
            axes.plot(rows["lr"], rows["loss"], label=label, linestyle=STYLES[k % len(STYLES)], markersize=4, **line)
        axes.set(xlabel="learning rate", ylabel="loss at the end", title="Loss over learning rates (variant, size: mean excess loss)")  # fmt: skip
        log_scale(axes, "x")
        legend(axes)
    return axes
