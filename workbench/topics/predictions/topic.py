"""How do predictions of single examples change while training?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.findings.topic import Topic
from workbench.lazy import lazily
from workbench.topics.predictions.figures import plot_predictions as plot

if TYPE_CHECKING:
    from workbench.topics.predictions.panel import predictions_panel as panel
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["panel", "plot"]

TOPIC = Topic(name="predictions", codes={})
