"""Figures of studies of one question: shown first in the report of such a study, where its facts are there, or it is of that kind."""

from __future__ import annotations

from workbench.report.figure import NARROW, ReportFigure
from workbench.topics.architecture.figures import plot_architecture
from workbench.topics.batch_norm.figures import plot_batch_norm, plot_batch_norm_devices
from workbench.topics.batch_size.figures import plot_batch_size, plot_tuned_lr
from workbench.topics.checkpoints.figures import plot_checkpoints, plot_early_stopping
from workbench.topics.evaluation.figures import plot_evaluation
from workbench.topics.evaluation.sample_figures import plot_evaluation_sample
from workbench.topics.hosts.figures import plot_hosts, plot_shards
from workbench.topics.input.figures import plot_input_pipeline, plot_input_workers
from workbench.topics.optimizers.figures import plot_optimizers
from workbench.topics.parameter_server.figures import plot_server_load, plot_staleness, plot_throughput

__all__ = ["OWN"]

OWN: tuple[ReportFigure, ...] = (
    ReportFigure(
        "optimizers",
        "The learning rates over which each update rule trains.",
        "Long bars are healthy, with the diamond, the baseline's own learning rate, well inside the bar of its rule.",
        ("optimizers.better",),
        lambda record, diagnosis, ax: plot_optimizers(record, diagnosis, ax=ax),
        kind="optimizers",
        size=(6.4, 3.9),
    ),
    ReportFigure(
        "architecture",
        "Largest stable learning rate against depth, with each practice and without.",
        "A level line, high up, keeps its learning rate however deep the network gets; a hollow triangle is an end of the grid.",
        ("architecture.norm_after_add", "architecture.no_residual", "architecture.no_norm"),
        lambda record, _, ax: plot_architecture(record, ax=ax),
        kind="architecture",
        size=(6.4, 3.9),
    ),
    ReportFigure(
        "batch-size",
        "Selected metric against batch size, with the baseline's settings everywhere and tuned for each.",
        "Crosses that lie apart and dots that do not: the settings fitted one batch size, and the size itself made no difference.",
        ("batch_size.equivalence", "batch_size.retune"),
        lambda record, diagnosis, ax: plot_batch_size(record, diagnosis, ax=ax),
        kind="batch_size",
        size=(6.4, 3.9),
    ),
    ReportFigure(
        "tuned-lr",
        "Tuned learning rate against batch size, beside the two rules by which it is often scaled.",
        "A hollow mark lies at the end of what was tried, so that the best may lie beyond.",
        ("batch_size.retune",),
        lambda record, diagnosis, ax: plot_tuned_lr(record, diagnosis, ax=ax),
        kind="batch_size",
        size=(6.4, 3.9),
    ),
    ReportFigure(
        "evaluation",
        "Offline metric against the periodic one, a point for each checkpoint.",
        "Points that rise together are healthy; a cloud says that the proxy ranks checkpoints otherwise than whole splits do.",
        ("evaluation.bad_proxy",),
        lambda record, diagnosis, ax: plot_evaluation(record, diagnosis, ax=ax),
        kind="evaluation",
    ),
    ReportFigure(
        "evaluation-sample",
        "Smallest difference that shows, and the time of an evaluation, against the number of examples.",
        "In the shaded band a sample keeps both bounds; without a band no size does.",
        ("evaluation.too_small",),
        lambda record, diagnosis, ax: plot_evaluation_sample(record, diagnosis, ax=ax),
        kind="evaluation_sample",
        size=(6.4, 3.9),
    ),
    ReportFigure(
        "checkpoints",
        "Where in each run the best checkpoint lies, and what it is better by than the last.",
        "Points far to the left and high are runs whose last checkpoint was worse than an earlier one; triangles far below their "
        "circles are gains that do not carry over.",
        ("checkpoints.best_not_last",),
        lambda record, diagnosis, ax: plot_checkpoints(record, diagnosis, ax=ax),
        kind="checkpoints",
    ),
    ReportFigure(
        "early-stopping",
        "What each early-stopping rule would have lost, and the steps that it would have saved.",
        "Long bars are rules that stopped too soon.",
        ("checkpoints.selection",),
        lambda record, diagnosis, ax: plot_early_stopping(record, diagnosis, ax=ax),
        kind="checkpoints",
        size=(6.4, 3.9),
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
"""In the order of the page."""
