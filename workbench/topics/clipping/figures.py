"""Pictures of gradient clipping: the norm at each step and how often each size occurs (F4.8), and what each threshold costs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from workbench.curves.clipping import ClipThreshold, choose_threshold, clipped_runs, ordinal
from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import curve, default_trial, field_of, finding, lr_of, part_measured
from workbench.plots.loss import fit_y
from workbench.plots.palette import BAD, BASELINE, GOOD, PALETTE, PAPER
from workbench.plots.style import (
    POINTS,
    Size,
    draw_curve,
    drawable,
    drawing,
    legend,
    log_scale,
    mark_steps,
    not_measured,
    short,
)
from workbench.record.json_values import number
from workbench.topics.clipping.ladder import read_ladder

Floats = NDArray[np.float64]


def plot_grad_norm(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    percentile: float | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the L2 norm of the gradient, before clipping, against the step.

    Healthy: a band that drifts slowly; where clipping is on, the band lies below the threshold and only single steps
    stick out. Sick: spikes of many times the band's height (outlier batches, the start of a mid-run instability), a
    norm that climbs until the run diverges, or a band that lies above the threshold, so that nearly every step is
    clipped and the threshold acts as a lower learning rate. Norms of a loop that is watched are points: not every update is measured.

    The threshold that `clipping.threshold` of the diagnosis proposes is drawn, and on the trial that it was measured on the same
    percentile of each tenth of the run. `percentile` draws the threshold at this percentile of the trial's own norms instead, and marks
    the steps that it would clip. The trial is by default the baseline's, else the sweep's at the baseline's lr or at lr*.

    Source: F1.9 (log the norm), F4.7 (unclipped), F4.8 (this picture by default).
    """
    with drawing(ax, size) as axes:
        trial = default_trial(record, diagnosis) if trial is None else trial
        steps, norms = curve(record, trial, "grad_norm")
        if not np.isfinite(norms).any():
            return not_measured(axes, "no finite gradient norm was recorded")
        label = f"trial {trial}, lr {short(lr_of(record, trial))}"
        part = part_measured(record, trial, steps)
        look: dict[str, Any] = POINTS if part else {"linewidth": 0.9}
        band = draw_curve(axes, steps, norms, color=GOOD, label=label, **look)
        _thresholds(axes, record, diagnosis, trial, steps=steps, norms=norms, percentile=percentile, across=True)
        found = finding(diagnosis, "clipping.threshold")
        if found is not None and found.evidence.get("trial") == trial:
            own = found.evidence.get("percentile")
            windows = np.array([number(value) for value in found.evidence.get("windows", ())])
            if percentile in (None, own) and windows.size > 1 and (windows > 0).any():  # of each window of the run
                each = "tenth" if windows.size == 10 else "window"
                label = f"{short(number(own))}th percentile of each {each} of the run"
                edges = np.linspace(steps[0], steps[-1] + 1, windows.size + 1)
                look = {"baseline": None, "color": PALETTE[1], "linewidth": 1.6, "zorder": 3}
                axes.stairs(np.where(windows > 0, windows, np.nan), edges, label=label, **look)
        bad = steps[~np.isfinite(norms)]
        if bad.size:
            mark_steps(axes, bad, label=f"not finite ({bad.size})")
        title = f"Gradient norm in {part}" if part else "Gradient norm at each step"
        axes.set(xlabel="step", ylabel="gradient norm, before clipping", title=title)
        fit_y(axes, [band], headroom=1e8)
        axes.margins(x=0.01)
        legend(axes)
    return axes


def plot_grad_norm_histogram(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    bins: int = 40,
    percentile: float | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw how often each size of the gradient norm occurred, over all steps of one trial, in bins of equal ratio.

    Healthy: one hump with a short tail; a threshold just above the hump touches about a tenth of the steps. Sick: a
    tail that reaches many times further than the hump is wide, or a second hump (outlier batches), or a threshold to
    the left of the hump (most steps are clipped).

    Trial, diagnosis and percentile are those of `plot_grad_norm`. The counts and the numbers in the title, of norms that are zero, not
    finite or beyond the axis, add up to all steps: where 98 % fill less than a quarter of it, the axis ends with them (rule of thumb).

    Source: F4.8 (this picture by default), F4.5 and F4.9 (the threshold against the typical norm).
    """
    with drawing(ax, size) as axes:
        trial = default_trial(record, diagnosis) if trial is None else trial
        steps, norms = curve(record, trial, "grad_norm")
        shown = norms[np.isfinite(norms) & (norms > 0)]
        if not shown.size:
            return not_measured(axes, "no positive, finite gradient norm was recorded")
        (low, high), hump = np.percentile(shown, (1, 99)), shown
        width, whole = np.log(high / low), np.log(shown.max() / shown.min())
        if 0 < width < whole / 4:  # 98 % fill less than a quarter of the axis: it shows the hump alone (rule of thumb)
            hump = shown[(shown >= low * np.exp(-width / 2)) & (shown <= high * np.exp(width / 2))]
        low, high = float(hump.min()), float(hump.max())
        low, high = (low, high) if high > low * (1 + 1e-9) else (low / 1.1, low * 1.1)
        counts, edges = np.histogram(hump, bins=np.geomspace(low, high, bins + 1))
        axes.stairs(counts, edges, fill=True, color=GOOD, alpha=0.8, label=f"lr {short(lr_of(record, trial))}")
        _thresholds(axes, record, diagnosis, trial, steps=steps, norms=norms, percentile=percentile, across=False)
        log_scale(axes, "x")
        axes.set_ylim(0, 1.25 * counts.max())
        if hump.size < shown.size:
            axes.set_xlim(edges[0], edges[-1])
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        rest = (
            ((norms == 0).sum(), "at 0"),
            ((~np.isfinite(norms)).sum(), "not finite"),
            (shown.size - hump.size, "beyond the axis"),
        )
        parts = "".join(f", {count:,} {what}" for count, what in rest if count)
        of = part_measured(record, trial, steps) or f"{norms.size:,} steps"
        title = f"Gradient norms of trial {trial}: {of}{parts}"
        axes.set(xlabel="gradient norm, before clipping", ylabel="steps", title=title)
        legend(axes)
    return axes


def clipped_steps(
    steps: Floats, norms: Floats, *, percentile: float, diagnosis: Diagnosis | None, trial: int
) -> tuple[ClipThreshold, NDArray[np.int64]]:
    """Return the threshold at a percentile of the norms in the steady stretch (F4.9), and the steps that it would clip."""
    first = end = None
    found = finding(diagnosis, "clipping.threshold")
    if found is not None and found.evidence.get("trial") == trial and "first_step" in found.evidence:
        first, end = int(found.evidence["first_step"]), int(found.evidence["last_step"]) + 1
    chosen = choose_threshold(norms, percentile=percentile, first=first, end=end)
    limit = np.inf if chosen.threshold is None else chosen.threshold
    return chosen, np.asarray(steps, dtype=np.int64)[np.isfinite(norms) & (norms > limit)]


def _thresholds(
    ax: Axes, record: Record, diagnosis: Diagnosis | None, trial: int, *, steps: Floats, norms: Floats,
    percentile: float | None, across: bool,
) -> None:  # fmt: skip
    """Draw the threshold in force and the one proposed, or asked for, with the share of the steps above each."""
    line, finite = ax.axhline if across else ax.axvline, norms[np.isfinite(norms)]

    def draw(value: float, name: str, **look: Any) -> None:
        if np.isfinite(value):
            of = "those" if part_measured(record, trial, steps) else "the steps"
            share = f"{(finite > value).mean():.0%} of {of}" if finite.size else "no finite norm"
            line(value, label=f"{name} {short(value)}: {share}", **look)

    draw(number(field_of(record, trial, "max_grad_norm")), "clipped above", color=BAD, linestyle="--")
    proposed: dict[str, Any] = {"color": PALETTE[4], "linestyle": "-."}
    if percentile is None:
        found = finding(diagnosis, "clipping.threshold")
        draw(number(found.value) if found else np.nan, "proposed threshold", **proposed)
        return
    chosen, above = clipped_steps(steps, norms, percentile=percentile, diagnosis=diagnosis, trial=trial)
    if chosen.threshold is None:
        line(np.nan, label=f"no threshold: {chosen.reason}", **proposed)
    elif across and above.size:
        touched, label = np.isin(steps, above), f"would be clipped: {above.size:,} steps"
        ax.plot(steps[touched], norms[touched], "o", color=PALETTE[1], markersize=3.5, zorder=3, label=label)
    draw(number(chosen.threshold), f"{ordinal(percentile)} percentile", **proposed)


def plot_clipping(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    aggressive_frac: float = 0.5,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the loss at the end of each clipped run against its threshold, with the share of steps that were clipped.

    Healthy: the loosest threshold already trains as well as the others, and its label says about 10 %. Sick: only points
    with hollow marks (half of the steps or more are clipped, F4.11) reach a low loss, or every threshold is marked along the top
    edge: the learning rate is too high, and no threshold makes up for that.

    `clipping.threshold` of the diagnosis draws the threshold that is proposed. Runs that did not recover are marked along the top edge,
    a cross for diverged, a triangle for the others.

    Source: F4.10 (ladder of thresholds), F4.11 and F4.12 (the clipped share).
    """
    with drawing(ax, size, (6.8, 4.4)) as axes:
        known = finding(diagnosis, "clipping.masks_lr")
        runs = None if known is None else known.evidence.get("runs")
        runs = clipped_runs(record) if runs is None and "loss" in record.steps else runs
        rows = [row for one in read_ladder(record, runs) for row in one.rows] if runs and "loss" in record.steps else []
        if not rows:
            return not_measured(axes, "the record has no finished run with clipping")
        stable = [row for row in rows if not row["lasting"] and math.isfinite(number(row["loss"]))]
        title = f"Clipping at lr {short(number(rows[0]['lr']))}"
        axes.set(xlabel="threshold (max_grad_norm)", ylabel="training loss, end of the run", title=title)
        _draw_stable(axes, stable, aggressive_frac)
        for diverged, marker, label in ((True, "x", "diverged"), (False, "v", "unstable, or nothing learned")):
            lost = [row for row in rows if row not in stable and math.isinf(number(row["loss"])) is diverged]
            if lost:
                shares = ", ".join(dict.fromkeys(map(_share, lost)))
                at = [number(row["max_grad_norm"]) for row in lost]
                mark_steps(axes, at, marker=marker, label=f"{label} ({shares} clipped)")
        _draw_references(axes, rows, diagnosis)
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


def _draw_references(ax: Axes, rows: Sequence[Mapping[str, Any]], diagnosis: Diagnosis | None) -> None:
    """Draw the same lr without clipping, the threshold that is proposed, and the end loss of the run whose norms it comes from."""
    known = {row["twin"]: row for row in rows if row["twin"] is not None}
    if known:
        stable = [number(row["twin_loss"]) for row in known.values() if not row["twin_lasting"]]
        row = next(iter(known.values()))
        label = f"lr {short(number(row['lr']))} without clipping"
        if stable and np.isfinite(stable).all():
            ax.axhline(float(np.mean(stable)), color=BASELINE, linestyle="--", label=label)
        else:
            outcome = "never trained" if row["twin_outcome"] == "none" else row["twin_outcome"]
            ax.plot([], [], "X", color=BAD, label=f"{label}: {outcome}")
    found = finding(diagnosis, "clipping.threshold")
    if found is None:
        return
    value, level, percentile = number(found.value), *(number(found.evidence.get(n)) for n in ("loss", "percentile"))
    if math.isfinite(level) and not found.evidence.get("reference_clipped"):
        label = f"lr {short(number(found.evidence.get('lr')))} without clipping"
        ax.axhline(float(drawable([level])[0]), color=BASELINE, linestyle=":", label=label)
    if math.isfinite(value):
        name = f"{short(percentile)}th percentile" if math.isfinite(percentile) else "proposed"
        ax.axvline(value, color=PALETTE[4], linestyle="-.", label=f"{name}: {short(value)}")


def _share(row: Mapping[str, Any]) -> str:
    share = number(row["clip_frac"])
    return f"{100 * share:.0f} %" if math.isfinite(share) else "? %"
