"""Pictures of instability: gradient norms, the every-step probe, the runs far above the best learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from workbench.diagnostics.base import Diagnosis
from workbench.plots._frames import (
    Record,
    best_lr,
    curve,
    default_trial,
    evaluations,
    field_of,
    finding,
    lr_of,
    trials_at,
    trials_in,
)
from workbench.plots._loss import draw_trial_loss, fit_y, loss_axes
from workbench.plots._style import (
    BAD,
    BASELINE,
    GOOD,
    PALETTE,
    draw_curve,
    drawing,
    legend,
    log_scale,
    mark_steps,
    not_measured,
    number,
    short,
)

__all__ = ["plot_confirm", "plot_grad_norm", "plot_grad_norm_histogram", "plot_probe"]

Floats = NDArray[np.float64]


def plot_grad_norm(
    record: Record, diagnosis: Diagnosis | None = None, *, trial: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the L2 norm of the gradient, before clipping, against the step.

    Healthy: a band that drifts slowly; where clipping is on, the band lies below the threshold and only single steps
    stick out. Sick: spikes of many times the band's height (outlier batches, the start of a mid-run instability), a
    norm that climbs until the run diverges, or a band that lies above the threshold, so that nearly every step is
    clipped and the threshold acts as a lower learning rate.

    Args:
        record: a study or a single trial.
        diagnosis: draws the threshold that `clipping.threshold` proposes, where it was measured.
        trial: which trial; by default the baseline's, else the sweep's at the baseline's lr or at lr*.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Non-finite norms are marked along the top edge.

    Source: F1.9 (log the norm), F4.7 (unclipped), F4.8 (this picture by default).
    """
    with drawing(ax) as axes:
        trial = default_trial(record, diagnosis) if trial is None else trial
        steps, norms = curve(record, trial, "grad_norm")
        if not np.isfinite(norms).any():
            return not_measured(axes, "no finite gradient norm was recorded")
        label = f"trial {trial}, lr {short(lr_of(record, trial))}"
        band = draw_curve(axes, steps, norms, color=GOOD, linewidth=0.9, label=label)
        _thresholds(axes, record, diagnosis, trial, across=True)
        bad = steps[~np.isfinite(norms)]
        if bad.size:
            mark_steps(axes, bad, label=f"not finite ({bad.size})")
        axes.set(xlabel="step", ylabel="gradient norm, before clipping", title="Gradient norm at each step")
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
    ax: Axes | None = None,
) -> Axes:
    """Draw how often each size of the gradient norm occurred, over all steps of one trial, in bins of equal ratio.

    Healthy: one hump with a short tail; a threshold just above the hump touches about a tenth of the steps. Sick: a
    tail that reaches many times further than the hump is wide, or a second hump (outlier batches), or a threshold to
    the left of the hump (most steps are clipped).

    Args:
        record: a study or a single trial.
        diagnosis: draws the threshold that `clipping.threshold` proposes, where it was measured.
        trial: which trial; by default the baseline's, else the sweep's at the baseline's lr or at lr*.
        bins: number of bins between the smallest and the largest norm.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. The counts and the numbers of zero and of non-finite norms in the title add up to all steps.

    Source: F4.8 (this picture by default), F4.5 and F4.9 (the threshold against the typical norm).
    """
    with drawing(ax) as axes:
        trial = default_trial(record, diagnosis) if trial is None else trial
        _, norms = curve(record, trial, "grad_norm")
        shown = _positive(norms)
        if not shown.size:
            return not_measured(axes, "no positive, finite gradient norm was recorded")
        counts, edges = np.histogram(shown, bins=_log_edges(shown, bins))
        axes.stairs(counts, edges, fill=True, color=GOOD, alpha=0.8, label=f"lr {short(lr_of(record, trial))}")
        _thresholds(axes, record, diagnosis, trial, across=False)
        log_scale(axes, "x")
        axes.set_ylim(0, 1.25 * counts.max())
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="gradient norm, before clipping", ylabel="steps", title=_count_line(trial, norms))
        legend(axes, loc="upper right", ncols=3)
    return axes


def plot_probe(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    split: str = "validation",
    metric: str = "loss",
    every_steps: int = 100,
    ax: Axes | None = None,
) -> Axes:
    """Draw the probe: a short run at twice the best lr, evaluated at every step, and what a coarse interval shows.

    Healthy: both curves tell the same story, a loss that falls from the start. Sick: the every-step curve climbs above
    the dotted line (the loss before the first update) and comes back, while the coarse curve misses most of it: the
    model is unstable early and then recovers to slow training.

    Args:
        record: a study with a trial of the stage "probe".
        diagnosis: its `stability.early` and `stability.early_recovers` add the step at which the first rise starts.
        split: which split's evaluations are drawn; the training loss where there are none.
        metric: which metric.
        every_steps: the coarse interval in steps; 100 as in F1.10.
        ax: where to draw; a new figure by default.

    Returns:
        The axes.

    Source: F1.10, F1.11.
    """
    with drawing(ax) as axes:
        probes = trials_in(record, "probe")
        if not probes:
            return not_measured(axes, "the record has no probe run")
        steps, values = evaluations(record, probes[0], split=split, metric=metric)
        name = f"{split} {metric}"
        if steps.size < 3:
            (steps, values), name = curve(record, probes[0], "loss"), "training loss"
        if np.isfinite(values).sum() < 2:
            return not_measured(axes, "the probe has fewer than two finite values")
        axes.set_ylabel(name, parse_math=False)
        fit_y(axes, _draw_probe(axes, steps, values, every_steps))
        onset = _first_onset(diagnosis, ("stability.early", "stability.early_recovers"), probes[0])
        if onset is not None:
            axes.axvline(onset[1], color=BAD, linestyle=":", label=f"{onset[0]} from step {onset[1]:,}")
        title = f"Probe at lr {short(lr_of(record, probes[0]))}, evaluated at every step"
        axes.set(xlabel="step", title=title)
        axes.margins(x=0.01)
        legend(axes)
    return axes


def plot_confirm(
    record: Record, diagnosis: Diagnosis | None = None, *, trials: Sequence[int] | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the training loss of the runs at 5 and 10 times the best learning rate, beside the run at the best.

    Sick: the loss falls steadily and then rises of a sudden; that is optimisation instability. Not that sign: a loss
    that falls to the end (the model takes the larger lr), or one that never fell (no training to become unstable).

    Args:
        record: a study with trials of the stage "confirm".
        diagnosis: `lr.best` adds the run at the best lr; `stability.mid` adds what each run shows, and its jump.
        trials: which trials; by default all of the stage "confirm".
        ax: where to draw; a new figure by default.

    Returns:
        The axes. A run that diverged ends in a cross at its last finite loss.

    Source: F1.13.
    """
    with drawing(ax) as axes:
        shown = trials_in(record, "confirm") if trials is None else list(trials)
        best, trained = best_lr(diagnosis)
        shown = [t for t in shown if np.isfinite(curve(record, t, "loss")[1]).any()]
        if not shown:
            return not_measured(axes, "the record has no run far above the best learning rate")
        at_best = (trials_at(record, best, "lr_sweep") + trials_at(record, trained, "lr_sweep"))[:1]
        curves = [draw_trial_loss(axes, record, trial, index=0, relative_to=best) for trial in at_best]
        said = _confirmations(diagnosis)
        for index, trial in enumerate(shown, start=1):
            row = said.get(trial, {})
            note = str(row.get("shape", ""))
            curves.append(draw_trial_loss(axes, record, trial, index=index, relative_to=best, note=note))
            if row.get("jump_step") is not None:
                jump, lr = int(row["jump_step"]), short(lr_of(record, trial))
                axes.axvline(jump, color=PALETTE[index], linestyle=":", label=f"lr {lr} jumps after step {jump:,}")
        loss_axes(
            axes, [line for line in curves if line is not None], title="Training loss far above the best learning rate"
        )
    return axes


def _draw_probe(ax: Axes, steps: Floats, values: Floats, every_steps: int) -> list[Line2D]:
    """Draw the loss before training, what every step shows and what a coarse interval shows; return the last two."""
    coarse = steps % every_steps == 0
    ax.axhline(values[0], color=BASELINE, linestyle=":", label=f"before the first update: {short(values[0])}")
    peak = f"every step, at most {short(_peak(values))}"
    fine = draw_curve(ax, steps, values, color=GOOD, linewidth=1.1, label=peak)
    rough = draw_curve(
        ax,
        steps[coarse],
        values[coarse],
        color=PALETTE[1],
        linestyle="--",
        marker="o",
        label=f"every {every_steps} steps, at most {short(_peak(values[coarse]))}",
    )
    if not np.isfinite(values).all():
        mark_steps(ax, steps[~np.isfinite(values)][:1], label="not finite from here")
    return [fine, rough]


def _thresholds(ax: Axes, record: Record, diagnosis: Diagnosis | None, trial: int, *, across: bool) -> None:
    """Draw the threshold in force and the one proposed, where there is one."""
    line = ax.axhline if across else ax.axvline
    in_force = number(field_of(record, trial, "max_grad_norm"))
    if np.isfinite(in_force):
        line(in_force, color=BAD, linestyle="--", label=f"clipped above {short(in_force)}")
    proposed = finding(diagnosis, "clipping.threshold")
    value = number(proposed.value) if proposed else np.nan
    if np.isfinite(value):
        line(value, color=PALETTE[4], linestyle="-.", label=f"proposed threshold {short(value)}")


def _first_onset(diagnosis: Diagnosis | None, codes: Sequence[str], trial: int) -> tuple[str, int] | None:
    """Return (code, step) of the first rise that findings with these codes list for `trial`; None if there is none."""
    found = [item for code in codes if (item := finding(diagnosis, code)) is not None]
    onsets = [
        (int(hit["onset_step"]), item.code)
        for item in found
        for hit in item.evidence.get("hits", ())
        if hit.get("trial") == trial and hit.get("onset_step") is not None
    ]
    if not onsets:
        return None
    step, code = min(onsets)
    return code, step


def _confirmations(diagnosis: Diagnosis | None) -> dict[int, Mapping[str, Any]]:
    """What `stability.mid` says of each run far above lr*, by trial."""
    found = finding(diagnosis, "stability.mid")
    rows = found.evidence.get("confirm", ()) if found is not None else ()
    return {int(row["trial"]): row for row in rows}


def _positive(values: Floats) -> Floats:
    return values[np.isfinite(values) & (values > 0)]


def _peak(values: Floats) -> float:
    """The largest value, infinity where one is not finite."""
    return float(np.where(np.isfinite(values), values, np.inf).max(initial=-np.inf))


def _log_edges(values: Floats, bins: int) -> Floats:
    """Edges of equal ratio that hold every value, also when all values are equal."""
    low, high = float(values.min()), float(values.max())
    if high <= low * (1 + 1e-9):
        return np.geomspace(low / 1.1, low * 1.1, bins + 1)
    return np.geomspace(low, high, bins + 1)


def _count_line(trial: int, norms: Floats) -> str:
    """Title that accounts for every step."""
    rest = [(int((norms == 0).sum()), "at 0"), (int((~np.isfinite(norms)).sum()), "not finite")]
    parts = "".join(f", {count:,} {what}" for count, what in rest if count)
    return f"Gradient norms of trial {trial}: {norms.size:,} steps{parts}"
