"""Update rules side by side: the learning rates that each of them trains with."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import baseline_lr, finding
from workbench.plots.palette import BAD, BASELINE, GOOD, INK, PALETTE
from workbench.plots.style import Size, drawing, legend, log_scale, not_measured, short
from workbench.record.json_values import number
from workbench.topics.optimizers.diagnose import diagnose_optimizers

BAR, THIN = 0.5, 0.2


def plot_optimizers(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw for each update rule the learning rates that train, its best one, and where it turns unstable.

    Healthy: the baseline's own learning rate, the diamond, lies well within the bar of its rule, left of the cross. Sick: the bar
    of the baseline's rule is the shortest, or the star stands at its right end, so that the best learning rate sits at the edge;
    then a rule with a longer bar is one to try.

    Of a study of anything else the baseline's rule alone is drawn. A thin bar reaches from the last lr that trains to the largest that
    is stable: it does not blow up, nor learn enough. Thin lines are the brackets of the two ends. Numbers on the right are the width of
    the bar and the end loss at lr*.

    Source: F2.3 (stable learning-rate ranges side by side).
    """
    found = finding(diagnosis, "optimizers.better")
    if found is None and "loss" in record.steps:
        found = diagnose_optimizers(record)["optimizers.better"]
    rows = [] if found is None else [r for r in found.evidence.get("ranges", ()) if r.get("best_lr") is not None]
    with drawing(ax, size, (8.2, 1.6 + 0.45 * max(len(rows), 3))) as axes:
        if not rows:
            return not_measured(axes, "no update rule has a learning rate at which it learned anything")
        own = str(found.evidence.get("own")) if found is not None else ""
        for place, row in enumerate(rows):
            _draw_rule(axes, place, row, own=row["optimizer"] == own)
        if own == rows[0]["optimizer"] and math.isfinite(baseline_lr(record)):
            axes.plot(baseline_lr(record), 0, "D", color=INK, fillstyle="none", markersize=11, zorder=6)
        # Of a function of the user's own only what it is called.
        names = [row["optimizer"].rpartition(":")[2].partition("#")[0] for row in rows]
        axes.set_yticks(range(len(rows)), names)
        for label, row in zip(axes.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if row["optimizer"] == own else "normal")
        axes.set(xlabel="learning rate", ylabel="update rule", title="Learning rates that train, by update rule")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        log_scale(axes, "x")
        ends = ("trains_from", "fails_below", "trains_to", "fails_above", "stable", "unstable")
        lrs = [number(row[name]) for row in rows for name in ends]
        axes.set_xlim(np.nanmin(lrs) / 1.6, np.nanmax(lrs) * 1.6)
        legend(axes, _legend_handles(rows, own))
    return axes


def _draw_rule(ax: Axes, place: int, row: Mapping[str, Any], *, own: bool) -> None:
    names = ("trains_from", "trains_to", "stable", "unstable", "decades", "loss", "best_lr")
    low, high, stable, unstable, width, loss, best = (number(row[name]) for name in names)
    color = PALETTE[1] if own else GOOD
    ax.barh(place, high - low, left=low, height=BAR, color=color, alpha=0.85, zorder=3)
    if stable > high * 1.001:
        ax.barh(place, stable - high, left=high, height=THIN, color=color, alpha=0.4, zorder=2)
    for end, beyond in ((low, number(row["fails_below"])), (high, number(row["fails_above"]))):
        if math.isfinite(beyond):
            ax.plot([end, beyond], [place, place], color=BASELINE, linestyle="-", linewidth=1.2, zorder=2.5)
    if math.isfinite(unstable):
        ax.plot(unstable, place, "x", color=BAD, markersize=8, markeredgewidth=2, zorder=5)
    ax.plot(best, place, "*", color=INK, markersize=11, zorder=5)
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8.5}
    ax.annotate(f"{width:.1f} decades, loss {short(loss)}", (1.01, place), annotation_clip=False, **beside)


def _legend_handles(rows: Sequence[Mapping[str, Any]], own: str) -> list[Any]:
    def mark(marker: str, label: str, color: str = INK, **look: Any) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, color=color, label=label, **look)

    handles: list[Any] = [Patch(color=GOOD, alpha=0.85, label="trains")]
    if any(row["optimizer"] == own for row in rows):
        handles.append(Patch(color=PALETTE[1], alpha=0.85, label="trains (the baseline's rule)"))
        handles.append(mark("D", "baseline's lr", fillstyle="none", markersize=9))
    handles.append(mark("*", "lr*", markersize=11))
    if any(math.isfinite(number(row["unstable"])) for row in rows):
        handles.append(mark("x", "unstable from here", BAD, markersize=8, markeredgewidth=2))
    return [*handles, Line2D([], [], color=BASELINE, linewidth=1.2, label="uncertainty of the edge")]
