"""What does a modification do to the learning rates that train, and does a warmup undo it?"""

from workbench.topics.modification.diagnose import diagnose_modification as diagnose
from workbench.topics.modification.figures import plot_modification as plot
from workbench.topics.modification.study import ModificationStudy as Study

__all__ = ["Study", "diagnose", "plot"]
