"""Training losses: one trial's curve over a band of its values, trials of any studies together, and a y axis on which all can be read."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.ndimage import percentile_filter

from workbench.curves.smoothing import running_median
from workbench.curves.trial_curves import RecordLike as Record
from workbench.plots.frames import curve, lr_of
from workbench.plots.style import (
    BAD,
    BASELINE,
    LARGEST,
    MAX_COLUMNS,
    PALETTE,
    STYLES,
    Size,
    draw_curve,
    drawable,
    drawing,
    legend,
    log_scale,
    not_measured,
    short,
)

Floats = NDArray[np.float64]
SHARE, WIDEST = 50, 65
"""A curve is smoothed by the median of one step in `SHARE`, of at most `WIDEST` (rule of thumb); one of fewer steps is not."""
MOST_STROKES = 4
"""Steps in which a smoothed loss moves by more than a factor of three; of more, the median is taken over more steps (rule of thumb): they hatch the picture."""
OTHERS = "other learning rates"
_HIGHEST = WeakKeyDictionary[Line2D, float]()  # of the losses that a line is the median of


def draw_trial_loss(
    ax: Axes,
    record: Record,
    trial: int,
    *,
    index: int,
    relative_to: float = np.nan,
    note: str = "",
    label: str = "",
    behind: bool = False,
) -> Line2D | None:
    """Draw one trial's training loss in the style number `index`, called by its lr or `label`; None where it has no finite loss.

    The line is the centred median of a `SHARE`th of the steps, or of more where that jumps, over a faint band that holds 80 % of the
    losses of as many. Those `behind` the others are grey, under one label.
    """
    steps, losses = curve(record, trial, "loss")
    losses = drawable(losses)
    finite = np.isfinite(losses)
    if not finite.any():
        return None
    smoothed = losses.copy()
    width = min(losses.size // SHARE, WIDEST) | 1
    smoothed[finite], wide = running_median(losses[finite], width), width
    while wide < losses.size // 4 and _strokes(smoothed[finite]) > MOST_STROKES:
        wide = 2 * wide + 1
        smoothed[finite] = running_median(losses[finite], wide)
    if finite.all() and 1 < width < losses.size:
        smoothed[-(width // 2) :] = smoothed[-(width // 2) - 1]  # not the one raw loss of the last step
    if behind:
        told = f"_{OTHERS}" if OTHERS in ax.get_legend_handles_labels()[1] else OTHERS
        return draw_curve(ax, steps, smoothed, color=BASELINE, linestyle="-", linewidth=0.8, alpha=0.55, zorder=1.8, label=told)  # fmt: skip
    lr = lr_of(record, trial)
    ratio = f", {times} x {short(relative_to)}" if (times := short(lr / relative_to)) not in ("1", "nan") else ""
    name, key = label or f"lr {short(lr)}", f"{index}.{trial}" if label.startswith("_") else str(index)
    color, style = PALETTE[index % len(PALETTE)], STYLES[index % len(STYLES)]
    if width > 1 and not label.startswith("_"):
        low, high = (percentile_filter(losses[finite], rank, size=wide, mode="nearest") for rank in (10, 90))
        thin = slice(None, None, max(1, losses.size // MAX_COLUMNS))
        band = ax.fill_between(steps[finite][thin], low[thin], high[thin], color=color, alpha=0.15, linewidth=0, zorder=1.9)  # fmt: skip
        band.set_gid(f"band-{key}")
    label, over = f"{name}{ratio}" + (f": {note}" if note else ""), 2.5 - 0.01 * index
    line = draw_curve(ax, steps, smoothed, color=color, linestyle=style, linewidth=1.1, zorder=over, label=label)
    line.set_gid(key)
    _HIGHEST[line] = float(losses[finite].max())
    if not finite.all():
        last = int(np.flatnonzero(finite)[-1])
        ended = f"{name} diverged at step {int(steps[~finite][0]):,}"
        ax.plot(steps[last], losses[last], "X", color=color, markersize=9, markeredgecolor=BAD, label=ended, zorder=5)
    return line


def _strokes(losses: Floats) -> int:
    """Return in how many steps losses move by more than a factor of three, between a millionth of the first and ten times as much as it: what is drawn."""
    first = max(abs(float(losses[0])), np.finfo(np.float64).tiny)
    return int((np.abs(np.diff(np.log10(np.clip(losses / first, 1e-6, 10.0)))) > np.log10(3)).sum())


def loss_axes(ax: Axes, curves: Sequence[Line2D], *, title: str) -> None:
    """Label axes that hold these curves of losses, and give them a y axis on which they can be read."""
    ax.set(xlabel="step", ylabel="training loss")
    ax.set_title(title, pad=10)  # above the marks of curves that leave the picture
    fit_y(ax, curves)
    ax.margins(x=0.01)
    legend(ax)


def fit_y(
    ax: Axes, curves: Sequence[Line2D], *, headroom: float = 10.0, depth: float = 1e-6, margin: float = 0.05
) -> None:
    """Choose scale and range of the y axis, so that one curve's extremes do not flatten the others.

    Logarithmic where no value is below 0; a value of 0, or below the depth, is drawn at the lower edge, and the axis
    says so. With values below 0 the axis is linear up to the largest initial value and logarithmic beyond. A curve
    that rises above the headroom leaves the picture at a triangle, and its label says how far it went.

    Args:
        curves: lines of `ax`; those with a triangle get another label.
        headroom: upper end of the axis over the largest initial value (rule of thumb).
        depth: lower end of a logarithmic axis over the same (rule of thumb: what lies below is fitted to the last digit).
        margin: space above and below, as a share of the axis.
    """
    shown = [np.asarray(line.get_ydata(), dtype=np.float64) for line in curves]
    values = np.concatenate([y[np.isfinite(y)] for y in shown] or [np.empty(0)])
    if not values.any():
        return
    start = max(abs(float(y[np.isfinite(y)][0])) for y in shown if np.isfinite(y).any())
    start = start or float(np.median(np.abs(values[values != 0])))
    top = headroom * start
    if values.min() < 0:
        ax.set_yscale("symlog", linthresh=start)
    else:
        _raise_to_floor(ax, curves, float(values[values >= depth * start].min(initial=top)))
        log_scale(ax, "y")
    shown = [np.asarray(line.get_ydata(), dtype=np.float64) for line in curves]  # some may have been raised
    kept = np.concatenate([y[np.isfinite(y)] for y in shown])
    low, high = float(kept[kept > 0].min() if values.min() >= 0 else kept.min()), min(float(kept.max()), top)
    if low < high:  # a margin of equal height on either side, as it looks on the axis
        to_axis = ax.yaxis.get_transform()
        ends = to_axis.transform(np.array([low, high]))
        ax.set_ylim(*to_axis.inverted().transform(ends + margin * np.ptp(ends) * np.array([-1, 1])))
    if values.max() > top:
        ax.set_ylim(top=top)
        _mark_exits(ax, curves, top)


def _raise_to_floor(ax: Axes, curves: Sequence[Line2D], floor: float) -> None:
    """Draw what lies below `floor` at `floor`: a logarithmic axis has no place for 0."""
    raised = [np.asarray(line.get_ydata(), dtype=np.float64) for line in curves]
    if not any((y < floor).any() for y in raised):
        return
    for line, y in zip(curves, raised, strict=True):
        line.set_ydata(np.where(y < floor, floor, y))
    for end in _ends(ax):
        end.set_ydata(np.maximum(np.asarray(end.get_ydata(), dtype=np.float64), floor))
    ax.relim()
    ax.set_ylabel(f"{ax.get_ylabel()}\n(lower edge: {short(floor)} or less)", parse_math=False)


def _mark_exits(ax: Axes, curves: Sequence[Line2D], top: float) -> None:
    """Mark where each curve first rises above `top`, and say in its label how far it goes; one that ends no lower than it began ends there."""
    for line in curves:
        x, y = (np.asarray(data, dtype=np.float64) for data in line.get_data())
        beyond = np.flatnonzero(np.nan_to_num(y, nan=-np.inf) > top)
        if beyond.size and not str(line.get_label()).endswith(OTHERS):
            label, peak = str(line.get_label()), _HIGHEST.get(line, float(np.nanmax(y)))
            reach = f" (max {'> ' if peak >= LARGEST else ''}{short(peak)})"
            line.set_label(f"{label}, off scale at ▲" + ("" if "max" in label else reach))
            ax.plot(x[beyond[0]], top, "^", color=line.get_color(), markersize=8, clip_on=False, zorder=6)
            known = y[np.isfinite(y)]
            if np.median(known[-len(known) // 10 :]) >= known[0]:
                line.set_ydata(np.where(np.arange(y.size) > beyond[0], np.nan, y))
                for band in [found for found in ax.collections if found.get_gid() == f"band-{line.get_gid()}"]:
                    band.remove()
    for end in _ends(ax):
        end.set_ydata(np.minimum(np.asarray(end.get_ydata(), dtype=np.float64), top))
        end.set_clip_on(False)


def _ends(ax: Axes) -> list[Line2D]:
    """The crosses at which diverged runs end."""
    return [line for line in ax.lines if line.get_marker() == "X"]


def plot_trial_curves(
    curves: Sequence[tuple[Record, int, str]], *, size: Size = "page", ax: Axes | None = None
) -> Axes:
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
    with drawing(ax, size) as axes:
        lines = [
            line
            for index, (record, trial, name) in enumerate(curves)
            if (line := draw_trial_loss(axes, record, trial, index=index, label=name)) is not None
        ]
        if not lines:
            return not_measured(axes, "no trial with a finite training loss")
        loss_axes(axes, lines, title="Training loss")
    return axes
