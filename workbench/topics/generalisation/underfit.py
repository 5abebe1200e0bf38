"""`evaluation.underfits`: a trained model that does far worse on its own training examples than a linear model, or than nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.findings.audited import Audited, why_missing
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.generalisation.diagnose import classifies

__all__ = ["diagnose_underfit"]

CODE, CLAUSE = "evaluation.underfits", "P3.2"


def diagnose_underfit(
    record: Audited, *, least: float = 0.75, broken: float = 0.5, skill: float = 0.2, ses: float = 4.0
) -> Diagnosis:
    """Hold the baseline against yardsticks that need no training, by accuracy or correlation on training examples.

    The yardsticks predict rows that they were not fitted to, the model examples that it was trained on: it has every advantage.

    Args:
        record: a study whose facts hold "data" and "generalisation".
        least: share of the better yardstick's skill that the model has to have (rule of thumb). Skill is what a score has above chance.
        broken: share below which it is a failure (rule of thumb).
        skill: of the better yardstick, from which on it says something (rule of thumb).
        ses: standard errors of the model's score by which it has to fall short.

    Returns:
        The one code `evaluation.underfits`.
    """
    found = _finding(record.facts, least=least, broken=broken, skill=skill, ses=ses)
    return Diagnosis.of(record, (found,))


def _finding(facts: Mapping[str, Any], *, least: float, broken: float, skill: float, ses: float) -> Finding:
    trained, sticks = facts.get("generalisation") or {}, (facts.get("data") or {}).get("yardsticks") or {}
    if not trained or "reason" in trained:
        reason = why_missing(
            facts, "generalisation", trained.get("reason", "this study did not look at its training examples")
        )
        return Finding(code=CODE, clause=CLAUSE, status="not_measured", summary=reason)
    models = [
        trained[name]["train"] for name in ("last", "selected") if trained[name]["train"].get("score") is not None
    ]
    other = any(m["classes"] is None for m in models) != (sticks.get("classes") is None)
    if "score" not in sticks or not models or other or not (sticks["classes"] is None or classifies(facts)):
        said = "Does not apply: no linear model can be held against the trained one by accuracy or correlation."
        return Finding(code=CODE, clause=CLAUSE, status="ok", summary=said)
    name = max(sticks["score"], key=lambda each: float(sticks["score"][each]))
    theirs, model = float(sticks["score"][name]), max(models, key=_size)
    ours, what = _size(model), "correlation" if sticks["classes"] is None else "accuracy"
    se = math.sqrt(max(ours * (1 - ours), 1 / model["examples"]) / model["examples"])
    needed = sticks["chance"] + least * (theirs - sticks["chance"])
    who = {"linear": "a linear model", "neighbours": "nearest neighbours"}[name]
    said = f"{what} {ours:.2g} on {model['examples']:,} training examples, {theirs:.2g} of {who} on rows left out of its fit"
    numbers: dict[str, Any] = {
        "value": ours, "unit": what, "threshold": needed, "clause": CLAUSE,
        "evidence": {"trained": dict(model), "yardsticks": sticks["score"], "chance": sticks["chance"]},
    }  # fmt: skip
    if theirs - sticks["chance"] < skill or ours + ses * se >= needed:
        return Finding(code=CODE, status="ok", summary=f"The trained model holds its own: {said}.", **numbers)
    far = ours + ses * se < sticks["chance"] + broken * (theirs - sticks["chance"])
    return Finding(
        code=CODE, status="fail" if far else "warn", summary=f"The trained model is {'far ' if far else ''}behind {who}: {said}.",
        advice=(
            "Something keeps this model from what the inputs tell: look for dropout that drops what it should keep (p is the share that is "
            "dropped), a bottleneck, inputs that are transformed on their way, and weight decay.",
            "Overfit a few examples first; add layers one at a time to a model that works.",
        ), **numbers,
    )  # fmt: skip


def _size(model: Mapping[str, Any]) -> float:
    """Return accuracy, or correlation without its sign: the output may be a distance, or a score that is better where it is low."""
    return abs(float(model["score"]))
