"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.topics.batch_norm.figures import plot_batch_norm, plot_batch_norm_devices
from workbench.topics.batch_norm.replicas import CODES

TOPIC = Topic(
    name="batch_norm",
    codes=CODES,
    figures=(
        Figure(
            name="batch-norm",
            shows="Selected metric against the examples in a batch-norm statistic, at a fixed total batch.",
            caption="Where the whole batch, at the right, is as good as any smaller statistic, nothing is to be set; a rise to the left "
            "says that statistics of few examples are too noisy.",
            codes=("batch_norm.ghost_size",),
            draw=plot_batch_norm,
            facts="batch_norm",
        ),
        Figure(
            name="batch-norm-devices",
            shows="How far the batch-norm statistics of the devices of one batch lie apart, against how many there are.",
            caption="Lines of a few percent are healthy; lines that rise towards 1 say that statistics have to be synchronised before "
            "anything is evaluated or written.",
            codes=("batch_norm.rank_local", "batch_norm.variance_of_means"),
            draw=plot_batch_norm_devices,
            facts="batch_norm_devices",
        ),
    ),
    studies={
        "batch_norm": StudyKind(diagnose=diagnose_batch_norm, pictures=("batch-norm",)),
    },
)
