"""Do batch norm's statistics hold, over batches, devices and time?"""

from workbench.topics.batch_norm.collect import audit_batch_norm as audit
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm as diagnose
from workbench.topics.batch_norm.figures import plot_batch_norm as plot
from workbench.topics.batch_norm.figures import plot_batch_norm_devices as plot_devices
from workbench.topics.batch_norm.figures import plot_batch_norm_layout as plot_layout
from workbench.topics.batch_norm.panel import batch_norm_panel as panel
from workbench.topics.batch_norm.replicas import statistics_layout as layout
from workbench.topics.batch_norm.study import BatchNormStudy as Study
from workbench.train.batch_norm import ghost_batch_norm as ghost
from workbench.train.batch_norm import replace_batch_norm as replace
from workbench.train.distributed.batch_norm import gather_running_statistics as gather_running_statistics
from workbench.train.distributed.batch_norm import merge_running_statistics as merge_running_statistics
from workbench.train.distributed.batch_norm import merged_running_statistics as merged_running_statistics
from workbench.train.distributed.batch_norm import synchronise_batch_norm as synchronise
from workbench.train.distributed.merge_statistics import merge_statistics as merge_statistics

__all__ = [
    "Study",
    "audit",
    "diagnose",
    "gather_running_statistics",
    "ghost",
    "layout",
    "merge_running_statistics",
    "merge_statistics",
    "merged_running_statistics",
    "panel",
    "plot",
    "plot_devices",
    "plot_layout",
    "replace",
    "synchronise",
]
