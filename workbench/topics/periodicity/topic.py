"""Does the training loss repeat with the epochs?"""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.periodicity.diagnose import CODES
from workbench.topics.periodicity.diagnose import diagnose_periodicity as diagnose
from workbench.topics.periodicity.figures import plot_periodicity as plot

__all__ = ["diagnose", "plot"]

TOPIC = Topic(name="periodicity", codes=CODES)
