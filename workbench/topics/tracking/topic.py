"""Is every trial on record?"""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.tracking.diagnose import CODES
from workbench.topics.tracking.diagnose import diagnose_tracking as diagnose
from workbench.topics.tracking.figures import plot_studies as plot

__all__ = ["diagnose", "plot"]

TOPIC = Topic(name="tracking", codes=CODES)
