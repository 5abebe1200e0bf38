"""Is a warmup needed, and how long?"""

from workbench.topics.warmup.diagnose import diagnose_warmup as diagnose
from workbench.topics.warmup.figures import plot_warmup as plot
from workbench.topics.warmup.panel import warmup_panel as panel
from workbench.topics.warmup.study import WarmupStudy as Study

__all__ = ["Study", "diagnose", "panel", "plot"]
