"""Does the training loss repeat with the epochs?"""

from workbench.topics.periodicity.diagnose import diagnose_periodicity as diagnose
from workbench.topics.periodicity.figures import plot_periodicity as plot

__all__ = ["diagnose", "plot"]
