"""The learning-rate sweep as two pictures: objective against lr, and the loss curves just above the best lr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.curves.judged import judged
from workbench.curves.trials import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import baseline_lr, best_lr, field_of, finding, lr_of, trials_at, trials_in
from workbench.plots.loss import draw_trial_loss, fit_y, loss_axes
from workbench.plots.style import (
    BAD,
    BASELINE,
    GOOD,
    PALETTE,
    drawing,
    legend,
    log_scale,
    mark_steps,
    not_measured,
    short,
)
from workbench.record.json_values import number


@dataclass(frozen=True)
class _Point:
    lr: float
    loss: float
    loss_se: float
    unstable: bool

    @property
    def feasible(self) -> bool:
        return bool(np.isfinite(self.loss)) and not self.unstable


def plot_lr_sweep(
    record: Record, diagnosis: Diagnosis | None = None, *, mark: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the objective (training loss at the end of the run) against the learning rate.

    Healthy: a bowl with lr* in its middle and several trained points on either side of it. Sick: the best point is the
    last one before the crosses (the best lr sits at the edge of the unstable region, so instability may be what keeps
    it low), or the first or last point of the grid (the bowl lies elsewhere).

    Points, lr* and its interval come from `lr.best` of the diagnosis, the edge and its bracket from `lr.unstable`; without one the
    points are those of the sweep alone. `mark` is a learning rate to point out. Infeasible learning rates have no place on the y axis:
    they are marked along the top edge, a cross for diverged, a triangle for unstable to the end.

    Source: F1.6, F1.12 (hyperparameter axis plot with infeasible trials marked).
    """
    with drawing(ax, size=(6.8, 4.4)) as axes:
        points = _points(record, diagnosis)
        if not points:
            return not_measured(axes, "the record has no finished trial of a learning-rate sweep")
        axes.set(
            xlabel="learning rate", ylabel="training loss, end of the run", title="Objective against learning rate"
        )
        curves = _draw_points(axes, points)
        _mark_found(axes, record, diagnosis)
        if mark is not None:
            axes.axvline(mark, color=PALETTE[4], linewidth=5, alpha=0.35, label=f"lr {short(mark)}", zorder=1.5)
        lrs = [p.lr for p in points] + ([baseline_lr(record)] if np.isfinite(baseline_lr(record)) else [])
        axes.set_xlim(min(lrs) / 1.5, max(lrs) * 1.5)
        log_scale(axes, "x")
        axes.margins(y=0.12)
        if not curves:
            axes.set_yticks([])
        elif min(p.loss for p in points if p.feasible) >= 0:
            fit_y(axes, curves, headroom=np.inf, margin=0.12)
        legend(axes)
    return axes


def plot_loss_curves(
    record: Record,
    *,
    lrs: Sequence[float] | None = None,
    trials: Sequence[int] | None = None,
    diagnosis: Diagnosis | None = None,
    above: int = 3,
    spacing: float = 1.4,
    most: int = 8,
    mark: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw training loss against step, by default for lr* and the next learning rates above it.

    Healthy: every curve falls, the larger lr the faster, until they blur together in noise. Sick: just above lr* a
    curve goes up for a stretch instead of down, jumps and does not come back, or ends in a cross (diverged).

    Args:
        lrs: learning rates to draw; of the sweep's trials at each, one for each seed.
        trials: trials to draw, instead.
        diagnosis: where neither is given, its `lr.best` says which: lr* and the next `above` trained ones above it.
            Without it trials at no more than `most` learning rates are drawn, the lowest and the highest among them.
        above: how many learning rates above lr*; "just above" has no number in F1.7, three is a rule of thumb.
        spacing: ratio between neighbours, so that a bracket of close lrs is drawn once; 1.4 is half a grid step of
            factor two (rule of thumb).
        most: how many learning rates to draw where lr* is not known; more than eight curves cannot be told apart
            (rule of thumb).
        mark: a learning rate whose curves lie over all others, which are drawn alike.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. The y axis is logarithmic where no loss is below 0, and ends at 1e4 times the initial loss.

    Source: F1.7; F1.8 for what to look for.
    """
    with drawing(ax) as axes:
        best, trained = best_lr(diagnosis)
        chosen = lrs is None and trials is None and np.isfinite(best)
        if trials is None:
            trials = _trials_to_draw(record, lrs, trained, above=above, spacing=spacing, most=most)
        curves = []
        for index, trial in enumerate(trials):
            limit = number(field_of(record, trial, "max_grad_norm"))
            line = draw_trial_loss(
                axes, record, trial, index=index if mark is None else 4, relative_to=best,
                note=f"clipped above {short(limit)}" if np.isfinite(limit) else "",
                behind=mark is not None and not np.isclose(lr_of(record, trial), mark, rtol=1e-9, atol=0.0),
            )  # fmt: skip
            curves += [] if line is None else [line]
        if not curves:
            return not_measured(axes, "no trial with a finite training loss at these learning rates")
        loss_axes(axes, curves, title="Training loss at lr* and just above" if chosen else "Training loss")
    return axes


def _points(record: Record, diagnosis: Diagnosis | None) -> list[_Point]:
    found = finding(diagnosis, "lr.best")
    if found is None or "points" not in found.evidence:
        return [_Point(p.lr, p.loss, p.loss_se, p.unstable) for p in judged(record).sweep().points]
    rows: Sequence[Mapping[str, Any]] = found.evidence["points"]
    points = [
        _Point(number(r.get("lr")), number(r.get("loss")), number(r.get("loss_se")), bool(r.get("unstable")))
        for r in rows
    ]
    return sorted((p for p in points if p.lr > 0), key=lambda p: p.lr)


def _draw_points(ax: Axes, points: Sequence[_Point]) -> list[Line2D]:
    """Draw the feasible points with their standard errors, the others along the top edge; return the feasible line."""
    good = [p for p in points if p.feasible]
    curves: list[Line2D] = []
    if good:
        lrs, losses = [p.lr for p in good], [p.loss for p in good]
        curves = ax.plot(lrs, losses, "-o", color=GOOD, markersize=5, label="trained to the end", zorder=3)
        errors = [p.loss_se if np.isfinite(p.loss_se) else 0.0 for p in good]
        ax.errorbar(lrs, losses, yerr=errors, fmt="none", ecolor=GOOD, capsize=2.5, zorder=3)
    lasting = [p.lr for p in points if np.isfinite(p.loss) and p.unstable]
    diverged = [p.lr for p in points if not np.isfinite(p.loss)]
    if lasting:
        mark_steps(ax, lasting, label=f"unstable to the end ({len(lasting)})", marker="^", color=PALETTE[6])
    if diverged:
        mark_steps(ax, diverged, label=f"diverged ({len(diverged)})")
    return curves


def _mark_found(ax: Axes, record: Record, diagnosis: Diagnosis | None) -> None:
    """Draw lr* with its interval, the bracket of the unstable lr, and the baseline's lr."""
    best, unstable = finding(diagnosis, "lr.best"), finding(diagnosis, "lr.unstable")
    lr, edge = number(best.value if best else None), number(unstable.value if unstable else None)
    if best is not None and np.isfinite(lr):
        _span(ax, best.evidence, "low", "high", color=GOOD)
        ax.axvline(lr, color=GOOD, linestyle="--", label=f"lr* {short(lr)}, interval shaded")
    if unstable is not None and np.isfinite(edge):
        _span(ax, unstable.evidence, "lower", "upper", color=BAD)
        ax.axvline(edge, color=BAD, linestyle="-.", label=f"unstable from {short(edge)}")
    baseline = baseline_lr(record)
    if np.isfinite(baseline):
        ax.axvline(baseline, color=BASELINE, linestyle=":", linewidth=2, label=f"baseline {short(baseline)}")


def _span(ax: Axes, evidence: Mapping[str, Any], low: str, high: str, *, color: str) -> None:
    """Shade an interval of learning rates, where both ends are known."""
    ends = number(evidence.get(low)), number(evidence.get(high))
    if np.isfinite(ends).all():
        ax.axvspan(*ends, color=color, alpha=0.15, linewidth=0)


def _trials_to_draw(
    record: Record, lrs: Sequence[float] | None, best: float, *, above: int, spacing: float, most: int
) -> list[int]:
    """Trials at the given lrs; at lr* and the next `above` of the sweep; else at `most` lrs. One for each lr and seed."""
    stages = ("lr_sweep", "baseline", "lr_unstable") if trials_in(record, "lr_sweep") else ()
    if lrs is None:
        grid = np.unique([lr_of(record, t) for t in trials_in(record, *stages)]).tolist()
        spread = np.unique(np.linspace(0, len(grid) - 1, min(most, len(grid))).round().astype(int))
        lrs = [grid[i] for i in spread] if np.isnan(best) else _next_above(grid, best, above, spacing)
    kept: dict[tuple[float, Any], int] = {}
    for lr in lrs:
        for trial in trials_at(record, lr, *stages):
            kept.setdefault((lr, field_of(record, trial, "seed")), trial)
    return list(kept.values())


def _next_above(grid: Sequence[float], best: float, above: int, spacing: float) -> list[float]:
    """`best` and the next `above` lrs of the ascending `grid`, each at least `spacing` times the one before.

    Where none lies so far above, the last of those nearer by.
    """
    chosen = [best]
    for lr in grid:
        if len(chosen) <= above and lr >= spacing * chosen[-1]:
            chosen.append(lr)
    nearer = [lr for lr in grid if lr > best * (1 + 1e-9)]
    return [*chosen, *nearer[-1:]] if len(chosen) == 1 and above else chosen
