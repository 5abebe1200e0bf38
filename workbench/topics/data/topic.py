"""Are the examples what they should be: finite, shuffled, unlike those of validation?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.findings.topic import Topic
from workbench.lazy import lazily
from workbench.topics.data.diagnose import diagnose_data as diagnose
from workbench.topics.data.diagnose_rows import CODES

if TYPE_CHECKING:
    from workbench.curves.class_counts import class_counts
    from workbench.topics.data.collect import audit_data as audit
    from workbench.workloads.subsets import draw_sample
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["audit", "class_counts", "diagnose", "draw_sample"]

TOPIC = Topic(name="data", codes=CODES)
