"""The best checkpoint of each run: where it lies and what it is worth over the last; what stopping early would have kept and cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.palette import BAD, BASELINE, GOOD, INK, PALETTE
from workbench.plots.style import Size, drawing, legend, not_measured
from workbench.record.json_values import number
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints


def plot_checkpoints(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw for every run where its best checkpoint lies, and how much better it is than the last one.

    Healthy: points at the right edge, where the best is the last, or low ones: it does not matter which is taken. Sick: points far
    to the left and high, the last checkpoint is worse than one that was there before; triangles far below their circles, or below 0,
    say that most of the gain holds only where the checkpoint was chosen.

    Returns:
        The axes. Circles: the split that chose; triangles: the test split, where it was evaluated.

    Source: P4.3 (the best is often not the last), P4.5 (retrospective selection).
    """
    with drawing(ax, size, (6.8, 3.8)) as axes:
        rows = [row for row in _evidence(record, diagnosis).get("runs", ()) if np.isfinite(number(row["gain"]))]
        if not rows:
            return not_measured(axes, "no finished run has enough finite evaluations")
        at, gain, tested = (_column(rows, name) for name in ("best_frac", "gain", "test_gain"))
        axes.axhline(0.0, color=INK, linewidth=0.8)
        for x, low, high in zip(at, tested, gain, strict=True):
            if np.isfinite(low):
                axes.plot([x, x], [low, high], color=BASELINE, linewidth=1.0, linestyle=":", zorder=2)
        label = f"on the split that chose it (mean {gain.mean():.2g})"
        axes.plot(at, gain, "o", color=GOOD, markersize=7, label=label, zorder=3)
        if np.isfinite(tested).any():
            mean = float(np.nanmean(tested))
            axes.plot(at, tested, "^", color=BAD, markersize=7, label=f"on the test split (mean {mean:.2g})", zorder=3)
        axes.set(xlabel="step of the best checkpoint, share of the run", title="Best checkpoint against the last")
        axes.set_ylabel(f"{record.config.get('select', 'metric')}, last minus best", parse_math=False)
        axes.set_xlim(-0.03, 1.03)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(y=0.15)
        legend(axes)
    return axes


def plot_early_stopping(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw what each early-stopping rule saves and what it loses, replayed on the recorded curves.

    Healthy: bars at 0 with many steps saved, as where the curve has turned for good. Sick: long bars, the rule stopped before the
    best; a dash far beyond the bar is the run that it hurt most.

    Source: P4.6 (early stopping is not needed where the budget is set beforehand).
    """
    with drawing(ax, size, (6.8, 3.8)) as axes:
        known = _evidence(record, diagnosis).get("early_stopping", ())
        rows = [row for row in known if np.isfinite(number(row["lost_frac"]))]
        if not rows:
            return not_measured(axes, "no finished run has enough finite evaluations")
        places = np.arange(len(rows))
        lost, worst = (_column(rows, name) for name in ("lost_frac", "worst_lost_frac"))
        axes.barh(places, lost, height=0.6, color=PALETTE[0], label="mean over the runs")
        axes.plot(worst, places, "|", color=BAD, markersize=13, markeredgewidth=2, linestyle="none", label="worst run")
        axes.set_yticks(places, [f"{row['rule']}\nsaves {number(row['steps_saved']):.0%} of the steps" for row in rows])
        axes.tick_params(axis="y", labelsize=8)
        axes.invert_yaxis()
        top = float(worst.max()) or 0.01  # where nothing is lost, an axis that is not made of roundings
        axes.set_xlim(-0.02 * top, 1.1 * top)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.set(xlabel="lost against the best of the full budget,\nas a share of what was learned", ylabel="rule")
        axes.set_title("What stopping early costs")
        legend(axes)
    return axes


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([number(row[name]) for row in rows])


def _evidence(record: Record, diagnosis: Diagnosis | None) -> Mapping[str, Any]:
    found = finding(diagnosis, "checkpoints.best_not_last")
    if found is None and "trial" in record.evals and len(record.evals):
        found = diagnose_checkpoints(record)["checkpoints.best_not_last"]
    return {} if found is None else found.evidence
