"""How do predictions of single examples change while training?"""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.predictions.figures import plot_predictions as plot

__all__ = ["plot"]

TOPIC = Topic(name="predictions", codes={})
