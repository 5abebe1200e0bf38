"""How do predictions of single examples change while training?"""

from workbench.topics.predictions.figures import plot_predictions as plot
from workbench.topics.predictions.panel import predictions_panel as panel

__all__ = ["panel", "plot"]
