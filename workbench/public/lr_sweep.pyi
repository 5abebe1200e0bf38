"""Which learning rate trains best, and where does training become unstable?"""

from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep as diagnose
from workbench.topics.lr_sweep.figures import plot_loss_curves as plot_loss_curves
from workbench.topics.lr_sweep.figures import plot_lr_sweep as plot
from workbench.topics.lr_sweep.panel import lr_sweep_panel as panel
from workbench.topics.lr_sweep.study import LRSweep as Study

__all__ = ["Study", "diagnose", "panel", "plot", "plot_loss_curves"]
