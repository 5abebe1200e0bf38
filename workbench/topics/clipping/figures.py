"""Pictures of gradient clipping: what each threshold costs, and how many steps it touches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.clipped_runs import clipped_runs
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import Record, finding
from workbench.plots.style import (
    BAD,
    BASELINE,
    GOOD,
    PALETTE,
    PAPER,
    drawable,
    drawing,
    legend,
    log_scale,
    mark_steps,
    not_measured,
    number,
    short,
)
from workbench.topics.clipping.ladder import read_ladder

__all__ = ["plot_clipping"]


def plot_clipping(
    record: Record, diagnosis: Diagnosis | None = None, *, aggressive_frac: float = 0.5, ax: Axes | None = None
) -> Axes:
    """Draw the loss at the end of each clipped run against its threshold, with the share of steps that were clipped.

    Healthy: the loosest threshold already trains as well as the others, and its label says about 10 %. Sick: only points
    with hollow marks (half of the steps or more are clipped) reach a low loss, or every threshold is marked along the top
    edge: the learning rate is too high, and no threshold makes up for that.

    Args:
        record: a study with clipped runs, as `ClippingStudy` makes them.
        diagnosis: of `diagnose_clipping`; its `clipping.threshold` draws the threshold that is proposed.
        aggressive_frac: share of clipped steps from which a point is hollow (F4.11).
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Runs that did not come back have no place on the y axis: they are marked along the top edge, a cross
        for diverged, a triangle for the others.

    Source: F4.10 (ladder of thresholds), F4.11 and F4.12 (the clipped share).
    """
    with drawing(ax, size=(6.8, 4.4)) as axes:
        rows = _rows(record, diagnosis)
        if not rows:
            return not_measured(axes, "the record has no finished run with clipping")
        stable = [row for row in rows if not row["lasting"] and math.isfinite(number(row["loss"]))]
        lr = number(rows[0]["lr"])
        axes.set(xlabel="threshold (max_grad_norm)", ylabel="training loss, end of the run")
        axes.set_title(f"Clipping at lr {short(lr)}")
        _draw_stable(axes, stable, aggressive_frac)
        _draw_unstable(axes, [row for row in rows if row not in stable])
        _draw_without(axes, rows)
        _draw_proposed(axes, diagnosis)
        limits = [number(row["max_grad_norm"]) for row in rows]
        margin = max(1.05, (max(limits) / min(limits)) ** 0.15)
        axes.set_xlim(min(limits) / margin, max(limits) * margin)
        log_scale(axes, "x")
        if not stable:
            axes.set_yticks([])
        elif min(number(row["loss"]) for row in stable) > 0:
            log_scale(axes, "y")
        axes.margins(y=0.2)
        legend(axes)
    return axes


def _rows(record: Record, diagnosis: Diagnosis | None) -> Sequence[Mapping[str, Any]]:
    """The runs of the ladder, from the diagnosis; without one, from the record."""
    if "loss" not in record.steps:
        return []
    found = finding(diagnosis, "clipping.masks_lr")
    known = found.evidence.get("runs") if found is not None else None
    rows = clipped_runs(record) if known is None else known
    return [row for rung in read_ladder(record, rows) for row in rung.rows]


def _draw_stable(ax: Axes, rows: Sequence[Mapping[str, Any]], aggressive_frac: float) -> None:
    for heavy, label in ((False, "stable"), (True, f"stable, but {aggressive_frac:.0%} of the steps or more clipped")):
        shown = [row for row in rows if (number(row["clip_frac"]) >= aggressive_frac) is heavy]
        if shown:
            x, y = ([number(row[name]) for row in shown] for name in ("max_grad_norm", "loss"))
            fill = "none" if heavy else GOOD
            ax.plot(x, drawable(y), "o", color=GOOD, markerfacecolor=fill, markersize=8, label=label, zorder=4)
    for row in rows:
        place = (number(row["max_grad_norm"]), float(drawable([number(row["loss"])])[0]))
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.85}
        ax.annotate(
            _share(row), place, xytext=(0, 9), textcoords="offset points", ha="center", fontsize=8.5, bbox=box, zorder=5
        )


def _draw_unstable(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for diverged, marker, label in ((True, "x", "diverged"), (False, "v", "unstable, or nothing learned")):
        shown = [row for row in rows if math.isinf(number(row["loss"])) is diverged]
        if shown:
            shares = ", ".join(dict.fromkeys(_share(row) for row in shown))
            at = [number(row["max_grad_norm"]) for row in shown]
            mark_steps(ax, at, marker=marker, label=f"{label} ({shares} clipped)")


def _draw_without(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the same lr without clipping, where it was run."""
    known = {row["twin"]: row for row in rows if row["twin"] is not None}
    if not known:
        return
    stable = [number(row["twin_loss"]) for row in known.values() if not row["twin_lasting"]]
    row = next(iter(known.values()))
    label = f"lr {short(number(row['lr']))} without clipping"
    if stable and np.isfinite(stable).all():
        ax.axhline(float(np.mean(stable)), color=BASELINE, linestyle="--", label=label)
    else:
        outcome = "never trained" if row["twin_outcome"] == "none" else row["twin_outcome"]  # lasting without a rise
        ax.plot([], [], "X", color=BAD, label=f"{label}: {outcome}")


def _draw_proposed(ax: Axes, diagnosis: Diagnosis | None) -> None:
    """Draw the threshold that is proposed, and the end loss of the run whose norms it comes from."""
    found = finding(diagnosis, "clipping.threshold")
    value = number(found.value) if found is not None else math.nan
    level = number(found.evidence.get("loss")) if found is not None else math.nan
    if found is not None and math.isfinite(level) and not found.evidence.get("reference_clipped"):
        label = f"lr {short(number(found.evidence.get('lr')))} without clipping"
        ax.axhline(float(drawable([level])[0]), color=BASELINE, linestyle=":", label=label)
    if found is not None and math.isfinite(value):
        percentile = number(found.evidence.get("percentile"))
        name = f"{short(percentile)}th percentile" if math.isfinite(percentile) else "proposed"
        ax.axvline(value, color=PALETTE[4], linestyle="-.", label=f"{name}: {short(value)}")


def _share(row: Mapping[str, Any]) -> str:
    share = number(row["clip_frac"])
    return f"{100 * share:.0f} %" if math.isfinite(share) else "? %"
