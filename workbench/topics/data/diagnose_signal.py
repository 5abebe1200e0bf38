"""`data.no_signal`, and labels that are partly wrong: what yardsticks, and the trained model, can tell of the targets (F1.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from workbench.findings.diagnosis import Finding, Status
from workbench.topics.data.diagnose_order import data_finding

__all__ = ["no_signal", "wrong_labels"]

Facts = Mapping[str, Any]
_FEWEST_CLASSES = 5
"""With fewer, classes that overlap have as even a tail as wrong labels."""


def no_signal(
    facts: Facts, trained: Facts | None, *, chance: float = 0.05, neighbour_z: float = 8.0, few_rows: int = 100
) -> Finding:
    """Judge whether the targets depend on the inputs at all; only a training that finds nothing either makes it an alarm.

    Args:
        facts: of the data.
        trained: what the baseline found ("generalisation"); None where nothing was trained.
        chance: of finding as much where there is nothing, over all tests.
        neighbour_z: deviations of chance by which the target of the next row is found instead.
        few_rows: on which finding nothing says nothing (rule of thumb).
    """
    found = facts.get("yardsticks") or {"reason": "they were not fitted"}
    if found.get("constant"):
        return data_finding(
            "no_signal", "fail", f"The inputs are the same in all {found['rows']:,} examples that were read: nothing can be told from them.",
            advice=("Look at one example as the model gets it: an empty picture, a transform that clips, a column that was not filled.",),
        )  # fmt: skip
    if "reason" in found:
        return data_finding("no_signal", "ok", f"Does not apply: {found['reason']}.")
    z, limit = max(found["z"].values()), float(stats.norm.isf(chance / found["tests"]))
    numbers: dict[str, Any] = {"value": z, "unit": "deviations of chance", "threshold": limit, "evidence": dict(found)}
    beside = {name: found.get(name) for name in ("next", "before") if found.get(name) is not None}
    misplaced = max(beside, key=lambda name: float(beside[name] or 0.0), default=None)
    if z < limit and misplaced is not None and float(beside[misplaced] or 0.0) >= neighbour_z:
        row = "after" if misplaced == "next" else "before"
        return data_finding(
            "no_signal", "fail", f"An example says nothing of its own target, and much of that of the row {row} it: inputs and targets are shifted by a row.",
            advice=("Pair each input with its own target: look for a header, a dropped row, or a lag that was applied to one of the two.",), **numbers,
        )  # fmt: skip
    what = "accuracy" if found["classes"] else "correlation"
    said = f"{what} {found['score']['linear']:.2g} of a linear model and {found['score']['neighbours']:.2g} of nearest neighbours on rows left out, {found['chance']:.2g} by chance"
    if z >= limit:
        return data_finding("no_signal", "ok", f"The targets can be told from the inputs: {said}.", **numbers)
    nothing = f"Neither a linear model nor nearest neighbours can tell the targets from the inputs ({said})"
    if found["rows"] < few_rows:
        return data_finding(
            "no_signal", "ok", f"{nothing}; {found['rows']} examples are too few to say more.", **numbers
        )
    status, why = _trained(trained or {})
    advice = (
        "Look at some examples with their targets: are they shuffled, or joined by the wrong key?",
        "Fit a simple model to the inputs by hand, before a network is tuned.",
    )
    return data_finding("no_signal", status, f"{nothing}{why}.", advice=() if status == "ok" else advice, **numbers)


def _trained(found: Facts) -> tuple[Status, str]:
    """Return what the trained model adds to yardsticks that find nothing."""
    at = [_at_chance((found.get(name) or {}).get("validation") or {}, found) for name in ("last", "selected")]
    if None in at:
        return "ok", "; a trained model may"
    if not all(at):
        return "ok", ", but the trained model can, on validation"
    if _at_chance(found["last"]["train"], {}) is False:
        return "fail", ", and the trained model knows its training examples by heart and nothing of validation: the targets do not depend on the inputs"  # fmt: skip
    return "warn", ", nor does the trained model on validation"


def _at_chance(found: Facts, trained: Facts, *, alpha: float = 1e-3) -> bool | None:
    """Return whether a model does no better than a constant; None where that cannot be told.

    Args:
        found: what it does on one split.
        trained: "constant" is the loss of the best constant there.
        alpha: chance of doing as well by chance.
    """
    score, examples = found.get("score"), found.get("examples", 0)
    if score is not None and examples:
        if found["classes"] is None:
            return bool(score * np.sqrt(examples) < stats.norm.isf(alpha))
        return bool(stats.binom.sf(round(score * examples) - 1, examples, max(found["chance"], 1 / found["classes"])) > alpha)  # fmt: skip
    constant = trained.get("constant")
    if constant is None or found.get("loss") is None:
        return None
    return bool(found["loss"] > constant - 3 * found["se"])


def wrong_labels(facts: Facts, *, share: float = 0.1, even: float = 0.5, fewest: int = 20) -> dict[str, float] | None:
    """Return what share of the labels is wrong at random; None where they do not look so.

    Examples that are hard to tell apart have labels among the few classes that come into question. Labels that are wrong at random fall
    on all others alike, those that come into question last as well: where the ranks that the yardsticks give to the labels
    have such an even tail behind a first place that is mostly right.

    Args:
        facts: of the data.
        share: of wrong labels, from which on it matters (rule of thumb).
        even: the lower half of the ranks below the first, over the upper half; 1 is even (rule of thumb).
        fewest: labels in the lower half.
    """
    ranks = (facts.get("yardsticks") or {}).get("ranks")
    if not ranks or len(ranks) < _FEWEST_CLASSES:
        return None
    counts = np.array(ranks, dtype=np.float64)
    half = (len(counts) - 1) // 2
    upper, lower = counts[1 : len(counts) - half], counts[len(counts) - half :]
    wrong = float(lower.mean()) * (len(counts) - 1) / counts.sum()
    if wrong < share or lower.sum() < fewest or counts[0] < counts.sum() / 2 or lower.mean() < even * upper.mean():
        return None
    return {"share": float(wrong), "right": float(counts[0] / counts.sum())}
