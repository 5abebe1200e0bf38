"""What the registry has to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Topic
from workbench.topics.one_batch.diagnose import CODES
from workbench.topics.one_batch.diagnose_layers import PARAMETER_CODES
from workbench.topics.one_batch.diagnose_preflight import CODES as PREFLIGHT_CODES

TOPIC = Topic(name="one_batch", codes={**CODES, **PARAMETER_CODES, **PREFLIGHT_CODES})
