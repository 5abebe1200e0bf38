"""Which learning rate trains best, and where does training become unstable?"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.curves.judged import judged
from workbench.curves.sweep import LRPoint
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.plots.frames import curve, trials_in
from workbench.plots.words import counted, first_and_end, number_text
from workbench.topics.lr_sweep.diagnose import CODES
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep as diagnose
from workbench.topics.lr_sweep.figures import plot_loss_curves, trials_to_draw
from workbench.topics.lr_sweep.figures import plot_lr_sweep as plot

if TYPE_CHECKING:
    from workbench.topics.lr_sweep.panel import lr_sweep_panel as panel
    from workbench.topics.lr_sweep.study import LRSweep as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "diagnose", "panel", "plot", "plot_loss_curves"]
MAX_CURVES = 6
"""Runs that a picture of curves shows where nothing says which ones matter: as many as there are line styles."""


def trained_lrs(record: Any) -> list[float]:
    """Return the learning rates that were trained to their end, in order: those of which the sweep's picture has a point."""
    return [point.lr for point in _points(record)]


def _points(record: Any) -> list[LRPoint]:
    swept = trials_in(record, "lr_sweep", "lr_unstable")  # learning rates of a study of something else are no sweep
    return list(judged(record).sweep().points) if swept else []


def few_runs(record: Any) -> list[int] | None:
    """Return the runs to draw of a study that looks for no best learning rate: at most six, spread over it; None for all."""
    numbers = trials_in(record)
    picked = np.linspace(0, len(numbers) - 1, MAX_CURVES).round().astype(int)
    return [numbers[k] for k in picked] if len(numbers) > MAX_CURVES else None


def _sweep_numbers(record: Any, _: Diagnosis) -> str:
    lrs, losses = trained_lrs(record), [loss for point in _points(record) for loss in point.losses]
    diverged = int(np.isinf(losses).sum())
    ended = f"; {counted(diverged, 'run')} ended non-finite" if diverged else ""
    ends = f"from {number_text(lrs[0])} to {number_text(lrs[-1])}"
    return f"{counted(len(lrs), 'learning rate')} {ends} in {counted(len(losses), 'run')}{ended}."


def _curve_numbers(record: Any, diagnosis: Diagnosis) -> str:
    numbers = _drawn(record, diagnosis) or trials_to_draw(record, diagnosis)
    numbers = [trial for trial in numbers if curve(record, trial, "loss")[1].size]
    if not numbers:
        return ""
    firsts, ends = zip(*(first_and_end(curve(record, trial, "loss")[1]) for trial in numbers), strict=True)
    up = sum(not np.isfinite(end) or end >= first for first, end in zip(firsts, ends, strict=True))
    higher = f"; {up:,} of them not finite or no lower than at step 0" if up else ""
    return f"{counted(len(numbers), 'run')}: training loss {_range(firsts)} at step 0, {_range(ends)} as the mean of the last tenth{higher}."


def _range(values: Sequence[float]) -> str:
    finite = sorted(value for value in values if np.isfinite(value)) or [math.nan]
    return (
        f"{number_text(finite[0])} to {number_text(finite[-1])}" if finite[-1] > finite[0] else number_text(finite[0])
    )


def _draw_lr_sweep(record: Any, diagnosis: Diagnosis, *, ax: Any) -> Any:
    if len(trained_lrs(record)) < 2:
        raise UsageError("fewer than two learning rates have been trained to their end")
    return plot(record, diagnosis, ax=ax)


def _drawn(record: Any, diagnosis: Diagnosis) -> list[int] | None:
    known = "lr.best" in diagnosis and diagnosis["lr.best"].value is not None
    return None if known else few_runs(record)


def _draw_curves(record: Any, diagnosis: Diagnosis, *, ax: Any) -> Any:
    return plot_loss_curves(record, diagnosis=diagnosis, trials=_drawn(record, diagnosis), ax=ax)


_KIND = StudyKind(diagnose=None, pictures=("lr-sweep", "loss-curves"))
TOPIC = Topic(
    name="lr_sweep",
    codes=CODES,
    figures=(
        Figure(
            name="lr-sweep",
            shows="Training loss at the end of the run against learning rate, with the infeasible learning rates marked.",
            caption="A curve with its minimum in the middle is healthy. A minimum right before the marks along the top edge is at the "
            "edge of the unstable region; one at the border of the grid may lie beyond it.",
            codes=("lr.at_edge",),
            draw=_draw_lr_sweep,
            numbers=_sweep_numbers,
        ),
        Figure(
            name="loss-curves",
            shows="Training loss against step: the median of neighbouring steps, over a band that holds 80 % of their losses.",
            caption="A curve that goes up for a stretch, jumps, or ends in a cross shows instability; curves that only wobble "
            "around a level do not.",
            codes=("stability.early", "stability.mid", "stability.divergent"),
            draw=_draw_curves,
            numbers=_curve_numbers,
        ),
    ),
    studies={"diagnosis": _KIND, "lr_sweep": _KIND},
)
