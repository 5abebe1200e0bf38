"""Is every trial on record?"""

from workbench.topics.tracking.diagnose import diagnose_tracking as diagnose
from workbench.topics.tracking.figures import plot_studies as plot

__all__ = ["diagnose", "plot"]
