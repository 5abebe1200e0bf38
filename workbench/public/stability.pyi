"""Is training stable, and what cures it where it is not?"""

from workbench.topics.stability.diagnose import check_stability as check
from workbench.topics.stability.diagnose import diagnose_instability as diagnose
from workbench.topics.stability.figures import plot_confirm as plot_confirm
from workbench.topics.stability.figures import plot_probe as plot
from workbench.topics.stability.study import InstabilityStudy as Study

__all__ = ["Study", "check", "diagnose", "plot", "plot_confirm"]
