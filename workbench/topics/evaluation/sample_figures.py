"""What a set for periodic evaluation can show, what it costs, and what the recall of a rare class rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from workbench.curves.class_counts import class_counts
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import Record, finding
from workbench.plots.style import (
    BAD,
    BASELINE,
    GOOD,
    PALETTE,
    drawing,
    legend,
    log_scale,
    not_measured,
    number,
    short,
)
from workbench.topics.evaluation.sample_size import evaluation_sizes

__all__ = ["plot_class_recall", "plot_evaluation_sample", "plot_selection_gap"]

Floats = NDArray[np.float64]
MAX_CLASSES = 30
SHIFT = 1.06
"""Factor by which points of different groups at the same number of examples are moved apart."""


def plot_evaluation_sample(record: Record, diagnosis: Diagnosis | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the smallest difference that shows, and the seconds of an evaluation, against the size of the sample.

    Left of a kink the sample is so small that a difference shows only where all examples on which two models disagree speak for
    the same one of them.

    Healthy: a shaded band, the sizes that show the smallest difference of interest within the time budget, with the taken
    size in it. Sick: no band; the curve meets the dashed line only right of the dotted one, beyond what the budget
    allows or the set holds.

    Args:
        record: a study with "evaluation_sample" in its facts.
        diagnosis: its `evaluation.too_small` says which bounds there are; without it only the curves are drawn.
        ax: where to draw; a new figure by default.

    Returns:
        The axes; the seconds stand along the top.

    Source: P3.1, P3.3, P3.4, P3.5.
    """
    with drawing(ax, size=(7.2, 4.6)) as axes:
        found = finding(diagnosis, "evaluation.too_small")
        comparisons = int((found.evidence if found is not None else {}).get("comparisons") or 100)
        table = evaluation_sizes(record, comparisons=comparisons)
        if table.empty or not np.isfinite(table["detectable"].to_numpy(dtype=np.float64)).any():
            return not_measured(axes, "no two models were evaluated on the validation set")
        facts = record.facts["evaluation_sample"]
        x = table["examples"].to_numpy(dtype=np.float64)
        lines = (
            ("detectable", "difference that shows, same examples", PALETTE[0], "-"),
            ("unpaired", "difference that shows, different examples", PALETTE[4], "--"),
            ("selection_gap", f"how much the best of {comparisons} equal models flatters itself", PALETTE[6], "-."),
        )
        for column, label, color, style in lines:
            y = table[column].to_numpy(dtype=np.float64)
            seen = np.isfinite(y) & (y > 0)
            if seen.any():
                axes.plot(x[seen], y[seen], color=color, linestyle=style, label=label)
        log_scale(axes, "x", "y")
        _mark_bounds(axes, facts, found)
        _seconds(axes, x, table["seconds"].to_numpy(dtype=np.float64))
        axes.set(
            xlabel="examples in the sample",
            ylabel=f"difference in {facts['metric']}",
            title="How large a sample: what it shows and what it costs",
        )
        legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return axes


def _mark_bounds(ax: Axes, facts: Mapping[str, Any], found: Any) -> None:
    wanted = number((facts.get("asked") or {}).get("smallest_difference"))
    evidence = {} if found is None else found.evidence
    available, largest, smallest = (number(evidence.get(name)) for name in ("available", "largest", "smallest"))
    if np.isfinite(wanted):
        ax.axhline(wanted, color=BASELINE, linestyle="--", label=f"smallest difference of interest: {short(wanted)}")
    top = np.fmin(available, largest)
    if np.isfinite(top) and top > 0:
        what = "the time budget allows" if largest < available else "the set holds"
        ax.axvline(top, color=BAD, linestyle=":", label=f"largest: {top:,.0f}, what {what}")
        if smallest <= top:
            ax.axvspan(
                smallest,
                top,
                color=GOOD,
                alpha=0.15,
                linewidth=0,
                label=f"both bounds kept: {smallest:,.0f} to {top:,.0f}",
            )
    size = number(evidence.get("size"))
    if np.isfinite(size):
        y = number(evidence.get("detectable"))
        ax.plot(
            [size],
            [y],
            marker="o",
            linestyle="none",
            color=PALETTE[0],
            markersize=7,
            label=f"the sample: {size:,.0f} examples, {short(y)}",
        )


def _seconds(ax: Axes, x: Floats, seconds: Floats) -> None:
    """Put the seconds of an evaluation along the top: they grow with the examples, so each size has its own."""
    if not np.isfinite(seconds).all():
        return
    slope = (seconds[-1] - seconds[0]) / (x[-1] - x[0])
    start = seconds[0] - slope * x[0]
    top = ax.secondary_xaxis("top", functions=(lambda n: start + slope * n, lambda s: (s - start) / slope))
    top.xaxis.set_major_formatter(FuncFormatter(lambda s, _: short(s)))
    top.xaxis.set_minor_formatter(NullFormatter())
    top.set_xlabel("seconds of one evaluation")


def plot_class_recall(
    counts: pd.DataFrame | Record, diagnosis: Diagnosis | None = None, *, ax: Axes | None = None
) -> Axes:
    """Draw the recall of each class with its interval, the rare classes first, and how many examples it rests on.

    Healthy: short bars. Sick: a bar as long as the axis: a recall that rests on a handful of examples, where a gain
    that looks large is one of them.

    Args:
        counts: of `class_counts`, or a study whose facts hold them.
        diagnosis: not needed; every figure takes one.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. A diamond is the recall before, where there was an evaluation before, and the words beside the bar say what
        the change is in examples. Of more than 30 classes the rarest 30 are drawn.

    Source: P3.6, P3.7.
    """
    del diagnosis
    table = counts if isinstance(counts, pd.DataFrame) else class_counts(counts)
    table = table.head(MAX_CLASSES)
    with drawing(ax, size=(7.2, max(2.4, 1.2 + 0.3 * len(table)))) as axes:
        if table.empty:
            return not_measured(axes, "no predictions were counted class by class")
        rows = np.arange(len(table), dtype=np.float64)
        recall, low, high = (table[name].to_numpy(dtype=np.float64) for name in ("recall", "low", "high"))
        axes.hlines(rows, low, high, color=PALETTE[0], linewidth=4, alpha=0.35, label="95 % interval (Wilson)")
        axes.plot(recall, rows, linestyle="none", marker="o", color=PALETTE[0], label="recall")
        before = table["before"].to_numpy(dtype=np.float64, na_value=np.nan) / np.maximum(table["total"].to_numpy(), 1)
        if np.isfinite(before).any():
            axes.plot(
                before,
                rows,
                linestyle="none",
                marker="D",
                markersize=4.5,
                markerfacecolor="none",
                color=BASELINE,
                label="before, or the other model",
            )
        for place, row in enumerate(table.to_dict("records")):
            axes.text(1.02, place, _beside(row), transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
        axes.set_yticks(rows, [str(k) for k in table["class"]])
        axes.set_ylim(len(table) - 0.4, -0.6)
        axes.set_xlim(min(0.9, float(np.nanmin(low)) - 0.03), 1.01)
        axes.set(
            xlabel="recall", ylabel="class, rarest first", title="Recall of each class, and the examples behind it"
        )
        legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.2 if len(table) > 6 else -0.28), ncols=3)
    return axes


def _beside(row: Mapping[Any, Any]) -> str:
    text = f"{row['correct']} of {row['total']}"
    delta = number(row["delta"])
    if delta and np.isfinite(delta):
        text += f"  ({delta:+.2f}: {row['delta_examples']})"
    return text


def plot_selection_gap(gaps: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw how far the validation accuracy of a chosen model lies above its accuracy on held-out examples.

    Healthy: curves well below the differences that one cares for, falling with the size of the set. Sick: a set so small that
    the gap of the best of many is as large as the improvements that it is used to find.

    Args:
        gaps: columns examples, rounds, gap (simulated), se (of it), expected (closed form) and how ("best of equal models",
            "rounds that build on each other").
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Points are simulated with two standard errors, each group a little to the side so that none hides another;
        lines are the closed form. Nothing of it is of a study.

    Source: P3.5.
    """
    with drawing(ax, size=(7.2, 4.4)) as axes:
        if gaps.empty:
            return not_measured(axes, "nothing was simulated")
        groups: Sequence[Any] = list(gaps.groupby(["how", "rounds"], sort=False))
        for place, ((how, rounds), rows) in enumerate(groups):
            color, marker = PALETTE[place % len(PALETTE)], "osD^vP"[place % 6]
            x = rows["examples"].to_numpy(dtype=np.float64)
            axes.errorbar(
                x * SHIFT ** (place - (len(groups) - 1) / 2), rows["gap"].to_numpy(dtype=np.float64), yerr=2 * rows["se"].to_numpy(dtype=np.float64), linestyle="none", marker=marker,
                markersize=5, color=color, capsize=2.5, label=f"{how}: {rounds:,}",
            )  # fmt: skip
            axes.plot(
                x,
                rows["expected"].to_numpy(dtype=np.float64),
                color=color,
                linestyle="-" if "best" in str(how) else "--",
            )
        axes.set_yscale("linear")
        axes.margins(y=0.08)
        log_scale(axes, "x")
        axes.set(
            xlabel="validation examples",
            ylabel="validation - held-out accuracy",
            title="Simulated: what choosing on a validation set costs its honesty",
        )
        legend(axes)
    return axes
