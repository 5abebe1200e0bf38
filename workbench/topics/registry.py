"""`TOPICS`: every question, found by the `topic.py` of its folder, in the order of a report."""

from __future__ import annotations

import importlib
from pathlib import Path

from workbench.findings.topic import Figure, StudyKind, Topic

_FIRST = (
    "lr_sweep", "stability", "warmup", "clipping", "recommendation", "schedule", "optimizers", "architecture", "batch_size", "evaluation",
    "checkpoints", "input", "hosts", "batch_norm", "parameter_server",
)  # fmt: skip
"""Questions in the order of a report; any other stands behind them."""


def _found() -> tuple[Topic, ...]:
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("*/topic.py"))
    ordered = [*_FIRST, *(name for name in names if name not in _FIRST)]
    return tuple(importlib.import_module(f"workbench.topics.{name}.topic").TOPIC for name in ordered)


TOPICS: tuple[Topic, ...] = _found()
FIGURES: tuple[Figure, ...] = tuple(figure for topic in TOPICS for figure in topic.figures)
STUDIES: dict[str, StudyKind] = {kind: study for topic in TOPICS for kind, study in topic.studies.items()}
"""Kind of a study -> what judges and shows it."""
CODES: dict[str, str] = {code: clause for topic in TOPICS for code, clause in topic.codes.items()}
"""Every code that a finding may have -> its clause."""
