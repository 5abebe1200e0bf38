"""Does training wait for its data?"""

from workbench.topics.input.diagnose import diagnose_input_pipeline as diagnose
from workbench.topics.input.figures import plot_input_pipeline as plot
from workbench.topics.input.figures import plot_input_workers as plot_workers
from workbench.topics.input.study import InputPipelineStudy as Study
from workbench.topics.input.study import audit_input as audit
from workbench.topics.input.variants import compare_storage as compare_storage
from workbench.workloads.items import Delayed as Delayed
from workbench.workloads.items import cache_dataset as cache_dataset

__all__ = ["Delayed", "Study", "audit", "cache_dataset", "compare_storage", "diagnose", "plot", "plot_workers"]
