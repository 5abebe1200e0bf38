"""Do batch norm's statistics hold, over batches, devices and time?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm as diagnose
from workbench.topics.batch_norm.figures import plot_batch_norm as plot
from workbench.topics.batch_norm.figures import plot_batch_norm_devices as plot_devices
from workbench.topics.batch_norm.replicas import CODES

if TYPE_CHECKING:
    from workbench.topics.batch_norm.collect import audit_batch_norm as audit
    from workbench.topics.batch_norm.study import BatchNormStudy as Study
    from workbench.train.distributed.batch_norm import gather_running_statistics, merge_running_statistics
    from workbench.train.distributed.batch_norm import synchronise_batch_norm as synchronise
    from workbench.train.distributed.merge_statistics import merge_statistics
    from workbench.workloads.batch_norm import replace_batch_norm as replace
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "Study",
    "audit",
    "diagnose",
    "gather_running_statistics",
    "merge_running_statistics",
    "merge_statistics",
    "plot",
    "plot_devices",
    "replace",
    "synchronise",
]

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
            draw=plot,
            facts="batch_norm",
        ),
        Figure(
            name="batch-norm-devices",
            shows="How far the batch-norm statistics of the devices of one batch lie apart, against how many there are.",
            caption="Lines of a few percent are healthy; lines that rise towards 1 say that statistics have to be synchronised before "
            "anything is evaluated or written.",
            codes=("batch_norm.rank_local", "batch_norm.variance_of_means"),
            draw=plot_devices,
            facts="batch_norm_devices",
        ),
    ),
    studies={
        "batch_norm": StudyKind(diagnose=diagnose, pictures=("batch-norm",)),
    },
)
