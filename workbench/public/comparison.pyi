"""Which of several variants is better, each tuned alike?"""

from workbench.topics.comparison.diagnose import diagnose_comparison as diagnose
from workbench.topics.comparison.figures import plot_comparison as plot
from workbench.topics.comparison.study import ComparisonStudy as Study

__all__ = ["Study", "diagnose", "plot"]
