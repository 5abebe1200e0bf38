"""Does a training loop of one's own do what a loop should, in the order in which it should?"""

from __future__ import annotations

from workbench.findings.topic import StudyKind, Topic
from workbench.topics.loop.diagnose import CODES
from workbench.topics.loop.diagnose import diagnose_loop as diagnose
from workbench.topics.loop.judge import judge_run

__all__ = ["diagnose"]

TOPIC = Topic(name="loop", codes=CODES, studies={"watch": StudyKind(diagnose=judge_run, pictures=("loss-curves",))})
