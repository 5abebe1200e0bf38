"""Figure 4 of the playbook: loss against learning rate for a baseline, a modification, and the modification with a warmup."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.loss import fit_y
from workbench.plots.palette import BAD, BASELINE, GOOD, PAPER
from workbench.plots.style import Size, drawing, legend, log_scale, mark_steps, not_measured, short
from workbench.record.json_values import number
from workbench.topics.comparison.diagnose import diagnose_modification

LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "baseline": ("baseline", {"color": BASELINE, "linestyle": "-", "marker": "s", "markersize": 9}),
    "modified": ("modified", {"color": BAD, "linestyle": "--", "marker": "o", "markersize": 6.5}),
    "warmed": ("modified, with warmup", {"color": GOOD, "linestyle": "-.", "marker": "D", "markersize": 4}),
}
"""Curves that run together stay visible: marks of different sizes, one on the other."""
ROWS = {"baseline": 0.97, "modified": 0.93, "warmed": 0.89}  # heights along the top edge


def plot_modification(
    baseline: Record,
    modified: Record,
    warmed: Record | None = None,
    diagnosis: Diagnosis | None = None,
    *,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the loss at the end of training against the learning rate for the arms of a comparison.

    Healthy: the three curves run together up to the same learning rate, a hollow mark each where they stop training.
    Sick: the modified curve follows the baseline's at low learning rates and leaves it for hollow marks
    where the baseline still trains. With a warmup that cures it, it follows the baseline's again.

    The points and where each arm stops are those of `comparison.*` of the diagnosis, which is made from the records where there is none.
    A line goes through the mean over the seeds, its bar from the lowest to the highest; a hollow mark is unstable under at least
    half of the seeds. A learning rate at which a seed diverged is marked along the top edge.

    Source: F1.3 (figure 4), F3.16.
    """
    with drawing(ax, size, (7.2, 5.4)) as axes:
        records = [record for record in (baseline, modified, warmed) if record is not None]
        if finding(diagnosis, "comparison.high_lr_lost") is None:
            trained = all("loss" in record.steps for record in records)
            diagnosis = diagnose_modification(baseline, modified, warmed) if trained else None
        found = finding(diagnosis, "comparison.high_lr_lost")
        arms: Mapping[str, Sequence[Mapping[str, Any]]] = {} if found is None else found.evidence["arms"]
        if not any(arms.values()):
            return not_measured(axes, "no arm has a finished trial of a learning-rate sweep")
        axes.set(
            xlabel="peak learning rate",
            ylabel="training loss, end of the run\n(bars: lowest to highest seed)",
            title="Which learning rates train: baseline, modified, with warmup",
        )
        curves = [line for name, points in arms.items() for line in _draw_arm(axes, name, points)]
        _mark_limits(axes, diagnosis)
        lrs = [number(p["lr"]) for points in arms.values() for p in points]
        axes.set_xlim(min(lrs) / 1.5, max(lrs) * 1.5)
        log_scale(axes, "x")
        axes.margins(y=0.12)
        if curves:
            fit_y(axes, curves, margin=0.12)
        else:
            axes.set_yticks([])
        legend(axes)
    return axes


def _draw_arm(ax: Axes, name: str, points: Sequence[Mapping[str, Any]]) -> list[Line2D]:
    """Draw one arm: means as a line, seeds as bars, the unstable ones hollow, the diverged ones along the top edge."""
    label, look = LOOKS[name]
    ordered = sorted(points, key=lambda p: number(p["lr"]))
    means = [(number(p["lr"]), number(p["loss"])) for p in ordered]
    finite = [(lr, loss) for lr, loss in means if np.isfinite(loss)]
    curves: list[Line2D] = []
    if finite:
        x, y = np.array(finite).T
        seeds = [[number(loss) for loss in p["losses"]] for p in ordered if np.isfinite(number(p["loss"]))]
        spread = [(min(losses), max(losses)) for losses in seeds]
        curves = ax.plot(x, y, label=label, zorder=3, **look)
        low, high = np.array(spread).T
        ax.errorbar(
            x, y, yerr=[y - low, high - y], fmt="none", ecolor=look["color"], elinewidth=1.0, capsize=2.5, zorder=3
        )
        hollow = np.array([bool(p["unstable"]) for p in ordered if np.isfinite(number(p["loss"]))])
        if hollow.any():
            style = {"linestyle": "none", "marker": look["marker"], "markersize": look["markersize"], "zorder": 4}
            unstable = f"{label}: unstable ({int(hollow.sum())})"
            ax.plot(x[hollow], y[hollow], markerfacecolor=PAPER, markeredgecolor=look["color"], label=unstable, **style)
    diverged = [lr for lr, loss in means if not np.isfinite(loss)]
    if diverged:
        look = {"color": str(look["color"]), "marker": str(look["marker"]), "height": ROWS[name]}
        mark_steps(ax, diverged, label=f"{label}: a seed diverged ({len(diverged)})", **look)
    return curves


def _mark_limits(ax: Axes, diagnosis: Diagnosis | None) -> None:
    """Mark where the modification stops training, and up to where it trains with the warmup."""
    unstable, cures = finding(diagnosis, "comparison.high_lr_lost"), finding(diagnosis, "comparison.warmup_cures")
    if unstable is not None and unstable.evidence.get("holds") is True:
        lr = number(unstable.evidence["lrs"][0]["lr"])
        ax.axvline(lr, color=BAD, linestyle=":", label=f"the modified training fails from {short(lr)}")
    if cures is not None and cures.evidence.get("holds") is not None:
        lr, steps = number(cures.value), cures.evidence["warmup_steps"]
        if np.isfinite(lr):
            ax.axvline(lr, color=GOOD, linestyle=":", label=f"warmup over {steps:,} steps: stable up to {short(lr)}")
