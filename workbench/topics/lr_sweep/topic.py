"""What the report and the pages have to know of this question."""

from __future__ import annotations

from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.lr_sweep.captions import curve_numbers, few_runs, sweep_numbers, trained_lrs
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep

__all__ = ["TOPIC"]


def _draw_lr_sweep(record: Any, diagnosis: Diagnosis, *, ax: Any) -> Any:
    if len(trained_lrs(record)) < 2:
        raise UsageError("fewer than two learning rates have been trained to their end")
    return plot_lr_sweep(record, diagnosis, ax=ax)


def _draw_curves(record: Any, diagnosis: Diagnosis, *, ax: Any) -> Any:
    known = "lr.best" in diagnosis and diagnosis["lr.best"].value is not None
    return plot_loss_curves(record, diagnosis=diagnosis, trials=None if known else few_runs(record), ax=ax)


TOPIC = Topic(
    name="lr_sweep",
    figures=(
        Figure(
            name="lr-sweep",
            shows="Training loss at the end of the run against learning rate, with the infeasible learning rates marked.",
            caption="A bowl with lr* in its middle is healthy. A best point right before the marks along the top edge is at the "
            "edge of the unstable region; a best point at the border of the grid means that the bowl lies elsewhere.",
            codes=("lr.best", "lr.unstable", "lr.at_edge"),
            draw=_draw_lr_sweep,
            numbers=sweep_numbers,
        ),
        Figure(
            name="loss-curves",
            shows="Training loss against step for the best learning rate and the next ones above it.",
            caption="A curve that goes up for a stretch, jumps, or ends in a cross shows instability; curves that only wobble "
            "around a level do not.",
            codes=("stability.early", "stability.mid", "stability.divergent"),
            draw=_draw_curves,
            numbers=curve_numbers,
        ),
    ),
    studies={
        "diagnosis": StudyKind(diagnose=None, pictures=("lr-sweep", "loss-curves")),
        "lr_sweep": StudyKind(diagnose=None, pictures=("lr-sweep", "loss-curves")),
    },
)
