"""Does the learning rate's schedule do what it should?"""

from workbench.topics.schedule.diagnose import diagnose_schedule as diagnose
from workbench.topics.schedule.figures import plot_schedule as plot

__all__ = ["diagnose", "plot"]
