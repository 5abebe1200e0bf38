"""Training losses of trials from anywhere, one curve each, called by the names that they are given."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from workbench.plots.frames import Record
from workbench.plots.loss import draw_trial_loss, loss_axes
from workbench.plots.style import drawing, not_measured

__all__ = ["plot_trial_curves"]


def plot_trial_curves(curves: Sequence[tuple[Record, int, str]], *, ax: Axes | None = None) -> Axes:
    """Draw the training loss of trials of any studies, one curve each.

    Healthy: every curve falls, and the better setting lies below the other all the way. Sick: curves that cross late, where the
    better one depends on when training ends; a curve that ends in a cross (diverged).

    Args:
        curves: record, number of the trial in it, and what to call it.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. The y axis is logarithmic where no loss is below 0.

    Source: P5.6 for the values that are compared; F1.7 for what to look for in a curve.
    """
    with drawing(ax) as axes:
        drawn = [
            draw_trial_loss(axes, record, trial, index=index, label=name)
            for index, (record, trial, name) in enumerate(curves)
        ]
        lines = [line for line in drawn if line is not None]
        if not lines:
            return not_measured(axes, "no trial with a finite training loss")
        loss_axes(axes, lines, title="Training loss")
    return axes
