"""The learning-rate sweep as two pictures: objective against lr, and the loss curves at the best lr and above."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workbench.curves.judged import judged
from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import (
    baseline_lr,
    best_lr,
    curve,
    field_of,
    finding,
    lr_of,
    recommended,
    trials_at,
    trials_in,
)
from workbench.plots.loss import draw_trial_loss, fit_y, loss_axes
from workbench.plots.palette import BAD, BASELINE, GOOD, PALETTE
from workbench.plots.style import Size, drawing, legend, log_scale, mark_steps, not_measured, short
from workbench.record.json_values import number
from workbench.record.roles import Role

ABOVE, SPACING = 3, 1.4
"""Learning rates that are drawn above lr* ("just above" has no number in F1.7), and the ratio between neighbours: half a grid step of factor
two (rules of thumb)."""
SEEN = 0.02  # share of the axis from which on a shading is wider than the line in it (rule of thumb)
MOST = 8  # learning rates that are drawn where lr* is not known: more cannot be told apart (rule of thumb)


def plot_lr_sweep(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    mark: float | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the objective (training loss at the end of the run) against the learning rate.

    Healthy: a minimum at lr* with several trained points on either side of it. Sick: the best point is the
    last one before the crosses (the best lr sits at the edge of the unstable region, so instability may be what keeps
    it low), or the first or last point of the grid (the minimum lies beyond).

    Points, lr* and its interval come from `lr.best` of the diagnosis, the edge and its bracket from `lr.unstable`; without one the
    points are those of the sweep alone. `mark` is a learning rate to point out. Infeasible learning rates are marked along the top edge,
    a cross for diverged, a triangle for unstable to the end.

    Source: F1.6, F1.12 (hyperparameter axis plot with infeasible trials marked).
    """
    with drawing(ax, size, (6.8, 4.4)) as axes:
        points = _points(record, diagnosis)
        if not len(points) or (not points["feasible"].any() and (record.trials["state"] == "stopped").any()):
            return not_measured(axes, "the record has no finished trial of a learning-rate sweep")
        labels = {"xlabel": "learning rate", "ylabel": "training loss, end of the run"}
        axes.set(title="Final training loss vs learning rate", **labels)
        short_runs = _draw_short_runs(axes, record)
        curves = _draw_points(axes, points)
        lrs = [
            *points["lr"],
            *(lr for line in short_runs for lr in np.atleast_1d(line.get_xdata())),
            *(lr for lr in (baseline_lr(record), recommended(diagnosis)[0]) if np.isfinite(lr)),
        ]
        axes.set_xlim(min(lrs) / 1.5, max(lrs) * 1.5)
        log_scale(axes, "x")
        _mark_found(axes, record, diagnosis)
        if mark is not None:
            axes.axvline(mark, color=PALETTE[4], linewidth=5, alpha=0.35, label=f"lr {short(mark)}", zorder=1.5)
        axes.margins(y=0.12)
        if not curves:
            axes.set_yticks([])
        elif points["loss"][points["feasible"]].min() >= 0:
            fit_y(axes, curves + short_runs, headroom=np.inf, margin=0.12)
        legend(axes)
    return axes


def plot_loss_curves(
    record: Record,
    *,
    trials: Sequence[int] | None = None,
    diagnosis: Diagnosis | None = None,
    mark: float | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw training loss against step, by default for lr* and the next learning rates above it.

    Healthy: every curve falls, the larger lr the faster, until they blur together in noise. Sick: just above lr* a
    curve goes up for a stretch instead of down, jumps and does not recover, or ends in a cross (diverged).

    Args:
        trials: numbers of the trials to draw; None is one for each seed at the learning rates that `diagnosis` says.
        diagnosis: its `lr.best` says lr*, and the next trained ones above it are drawn with it. Without it trials at no more than
            eight learning rates are drawn, the lowest and the highest among them.
        mark: a learning rate whose curves lie over all others, which are drawn alike.

    Source: F1.7; F1.8 for what to look for.
    """
    with drawing(ax, size) as axes:
        best = best_lr(diagnosis)[0]
        chosen = trials is None and np.isfinite(best)
        if ours := trials is None:
            trials = trials_to_draw(record, diagnosis)
        curves, lrs, every = [], list[float](), [lr_of(record, trial) for trial in trials]
        _, proven, word = recommended(diagnosis)
        for trial, lr in zip(trials, every, strict=True):
            seeds = every.count(lr) if ours or mark is not None else 1
            label = f"_lr {short(lr)}" if seeds > 1 and lr in lrs else ""  # another seed of one that the legend names
            lrs += [] if lr in lrs else [lr]
            limit = number(field_of(record, trial, "max_grad_norm"))
            notes = [word] * (trial in proven) + [f"{seeds} seeds"] * (seeds > 1)
            notes += [f"clipped above {short(limit)}"] * bool(np.isfinite(limit))
            line = draw_trial_loss(
                axes, record, trial, index=lrs.index(lr) if mark is None else 4, relative_to=best, label=label,
                note=", ".join(notes),
                behind=mark is not None and not np.isclose(lr_of(record, trial), mark, rtol=1e-9, atol=0.0),
            )  # fmt: skip
            if line is not None:
                line.set_linestyle("-" if mark is not None else line.get_linestyle())
                curves.append(line)
        if not curves:
            return not_measured(axes, "no trial with a finite training loss at these learning rates")
        above = sorted({short(lr / best) for lr in every if lr > best * (1 + 1e-9)}, key=float)
        above = above if chosen and min(every) > best * (1 - 1e-9) else []
        times = " to ".join(dict.fromkeys([*above[:1], *above[-1:]]))
        loss_axes(
            axes,
            curves,
            title=f"Training loss at lr {short(best)} and {times} times that" if times else "Training loss",
        )
    return axes


def _points(record: Record, diagnosis: Diagnosis | None) -> pd.DataFrame:
    """Return lr, loss, loss_se, unstable and feasible of each point, in order of the lr."""
    found, names = finding(diagnosis, "lr.best"), ("lr", "loss", "loss_se", "unstable")
    if found is None or "points" not in found.evidence:
        rows = [{name: getattr(p, name) for name in names} for p in judged(record).sweep().points]
    else:
        rows = [
            {name: number(row.get(name)) for name in names[:3]} | {"unstable": bool(row.get("unstable"))}
            for row in found.evidence["points"]
        ]
    points = pd.DataFrame(rows, columns=[*names]).astype({**dict.fromkeys(names[:3], float), "unstable": bool})
    points = points[points["lr"] > 0].sort_values("lr", kind="stable")
    return points.assign(feasible=np.isfinite(points["loss"]) & ~points["unstable"])


def _draw_points(ax: Axes, points: pd.DataFrame) -> list[Line2D]:
    """Draw the feasible points with their standard errors, the others along the top edge; return the feasible line."""
    good, curves = points[points["feasible"]], list[Line2D]()
    if len(good):
        lrs, losses = good["lr"].to_numpy(), good["loss"].to_numpy()
        curves = ax.plot(
            lrs, losses, "-o", color=GOOD, markersize=5, label="trained to the end (± standard error)", zorder=3
        )
        errors = good["loss_se"].where(np.isfinite(good["loss_se"]), 0.0).to_numpy()
        ax.errorbar(lrs, losses, yerr=errors, fmt="none", ecolor=GOOD, capsize=2.5, zorder=3)
    ended = np.isfinite(points["loss"])
    lasting, diverged = points["lr"][ended & ~points["feasible"]], points["lr"][~ended]
    if len(lasting):
        mark_steps(ax, lasting.tolist(), label=f"unstable to the end ({len(lasting)})", marker="^", color=PALETTE[6])
    if len(diverged):
        mark_steps(ax, diverged.tolist(), label=f"diverged ({len(diverged)})")
    return curves


def _draw_short_runs(ax: Axes, record: Record) -> list[Line2D]:
    """Draw the last loss of each short trial, small and grey: they say where the longer ones were to be run."""
    ends = {}
    for trial in trials_in(record, Role.LR_RANGE):
        _, losses = curve(record, trial, "loss")
        if losses.size and 0 < losses[-1] <= 10 * losses[0]:  # above, a longer run says "diverged" (rule of thumb)
            ends[lr_of(record, trial)] = float(losses[-1])
    style: dict[str, Any] = {"color": BASELINE, "alpha": 0.6, "markersize": 3, "zorder": 2}
    return ax.plot([*ends], [*ends.values()], "o", label=f"short runs ({len(ends)})", **style) if ends else []


def _mark_found(ax: Axes, record: Record, diagnosis: Diagnosis | None) -> None:
    """Draw lr* with its interval, the bracket of the unstable lr, and the baseline's lr."""
    best, lowest = best_lr(diagnosis)
    said = "lowest training loss" if best == lowest else "as good as the lowest training loss:"
    for code, ends, color, style, label in (
        ("lr.best", ("low", "high"), GOOD, "--", f"{said} {{}} (shaded: where that may lie)"),
        ("lr.unstable", ("lower", "upper"), BAD, "-.", "unstable from {} (shaded: not tried)"),
    ):
        found = finding(diagnosis, code)
        value = number(found.value if found else None)
        if found is not None and np.isfinite(value):
            low, high = (number(found.evidence.get(end)) for end in ends)
            shaded = high / low > float(np.divide(*ax.get_xlim()[::-1])) ** SEEN
            if shaded:
                ax.axvspan(low, high, color=color, alpha=0.15, linewidth=0)
            text = (label if shaded else label.partition(" (")[0]).format(short(value))
            ax.axvline(value, color=color, linestyle=style, label=text)
    chosen, _, word = recommended(diagnosis)
    if np.isfinite(chosen) and not np.isclose(chosen, best, rtol=1e-9, atol=0.0):
        ax.axvline(chosen, color=PALETTE[1], linestyle=(0, (5, 1)), linewidth=2, label=f"{word} {short(chosen)}")
    baseline = baseline_lr(record)
    if np.isfinite(baseline):
        ax.axvline(baseline, color=BASELINE, linestyle=":", linewidth=2, label=f"baseline {short(baseline)}")


def trials_to_draw(record: Record, diagnosis: Diagnosis | None) -> list[int]:
    """Trials at lr* and the next `ABOVE` lrs of the sweep; where lr* is not known, at `MOST` lrs. One for each lr and seed, and the recommended one."""
    best, trained = best_lr(diagnosis)
    best = best if len(trials_at(record, best)) else trained
    stages = ("lr_sweep", "baseline", "lr_unstable") if trials_in(record, "lr_sweep") else ()
    grid = np.unique([lr_of(record, t) for t in trials_in(record, *stages)]).tolist()
    spread = np.unique(np.linspace(0, len(grid) - 1, min(MOST, len(grid))).round().astype(int))
    lrs = [best]
    for lr in grid:
        if len(lrs) <= ABOVE and lr >= SPACING * lrs[-1]:
            lrs.append(lr)
    nearer = [lr for lr in grid if lr > best * (1 + 1e-9)]
    lrs = [*lrs, *nearer[-1:]] if len(lrs) == 1 else lrs
    lrs = [grid[i] for i in spread] if np.isnan(best) else lrs
    kept: dict[tuple[float, Any], int] = {}
    for lr in lrs:
        for trial in trials_at(record, lr, *stages):
            kept.setdefault((lr, field_of(record, trial, "seed")), trial)
    shown, proven = [*kept.values()], recommended(diagnosis)[1][:1]
    return [
        *shown[:1],
        *(trial for trial in proven if lr_of(record, trial) not in lrs),
        *shown[1:],
    ]  # in the colours of the sweep
