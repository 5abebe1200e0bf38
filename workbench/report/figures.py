"""The figures of the report: which of a walk through the playbook, in what order, and the words that go with each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TrainConfig, is_callable_name
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.report.captions import few_runs, swept_lrs
from workbench.report.figure import ReportFigure
from workbench.report.own_figures import OWN
from workbench.topics.clipping.figures import plot_clipping
from workbench.topics.clipping.grad_norm_figures import plot_grad_norm, plot_grad_norm_histogram
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep
from workbench.topics.recommendation.figures import plot_proof
from workbench.topics.schedule.figures import plot_schedule
from workbench.topics.stability.figures import plot_confirm, plot_probe
from workbench.topics.warmup.figures import plot_warmup

__all__ = ["FIGURES", "ReportFigure"]


def _draw_lr_sweep(record: Any, diagnosis: Diagnosis, ax: Any) -> Any:
    if len(swept_lrs(record)) < 2:
        raise UsageError("fewer than two learning rates have been trained to their end")
    return plot_lr_sweep(record, diagnosis, ax=ax)


def _draw_curves(record: Any, diagnosis: Diagnosis, ax: Any) -> Any:
    known = "lr.best" in diagnosis and diagnosis["lr.best"].value is not None
    return plot_loss_curves(record, diagnosis=diagnosis, trials=None if known else few_runs(record), ax=ax)


def _draw_schedule(record: Any, diagnosis: Diagnosis, ax: Any) -> Any:
    chosen = (diagnosis.recommendation or {}).get("config") or record.config
    return plot_schedule(_with_schedule(chosen), baseline=_with_schedule(record.config), ax=ax)


def _with_schedule(stored: Mapping[str, Any]) -> TrainConfig:
    """The stored config as far as the schedule goes; an optimizer of the user's own has no part in it."""
    if is_callable_name(stored.get("schedule")):
        raise UsageError(
            f"the schedule is a function of your own, {stored['schedule']}, and the record keeps its name only."
        )
    optimizer = "sgd" if is_callable_name(stored.get("optimizer")) else stored.get("optimizer", "sgd")
    return TrainConfig.from_dict({**stored, "optimizer": optimizer})


FIGURES: tuple[ReportFigure, ...] = (
    ReportFigure(
        "lr-sweep",
        "Training loss at the end of the run against learning rate, with the infeasible learning rates marked.",
        "A bowl with lr* in its middle is healthy. A best point right before the marks along the top edge is at the "
        "edge of the unstable region; a best point at the border of the grid means that the bowl lies elsewhere.",
        ("lr.best", "lr.unstable", "lr.at_edge"),
        _draw_lr_sweep,
    ),
    ReportFigure(
        "loss-curves",
        "Training loss against step for the best learning rate and the next ones above it.",
        "A curve that goes up for a stretch, jumps, or ends in a cross shows instability; curves that only wobble "
        "around a level do not.",
        ("stability.early", "stability.mid", "stability.divergent"),
        _draw_curves,
    ),
    ReportFigure(
        "probe",
        "Loss of a short run at twice the best learning rate, evaluated at every step and at every hundredth.",
        "Where the every-step curve climbs above the dotted line and the coarse one does not, the usual evaluation "
        "interval hides an unstable start.",
        ("stability.early_recovers", "stability.early"),
        lambda record, diagnosis, ax: plot_probe(record, diagnosis, ax=ax),
    ),
    ReportFigure(
        "confirm",
        "Training loss at 5 and 10 times the best learning rate, beside the run at the best.",
        "A steady fall and then a sudden rise means that the model probably suffers from optimisation instability.",
        ("stability.mid", "stability.divergent"),
        lambda record, diagnosis, ax: plot_confirm(record, diagnosis, ax=ax),
    ),
    ReportFigure(
        "grad-norm",
        "L2 norm of the gradient before clipping against step, for the baseline.",
        "Single spikes far above the band are outlier batches or the start of an instability.",
        ("clipping.threshold", "stability.spike"),
        lambda record, diagnosis, ax: plot_grad_norm(record, diagnosis, ax=ax),
    ),
    ReportFigure(
        "grad-norm-histogram",
        "Histogram of the gradient norms of all steps of the baseline.",
        "A good clipping threshold stands just right of the hump; to its left it would clip most steps and act as a "
        "lower learning rate.",
        ("clipping.threshold", "clipping.aggressive"),
        lambda record, diagnosis, ax: plot_grad_norm_histogram(record, diagnosis, ax=ax),
    ),
    ReportFigure(
        "warmup",
        "Which warmup lengths train, at which learning rate.",
        "The star is the shortest that trains; crosses up to the cap say that no allowed warmup opens that learning rate.",
        ("warmup.shortest", "warmup.insufficient"),
        lambda record, diagnosis, ax: plot_warmup(record, diagnosis, ax=ax),
        size=(6.4, 3.9),
    ),
    ReportFigure(
        "clipping",
        "Training loss at the end of each clipped run against its threshold, with the share of clipped steps.",
        "A good threshold clips about a tenth of the steps; hollow points clip half or more, which is an odd way to lower "
        "the learning rate.",
        ("clipping.cures", "clipping.aggressive"),
        lambda record, diagnosis, ax: plot_clipping(record, diagnosis, ax=ax),
    ),
    ReportFigure(
        "proof",
        "Selected checkpoint of every seed, baseline against candidate.",
        "Lines that all go the same way speak for the candidate; lines that cross say that the seed decides.",
        (),
        lambda record, diagnosis, ax: plot_proof(record, diagnosis, ax=ax),
    ),
    ReportFigure(
        "schedule",
        "Learning rate against step, recommended and baseline.",
        "The ramp starts at 0 and meets the schedule without a jump; the run is longer by the warmup.",
        ("warmup.shortest", "schedule.discontinuity"),
        _draw_schedule,
    ),
    *OWN,
)
"""The figures in the order of a diagnosis; one that has nothing to show is replaced by a sentence that says why, or left out where it
belongs to a study of its own."""
