"""One run under early stopping: where it would have stopped, what it would have kept, and what the full budget found (P4.6)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from workbench.plots.loss import fit_y
from workbench.plots.style import BAD, GOOD, INK, PALETTE, draw_curve, drawable, drawing, legend, not_measured, short
from workbench.topics.checkpoints.patience import Patience

__all__ = ["plot_patience"]


def plot_patience(
    stopped: Patience, *, trial: int | None = None, step: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw what was watched of one run, with the step at which patience ends and the checkpoint that is kept then.

    Healthy: the star, the best of the full budget, lies before the line: nothing is lost. Sick: it lies behind the line, in the
    part of the run that would not have been made.

    Args:
        stopped: as `stop_with_patience` returns it.
        trial: which one; None is the first that can be judged.
        step: of a checkpoint to point out.
        ax: where to draw; a new figure by default.

    Returns:
        The axes.

    Source: P4.5 (retrospective selection), P4.6 (early stopping is not needed where the budget is set beforehand).
    """
    with drawing(ax, size=(6.8, 3.8)) as axes:
        runs = [run for run in stopped.runs if trial is None or run.trial == trial]
        if not runs:
            return not_measured(axes, "no finished run has enough finite evaluations")
        run = runs[0]
        line = draw_curve(axes, run.steps.astype(float), run.values, color=GOOD, marker=".", label=f"trial {run.trial}")
        axes.set(xlabel="step", title=f"Early stopping: {stopped.rule.name}")
        axes.set_ylabel(stopped.select, parse_math=False)
        fit_y(axes, [line])
        axes.margins(x=0.02)
        if run.stop_step is not None:
            axes.axvspan(run.stop_step, run.total_steps, color=INK, alpha=0.08, linewidth=0)
            axes.axvline(run.stop_step, color=BAD, linestyle="--", label=f"stops at step {run.stop_step:,}")
        best = float(drawable([run.best])[0])
        axes.plot(
            run.best_step,
            best,
            "*",
            color=INK,
            markersize=13,
            linestyle="none",
            label=f"best: {short(run.best)}",
            zorder=4,
        )
        if run.kept_step is not None:
            kept = float(drawable([run.kept])[0])
            axes.plot(run.kept_step, kept, "s", color=BAD, fillstyle="none", markersize=11, markeredgewidth=1.8, linestyle="none",
                      label=f"kept: {short(run.kept)}", zorder=5)  # fmt: skip
        if step is not None:
            at = np.flatnonzero(run.steps == step)
            value = f": {short(float(run.values[at[0]]))}" if at.size else ""
            axes.axvline(step, color=PALETTE[4], linewidth=5, alpha=0.35, label=f"step {step:,}{value}", zorder=1.5)
        legend(axes)
    return axes
