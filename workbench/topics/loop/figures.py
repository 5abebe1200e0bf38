"""A watched run at a glance: loss, gradient norm and learning rate over its updates."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.clipping import max_grad_norm_of
from workbench.curves.minimised import selects_by_loss
from workbench.curves.selection import selected_rows
from workbench.curves.trial_curves import RecordLike
from workbench.plots.style import (
    BAD,
    BASELINE,
    GOOD,
    INK,
    POINTS,
    Size,
    draw_curve,
    drawing,
    legend,
    log_scale,
    mark_steps,
    not_measured,
    short,
)
from workbench.record.metrics import passed_over
from workbench.topics.loop.known import rows_of

_LINES = (
    ("loss", "loss", GOOD, "-"),
    ("grad_norm", "gradient norm", BAD, "--"),
    ("lr", "learning rate", BASELINE, ":"),
)
_FALL = 1e4
"""Factor by which a learning rate falls within the picture: further down it trains nothing, and the axis would hold nothing else (rule of thumb)."""


def plot_loop(record: RecordLike, diagnosis: object = None, *, size: Size = "page", ax: Axes | None = None) -> Axes:  # noqa: ARG001
    """Draw loss, gradient norm before clipping and learning rate of the baseline against the update, on one logarithmic axis.

    Healthy: the loss falls, and an evaluated one (squares) with it, the norm stays in one decade and mostly below the clip limit (thin
    line), the learning rate follows its schedule to the end of the run. Sick: a norm that grows with every update, as where gradients are
    not zeroed; a norm that lies above its limit all along; a learning rate that falls off the picture or climbs again. Values of 0 and
    below have no place on the axis. Marks at the upper edge are evaluations of other metrics.

    Source: F1.1 (what a loop should do), F4.9 (the limit), F3.5 (the schedule).
    """
    with drawing(ax, size, (6.8, 3.6)) as axes:
        steps = rows_of(record)
        least = np.inf  # of what is drawn beside the learning rate
        drawn = 0  # curves beside the learning rate, which alone says nothing of a run
        for column, label, colour, style in _LINES:
            if column not in steps:
                continue
            values = steps[column].to_numpy(dtype=np.float64, na_value=np.nan)
            positive = np.where(values > 0, values, np.nan)
            if np.isfinite(positive).any():
                if column == "lr":
                    positive[positive < min(least, np.nanmax(positive)) / _FALL] = np.nan
                there = ~passed_over(steps) | np.isfinite(values)
                look = {"linestyle": style} if there.all() else POINTS
                told = label if there.all() else f"{label} ({there.sum():,} of {there.size:,})"
                draw_curve(axes, steps["step"].to_numpy()[there], positive[there], label=told, color=colour, **look)
                drawn += column != "lr"
                least = min(least, np.nanmin(positive))
        if not drawn:
            return not_measured(axes, "no update has a loss or a gradient norm above 0")
        limit = max_grad_norm_of(record.config)
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=0.8, label=f"clipped above {short(limit)}")
        best = selected_rows(record, int(steps["trial"].iloc[0]))
        evals = record.evals  # rows of training data are the package's own look at the same model
        evaluated = evals["step"][evals["split"] != "train"].unique() if "split" in evals else np.array([])
        if selects_by_loss(record) and len(best) and (best["value"] > 0).any():
            name, values = (
                str(record.config["select"]),
                best["value"].where(best["value"] > 0).to_numpy(dtype=np.float64),
            )
            draw_curve(
                axes, best["step"].to_numpy(), values, label=name, color=INK, marker="s", markersize=3, linewidth=0.8
            )
        elif evaluated.size:
            mark_steps(axes, np.asarray(evaluated, dtype=np.float64), label="evaluation", marker="|", color=INK)
            axes.margins(y=0.12)  # room for them above the curves
        log_scale(axes, "y")
        axes.set(xlabel="update", ylabel="as recorded, log scale", title="One run: loss, gradient norm, learning rate")
        legend(axes)
        return axes
