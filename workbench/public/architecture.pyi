"""Which practices of its architecture does a model follow?"""

from workbench.topics.architecture.diagnose import architecture_depths as depths
from workbench.topics.architecture.diagnose import architecture_joins as joins
from workbench.topics.architecture.diagnose import diagnose_architecture as diagnose
from workbench.topics.architecture.figures import plot_architecture as plot
from workbench.topics.architecture.study import ArchitectureStudy as Study

__all__ = ["Study", "depths", "diagnose", "joins", "plot"]
