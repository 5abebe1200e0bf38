"""Which batch size is worth its steps?"""

from workbench.topics.batch_size.diagnose import diagnose_batch_size as diagnose
from workbench.topics.batch_size.figures import plot_batch_size as plot
from workbench.topics.batch_size.figures import plot_tuned_lr as plot_tuned_lr
from workbench.topics.batch_size.study import BatchSizeStudy as Study

__all__ = ["Study", "diagnose", "plot", "plot_tuned_lr"]
