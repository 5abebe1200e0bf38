"""What the registry has to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.generalisation.diagnose import CODES

TOPIC = Topic(name="generalisation", codes=CODES)
