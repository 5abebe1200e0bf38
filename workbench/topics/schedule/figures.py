"""The learning rate against the step, as a picture of a config: no training needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from workbench.config import TrainConfig
from workbench.plots.palette import BAD, BASELINE, GOOD, INK
from workbench.plots.style import Size, draw_curve, drawing, legend, not_measured, short, why_not_measured
from workbench.schedules import schedule_of


def plot_schedule(
    config: TrainConfig,
    *,
    baseline: TrainConfig | None = None,
    max_points: int = 2000,
    limits: Sequence[tuple[int, str]] = (),
    last_step: int | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the learning rate of every step, with the end of the warmup marked.

    Healthy: a ramp that starts at 0, reaches peak_lr at `warmup_steps` without a jump, and goes on as the baseline's
    schedule does, shifted to the right by the warmup. Sick: a jump where two pieces meet, a ramp that takes more than
    a tenth of the run, a schedule that reaches 0 long before the run ends.

    Args:
        baseline: a second config, dashed, for comparison.
        max_points: steps drawn at most, evenly spaced, those around the end of the warmup always; step 0 and the
            last step are always drawn.
        limits: steps that a warmup should end before, such as those of F3.10 and F3.14, and what each is called.
        last_step: where the axis ends at least, so that it stays while the warmup grows; None is the end of the longer run.

    Source: F3.5 (the ramp), F3.11 (prepended to the old schedule), F3.13 (the run gets longer).
    """
    with drawing(ax, size, (6.8, 3.2)) as axes:
        drawn = 0
        for each, name, color, style in (
            (baseline, "baseline", BASELINE, "--"), (config, f"peak {short(config.peak_lr)}", GOOD, "-"),
        ):  # fmt: skip
            if each is not None:
                total, corner = each.total_steps, each.warmup_steps + np.arange(-1, 2)
                even = np.linspace(0, total - 1, min(max_points, total)).astype(np.int64)
                steps = np.unique(np.concatenate([even, corner[(corner >= 0) & (corner < total)]]))
                lr_at = schedule_of(each)
                lrs = np.array([lr_at(int(step)) for step in steps], dtype=np.float64)
                draw_curve(axes, steps, lrs, label=f"{name}, {total:,} steps", color=color, linestyle=style)
                drawn += int(np.isfinite(lrs).sum())
        if not drawn:
            return not_measured(axes, "the schedule gives no finite learning rate")
        if config.warmup_steps:
            axes.axvline(
                config.warmup_steps, color=GOOD, linestyle=":", label=f"warmup ends at step {config.warmup_steps:,}"
            )
        for number, (step, name) in enumerate(limits):
            axes.axvline(
                step, color=(BASELINE, BAD)[number % 2], linestyle=("-.", "--")[number % 2], linewidth=1.0, label=name
            )
        axes.set(xlabel="step", ylabel="learning rate", title="Learning-rate schedule")
        axes.margins(x=0.01)
        if last_step is not None:
            axes.set_xlim(-0.01 * last_step, 1.01 * last_step)
        axes.set_ylim(bottom=0)
        legend(axes)
    return axes


def mark_warmup(ax: Axes, steps: int) -> Axes:
    """Mark on axes with steps, such as those of a loss curve, where the warmup of the run ended."""
    if steps and why_not_measured(ax) is None:
        ax.axvline(steps, color=INK, linestyle=":", linewidth=1.2, label=f"its warmup ends at step {steps:,}")
        legend(ax)
    return ax
