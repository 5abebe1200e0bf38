"""What the registry has to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.preflight.diagnose import CODES

TOPIC = Topic(name="preflight", codes=CODES)
