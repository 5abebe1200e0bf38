"""`next_steps`: the advice of a diagnosis, each line once, with what the study has already done about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.curves.trials import RecordLike
from workbench.findings.advice import ADVICE
from workbench.findings.causes import causes_first
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.recommendation.diagnose import REMEDY_FIELDS, tried_remedies

__all__ = ["NextStep", "next_steps"]


class NextStep(NamedTuple):
    """One line of advice.

    Attributes:
        line: what to do.
        code: the finding that gives it, the first one where several do.
        done: the recommended config does it already.
        tried: this study tried it, and it was not better.
    """

    line: str
    code: str
    done: bool
    tried: bool


def next_steps(record: RecordLike, diagnosis: Diagnosis) -> list[NextStep]:
    """Return the advice of what is not well and stands for itself, causes first (F2.9, F2.10).

    Args:
        record: the study, which knows what was tried.
        diagnosis: of that study.
    """
    tried, found = tried_remedies(record), diagnosis.recommendation or {}
    changed = set(found.get("changed") or ())
    remedies = {str(ADVICE[name]): name for name in REMEDY_FIELDS}
    done = {str(ADVICE[name]) for name, field in REMEDY_FIELDS.items() if field in changed}
    if _lowers_lr(record.config, found):
        done.add(str(ADVICE["lower_lr"]))
    steps: dict[str, NextStep] = {}
    for finding in causes_first(f for f in diagnosis.findings if f.status != "ok"):
        in_vain = finding.code == "lr.too_low" and _held_lr_in_vain(found)
        for line in finding.advice:
            steps.setdefault(line, NextStep(line, finding.code, line in done, in_vain or remedies.get(line) in tried))
    return list(steps.values())


def _held_lr_in_vain(found: Mapping[str, Any]) -> bool:
    """Whether a candidate was held against the baseline and not adopted: it had the best learning rate, or a better config."""
    return found.get("candidate") is not None and not found.get("adopted")


def _lowers_lr(baseline: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a smaller learning rate was proven better: then it is no last resort, but what was wrong."""
    adopted = bool(found.get("adopted")) and "peak_lr" in (found.get("changed") or ())
    return adopted and float(found["config"]["peak_lr"]) < float(baseline["peak_lr"])
