"""The figures of the report: which, in what order, and the words that go with each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.config import TrainConfig, is_callable_name
from workbench.diagnostics.base import Diagnosis
from workbench.errors import UsageError
from workbench.plots import (
    plot_batch_norm,
    plot_batch_norm_devices,
    plot_clipping,
    plot_confirm,
    plot_grad_norm,
    plot_grad_norm_histogram,
    plot_hosts,
    plot_input_pipeline,
    plot_input_workers,
    plot_loss_curves,
    plot_lr_sweep,
    plot_probe,
    plot_proof,
    plot_schedule,
    plot_server_load,
    plot_shards,
    plot_staleness,
    plot_throughput,
    plot_warmup,
)
from workbench.report_captions import swept_lrs

__all__ = ["FIGURES", "NARROW", "ReportFigure"]

NARROW = 5.2
"""Inches of width up to which a figure fits on a phone of 360 pixels with letters that can be read."""


@dataclass(frozen=True)
class ReportFigure:
    """One figure of the report.

    Attributes:
        name: short and unique; prefix of the ids within the figure.
        shows: what is drawn, the start of its text for screen readers.
        caption: how to read it in general, one or two sentences.
        codes: findings whose summaries, beside a few numbers, say what the figure shows here.
        draw: `(record, diagnosis, axes) -> axes`.
        facts: of the record, without which the figure is left out; None draws it always, or says why it cannot.
        size: width and height in inches; up to `NARROW` a figure is read on a phone as it is, a wider one scrolls there.
    """

    name: str
    shows: str
    caption: str
    codes: tuple[str, ...]
    draw: Callable[[Any, Diagnosis, Any], Any]
    facts: str | None = None
    size: tuple[float, float] = (NARROW, 3.4)


def _draw_lr_sweep(record: Any, diagnosis: Diagnosis, ax: Any) -> Any:
    if len(swept_lrs(record)) < 2:
        raise UsageError("fewer than two learning rates have been trained to their end")
    return plot_lr_sweep(record, diagnosis, ax=ax)


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
        lambda record, diagnosis, ax: plot_loss_curves(record, diagnosis=diagnosis, ax=ax),
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
    ReportFigure(
        "input-pipeline",
        "Milliseconds of a step, split into waiting for data and computing, and what making a batch takes.",
        "Red is waiting; a second bar that is about as long as the first says that nothing is to be gained. The change that was "
        "tried stands below, as predicted and as measured.",
        ("input.bound",),
        lambda record, diagnosis, ax: plot_input_pipeline(record, diagnosis, ax=ax),
        facts="input_pipeline",
        size=(8.4, 3.6),
    ),
    ReportFigure(
        "input-workers",
        "Batches per second of the loader alone against the number of worker processes.",
        "The number to set is where the curve meets the dashed line, which is what the step can use; a flat curve is held up by "
        "something that workers share.",
        ("input.bound",),
        lambda record, diagnosis, ax: plot_input_workers(record, diagnosis, ax=ax),
        facts="input_pipeline",
    ),
    ReportFigure(
        "hosts",
        "Milliseconds of a step that each host is busy, and that it waits for the others.",
        "Bars of one length are healthy; a host that is busy much longer makes all others wait by the difference.",
        ("hosts.straggler",),
        lambda record, diagnosis, ax: plot_hosts(record, diagnosis, ax=ax),
        facts="hosts",
        size=(NARROW, 3.0),
    ),
    ReportFigure(
        "shards",
        "Which examples each host trained on.",
        "Every example on one host is healthy; red marks are examples that several hosts saw, and the lowest row those that "
        "nobody did.",
        ("hosts.sharding",),
        lambda record, _, ax: plot_shards(record, ax=ax),
        facts="hosts",
        size=(NARROW, 3.0),
    ),
    ReportFigure(
        "batch-norm",
        "Selected metric against the examples in a batch-norm statistic, at a fixed total batch.",
        "Where the whole batch, at the right, is as good as any smaller statistic, nothing is to be set; a rise to the left "
        "says that statistics of few examples are too noisy.",
        ("batch_norm.ghost_size",),
        lambda record, diagnosis, ax: plot_batch_norm(record, diagnosis, ax=ax),
        facts="batch_norm",
    ),
    ReportFigure(
        "batch-norm-devices",
        "How far the batch-norm statistics of the devices of one batch lie apart, against how many there are.",
        "Lines of a few percent are healthy; lines that rise towards 1 say that statistics have to be synchronised before "
        "anything is evaluated or written.",
        ("batch_norm.rank_local", "batch_norm.variance_of_means"),
        lambda record, diagnosis, ax: plot_batch_norm_devices(record, diagnosis, ax=ax),
        facts="batch_norm_devices",
    ),
    ReportFigure(
        "server-load",
        "Kilobytes of a step that each parameter server sends and receives, by the variables that cause them.",
        "Bars that end at the dashed line are healthy; one far beyond it decides how fast all are, and its longest part is the "
        "variable to split.",
        ("ps.imbalance", "ps.hotspot"),
        lambda record, diagnosis, ax: plot_server_load(record, diagnosis, ax=ax),
        facts="parameter_server",
    ),
    ReportFigure(
        "staleness",
        "Updates of others between reading the parameters and applying the gradient.",
        "Most of the mass up to the number of other workers is healthy; a tail beyond the dotted line comes from a worker that is "
        "slower than the others.",
        ("ps.staleness",),
        lambda record, diagnosis, ax: plot_staleness(record, diagnosis, ax=ax),
        facts="parameter_server",
    ),
    ReportFigure(
        "throughput",
        "Updates per second against the number of workers.",
        "Points near the dotted line are healthy; where a line turns flat, more workers bring nothing.",
        ("ps.bound",),
        lambda record, _, ax: plot_throughput(record, ax=ax),
        facts="parameter_server_runs",
    ),
)
"""The figures in the order of a diagnosis; one that has nothing to show is replaced by a sentence that says why, or left out where it
belongs to a study of its own, whose facts the record does not hold."""
