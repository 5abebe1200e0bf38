"""Does a metric repeat itself: the chance of every period against its bound, or the curve with its period marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.style import (
    BAD,
    BASELINE,
    GRID,
    PALETTE,
    STYLES,
    draw_curve,
    drawing,
    legend,
    log_scale,
    not_measured,
    short,
)
from workbench.record.json_values import number
from workbench.topics.periodicity.diagnose import Series, periodic_series

LEAST = 1e-16
"""Chances are drawn no smaller."""
MOST_MARKS = 60
LEGEND_ROOM = 1.5
"""Height left for the legend, over that of the curves."""
COLORS = (PALETTE[0], PALETTE[1], PALETTE[4], PALETTE[5])


def plot_periodicity(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    view: Literal["spectrum", "curve"] = "spectrum",
    ax: Axes | None = None,
) -> Axes:
    """Draw the chance of each period in the metrics of a run, or the metric itself with its period marked.

    Healthy: no curve reaches the dashed line at any period; the training loss alone may cross it at the length of an epoch and
    its fractions, where a model remembers examples. Sick: a validation or test metric rises above the line at the length of an
    epoch: training data not shuffled, or evaluated rows among them. In the curve, bumps at the same place between the marks.

    Args:
        diagnosis: its `evaluation.periodic` says which trial and which epoch; made from the record without it.
        view: "spectrum" or "curve".
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Diamonds: an epoch and its fractions together. The dashed line is the smallest chance that any of the periods of a
        clean run may have, at the false-alarm rate of the diagnosis.

    Raises:
        UsageError: `view` is another.

    Source: P2.9 (a pattern points to a bug), P2.10 (regular step intervals show it).
    """
    if view not in ("spectrum", "curve"):
        raise UsageError(f"view={view!r} is not known. Allowed: 'spectrum', 'curve'.")
    with drawing(ax, size=(6.8, 4.0)) as axes:
        found = finding(diagnosis, "evaluation.periodic")
        evidence = {} if found is None else found.evidence
        series = [s for s in periodic_series(record, alpha=evidence.get("alpha", 0.01), trial=evidence.get("trial")) if s.found.reason is None]  # fmt: skip
        if not series:
            return not_measured(axes, "no curve of the record is long enough to show a period")
        epoch = (
            number(evidence.get("epoch_steps"))
            if evidence
            else next((s.epoch for s in series if s.epoch is not None), np.nan)
        )
        if view == "spectrum":
            _draw_spectra(axes, series, epoch)
        else:
            _draw_curve(axes, series, epoch)
        legend(axes, loc="upper left" if view == "spectrum" else "best")
    return axes


def _draw_spectra(ax: Axes, series: Sequence[Series], epoch: float) -> None:
    for place, one in enumerate(series[: len(COLORS)]):
        found = one.found
        line = draw_curve(
            ax, 1.0 / found.frequency, np.maximum(found.chance, LEAST), color=COLORS[place], linestyle=STYLES[place],
            label=f"{one.name}, trial {one.trial}", linewidth=1.2,
        )  # fmt: skip
        if found.period is not None:
            line.set_label(f"{line.get_label()}: every {short(found.period)} steps")
            line.set_linewidth(1.8)
    bound = min(one.found.bound for one in series)
    ax.axhline(bound, color=BAD, linestyle="--", label="above it: not by chance")
    if np.isfinite(epoch):
        _draw_epoch(ax, series, epoch)
    ax.set(xlabel="period in steps", ylabel="chance without a pattern", title="Does a metric repeat itself?")
    log_scale(ax, "x", "y")
    least = [min(float(one.found.chance.min()), one.found.epoch_chance) for one in series]
    drawn = [bound, *(max(chance, LEAST) for chance in least)]
    ax.set_ylim(3.0, (min(drawn) / 3.0) ** LEGEND_ROOM)


def _draw_epoch(ax: Axes, series: Sequence[Series], epoch: float) -> None:
    """Mark the length of an epoch, which is looked at by itself and needs less to be significant."""
    ax.axvline(epoch, color=BASELINE, linestyle=":", label=f"an epoch: {short(epoch)} steps")
    seen = [one.found for one in series if one.found.epoch_seen]
    if seen:
        span = [epoch / 1.12, epoch * 1.12]
        ax.plot(span, [min(found.epoch_bound for found in seen)] * 2, color=BAD, linewidth=2.0, linestyle="-", label="the same, for an epoch and its fractions")  # fmt: skip
    for place, one in enumerate(series[: len(COLORS)]):
        if one.found.epoch_seen:
            ax.plot(epoch, max(one.found.epoch_chance, LEAST), "D", color=COLORS[place], markersize=6, zorder=4)


def _draw_curve(ax: Axes, series: Sequence[Series], epoch: float) -> None:
    one = min(series, key=lambda s: (s.name == "train/loss", s.found.p))
    draw_curve(ax, one.steps, one.values, color=COLORS[0], label=f"{one.name}, trial {one.trial}")
    period = one.found.period
    every = period if period is not None else epoch
    marks = np.arange(0.0, one.steps[-1] + 1, every) if np.isfinite(every) else np.empty(0)
    if len(marks) > 1:
        low = marks[:: -(-len(marks) // MOST_MARKS)]
        what = "every" if len(low) == len(marks) else f"every {-(-len(marks) // MOST_MARKS)}th of"
        name = f"{what} {short(every)} steps, the period found" if period is not None else f"{what} {short(every)} steps, an epoch; no period found"  # fmt: skip
        for place, at in enumerate(low):
            ax.axvline(at, color=BAD if period is not None else GRID, linestyle=":", linewidth=0.9, zorder=1, label=name if place == 0 else None)  # fmt: skip
    shown = one.values[np.isfinite(one.values)]
    if shown.min() > 0 and shown.max() > 5 * shown.min():
        log_scale(ax, "y")
    title = f"{one.name} repeats" if period is not None else f"{one.name} does not repeat"
    ax.set(xlabel="step", ylabel=one.name, title=title)
