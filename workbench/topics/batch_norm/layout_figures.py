"""Whose examples make batch norm's statistics, as a picture of one step on several hosts: no training needed."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.plots.style import BASELINE, INK, PALETTE, drawing, legend
from workbench.topics.batch_norm.layout import StatisticsLayout

__all__ = ["plot_batch_norm_layout"]

HATCHES = ("", "//", "..", "xx")
COLORS = (PALETTE[0], PALETTE[1], PALETTE[4], PALETTE[9])


def plot_batch_norm_layout(layout: StatisticsLayout, *, ax: Axes | None = None) -> Axes:
    """Draw a row of examples for each host; those of one colour and hatch make one statistic together.

    Healthy: rows of one colour that are long enough. Sick: short rows (each statistic is noisy), or many colours, where running
    statistics differ from host to host.

    Args:
        layout: as `statistics_layout` returns it.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Pale examples are normalised and make no statistic.

    Source: P6.3, P6.4, P6.6.
    """
    with drawing(ax, size=(6.2, 3.6)) as axes:
        hosts = np.arange(layout.hosts)
        group = hosts // layout.hosts_each
        share = layout.examples / layout.hosts_each
        for look in range(len(COLORS)):
            mine = hosts[group % len(COLORS) == look]
            if mine.size:
                axes.barh(mine, share, height=0.8, color=COLORS[look], hatch=HATCHES[look], edgecolor=INK, linewidth=0.4,
                          label="one look, one statistic" if look == 0 else None)  # fmt: skip
        if layout.left_out:
            axes.barh(
                hosts,
                layout.per_host - share,
                left=share,
                height=0.8,
                color=BASELINE,
                alpha=0.25,
                label="in no statistic",
            )
        axes.set(xlabel="examples on the host", ylabel="host")
        title = f"{layout.statistics} statistic{'s' * (layout.statistics != 1)} of {layout.examples:,} examples"
        axes.set_title(f"{title}, {layout.hosts_each} hosts together" if layout.synchronised else title)
        axes.set_ylim(layout.hosts - 0.4, -0.6)
        axes.set_xlim(0, 1.02 * layout.per_host)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes, loc="lower right")
    return axes
