"""Is every trial on record?"""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.tracking.diagnose import CODES
from workbench.topics.tracking.diagnose import diagnose_tracking as diagnose

__all__ = ["diagnose"]

TOPIC = Topic(name="tracking", codes=CODES)
