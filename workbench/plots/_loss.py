"""One trial's training loss in the house style: shared by the figures that compare runs."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from workbench.plots._frames import Record, curve, lr_of
from workbench.plots._style import BAD, PALETTE, STYLES, draw_curve, drawable, legend, log_scale, short

__all__ = ["draw_trial_loss", "loss_axes"]


def draw_trial_loss(
    ax: Axes, record: Record, trial: int, *, index: int, relative_to: float = np.nan, note: str = ""
) -> bool:
    """Draw one trial's training loss in the style number `index`; False where it has no finite loss."""
    steps, losses = curve(record, trial, "loss")
    losses = drawable(losses)
    finite = np.isfinite(losses)
    if not finite.any():
        return False
    lr = lr_of(record, trial)
    ratio = "" if np.isnan(relative_to) else f" = {short(lr / relative_to)} x lr*".replace(" 1 x", "")
    color, style = PALETTE[index % len(PALETTE)], STYLES[index % len(STYLES)]
    draw_curve(
        ax,
        steps,
        losses,
        color=color,
        linestyle=style,
        linewidth=1.1,
        label=f"lr {short(lr)}{ratio}" + (f": {note}" if note else ""),
    )
    if not finite.all():
        last = int(np.flatnonzero(finite)[-1])
        label = f"lr {short(lr)} diverged at step {int(steps[~finite][0]):,}"
        ax.plot(steps[last], losses[last], "X", color=color, markersize=9, markeredgecolor=BAD, label=label, zorder=5)
    return True


def loss_axes(ax: Axes, *, title: str) -> None:
    """Label axes that hold losses; a log scale where every value is above 0."""
    if ax.dataLim.y0 > 0:
        log_scale(ax, "y")
    ax.set(xlabel="step", ylabel="training loss", title=title)
    ax.margins(x=0.01)
    legend(ax)
