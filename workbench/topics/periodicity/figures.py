"""Does a metric repeat itself: the chance of every period against its bound."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.palette import BAD, BASELINE, PALETTE, STYLES
from workbench.plots.style import Size, draw_curve, drawing, legend, log_scale, not_measured, short
from workbench.record.json_values import number
from workbench.topics.periodicity.diagnose import periodic_series

LEAST = 1e-16
"""Chances are drawn no smaller."""
COLORS = (PALETTE[0], PALETTE[1], PALETTE[4], PALETTE[5])


def plot_periodicity(
    record: RecordLike, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the chance of each period in the metrics of a run.

    Healthy: no curve reaches the dashed line at any period; the training loss alone may cross it at the length of an epoch and
    its fractions, where a model remembers examples. Sick: a validation or test metric rises above the line at the length of an
    epoch: training data not shuffled, or evaluated rows among them.

    Args:
        diagnosis: its `evaluation.periodic` says which trial and which epoch; made from the record without it.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Diamonds: an epoch and its fractions together. The dashed line is the smallest chance that any of the periods of a
        clean run may have, at the false-alarm rate of the diagnosis.

    Source: P2.9 (a pattern points to a bug), P2.10 (regular step intervals show it).
    """
    with drawing(ax, size, (6.8, 4.0)) as axes:
        judged = finding(diagnosis, "evaluation.periodic")
        evidence = {} if judged is None else judged.evidence
        curves = periodic_series(record, alpha=evidence.get("alpha", 0.01), trial=evidence.get("trial"))
        series = [(one, one.found) for one in curves if one.found.reason is None]
        if not series:
            return not_measured(axes, "no curve of the record is long enough to show a period")
        shown = list(zip(series, COLORS, STYLES, strict=False))
        for (one, found), color, style in shown:
            line = draw_curve(
                axes, 1.0 / found.frequency, np.maximum(found.chance, LEAST), color=color, linestyle=style,
                label=f"{one.name}, trial {one.trial}", linewidth=1.2,
            )  # fmt: skip
            if found.period is not None:
                line.set_label(f"{line.get_label()}: every {short(found.period)} steps")
                line.set_linewidth(1.8)
        bound = min(found.bound for _, found in series)
        axes.axhline(bound, color=BAD, linestyle="--", label="above it: not by chance")
        epoch = number(evidence.get("epoch_steps")) if evidence else (series[0][0].epoch or np.nan)
        if np.isfinite(epoch):  # looked at by itself, it needs less to be significant
            axes.axvline(epoch, color=BASELINE, linestyle=":", label=f"an epoch: {short(epoch)} steps")
            seen = [(found, color) for (_, found), color, _ in shown if found.epoch_seen]
            if seen:
                allowed, label = min(found.epoch_bound for found, _ in seen), "the same, for an epoch and its fractions"
                axes.plot([epoch / 1.12, epoch * 1.12], [allowed] * 2, color=BAD, linewidth=2.0, label=label)
            for found, color in seen:
                axes.plot(epoch, max(found.epoch_chance, LEAST), "D", color=color, markersize=6, zorder=4)
        axes.set(xlabel="period in steps", ylabel="chance without a pattern", title="Does a metric repeat itself?")
        log_scale(axes, "x", "y")
        least = min(min(float(found.chance.min()), found.epoch_chance) for _, found in series)
        axes.set_ylim(3.0, min(bound, max(least, LEAST)) / 3.0)
        legend(axes)
    return axes
