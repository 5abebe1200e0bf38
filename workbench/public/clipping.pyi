"""Does gradient clipping help, and at which norm?"""

from workbench.topics.clipping.diagnose import diagnose_clipping as diagnose
from workbench.topics.clipping.figures import plot_clipping as plot
from workbench.topics.clipping.figures import plot_grad_norm as plot_grad_norm
from workbench.topics.clipping.figures import plot_grad_norm_histogram as plot_grad_norm_histogram
from workbench.topics.clipping.panel import clipping_panel as panel
from workbench.topics.clipping.study import ClippingStudy as Study

__all__ = ["Study", "diagnose", "panel", "plot", "plot_grad_norm", "plot_grad_norm_histogram"]
