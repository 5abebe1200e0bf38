"""`data.train_validation_shift` and `data.label_shift`: is validation like training, in its inputs and in its targets (P3.2)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.findings.diagnosis import Finding, Status
from workbench.topics.data.diagnose_order import data_finding
from workbench.topics.generalisation.diagnose import HARM, Gap

__all__ = ["label_shift", "train_validation_shift"]

Facts = Mapping[str, Any]

_SPLIT = "validation"
FAR = 0.8
"""Kolmogorov-Smirnov distance of distributions with next to nothing in common: other units, another normalisation."""
_FEWEST = 20
"""Rows of either split for that, however they depend on each other (rule of thumb)."""
_COPIED = 0.5
"""Share of training rows that are copies, from which on a yardstick knows a row that was left out by its copy (rule of thumb)."""
_UNSEEN, _LACKING = 0.05, 0.25
"""Shares of validation in classes that are never trained on, and of training in classes that validation lacks (rule of thumb)."""
_CERTAIN, _LIKE = 3.0, 0.5
"""Standard errors below 0, and share of the correlation within training, from which on predictions have the wrong sign (rule of thumb)."""
_CHANCE, _MOVED = 1e-4, 0.15
"""Chance and distance of inputs that differ enough to make a model extrapolate (rule of thumb)."""
_SAME_CONSTANTS = "Prepare both splits by the same code and with the same constants, taken from the training split."


def train_validation_shift(facts: Facts, gap: Gap | None, *, alpha: float, small: float, large: float) -> Finding:
    """Judge whether the inputs of validation are distributed as those of training; what harms no metric is no alarm.

    Args:
        facts: of the data.
        gap: between training and validation of the baseline; None where none was trained, or it learned nothing.
        alpha: chance of a difference as large in any of the features.
        small: distance from which on a gap is put down to it.
        large: distance from which on it is an alarm where no gap was measured.
    """
    found = facts.get("shift", {}).get(_SPLIT)
    if found is None:
        return data_finding("train_validation_shift", "not_measured", "Not measured: there is no validation split to compare with.")  # fmt: skip
    inputs = found["inputs"]
    worst = None if "reason" in inputs else _worst(inputs, alpha)
    far = worst is not None and worst["distance"] >= large
    if not far and _relation(facts) == "inputs" and (gap is None or gap.share >= 0.5):
        return data_finding(
            "train_validation_shift", "fail", f"What a simple model learns from training does not hold on validation, though validation "
            f"can be learned by itself ({_scores(facts)}): inputs are prepared in another way, such as other columns or channels.",
            evidence=inputs, advice=(_SAME_CONSTANTS,),
        )  # fmt: skip
    if "reason" in inputs:
        return data_finding("train_validation_shift", "ok", f"Does not apply: {inputs['reason']}.", evidence=inputs)
    status, why = _status(worst, gap, small=small, large=large)
    return _judged("train_validation_shift", inputs, worst, status, why, threshold=small, what="inputs")


def label_shift(facts: Facts, gap: Gap | None, *, alpha: float, small: float, large: float) -> Finding:
    """Judge whether the targets of validation are distributed, and numbered, as those of training.

    Args:
        facts: of the data.
        gap: as in `train_validation_shift`.
        alpha: chance of a difference as large.
        small: distance from which on a gap is put down to it: of shares, or Kolmogorov and Smirnov's.
        large: distance from which on it is an alarm where no gap was measured.
    """
    found = facts.get("shift", {}).get(_SPLIT)
    if found is None:
        return data_finding("label_shift", "not_measured", "Not measured: there is no validation split to compare with.")  # fmt: skip
    targets = found["targets"]
    renumbered = None if _lost(targets) else _renumbered(facts, gap)
    if renumbered is not None:
        return data_finding(
            "label_shift", "fail", f"Validation numbers its classes in another way: {renumbered[0]:.0%} of the predictions are right "
            f"as they are, {renumbered[1]:.0%} with classes matched anew.", evidence=dict(targets),
            advice=("Number the classes once, for all splits: an offset of one, or a mapping by the order in which they are met, differs between splits.",),
        )  # fmt: skip
    relation = _relation(facts) if gap is None or gap.share >= 0.5 else None
    if relation == "sign":
        return data_finding(
            "label_shift", "fail", f"Predictions have the wrong sign on validation: what a simple model learns from training has correlation "
            f"{max(facts['yardsticks']['score'].values()):.2g} with the targets there, and {facts['yardsticks']['carried']['score']:.2g} with those of "
            "validation: its targets are negated, or all of its inputs.", evidence=dict(targets),
            advice=("Prepare the targets of both splits by the same code: is one split a gain, and the other a cost?",),
        )  # fmt: skip
    if relation == "targets":
        return data_finding(
            "label_shift", "fail", f"Training can be learned by a simple model, validation cannot, not even from its own examples "
            f"({_scores(facts)}): its targets do not belong to its inputs.", evidence=dict(targets),
            advice=("Look at some validation examples with their targets: is one of the two shuffled, or shifted by a row?",),
        )  # fmt: skip
    if "reason" in targets:
        return data_finding("label_shift", "ok", f"Does not apply: {targets['reason']}.", evidence=targets)
    if targets["kind"] == "numbers":
        worst = _worst(targets, alpha)
        status, why = _status(worst, gap, small=small, large=large)
        return _judged("label_shift", targets, worst, status, why, threshold=small, what="targets")
    return _classes(targets, gap, alpha=alpha, small=small, large=large)


def _classes(targets: Facts, gap: Gap | None, *, alpha: float, small: float, large: float) -> Finding:
    distance, p, missing = targets["distance"], targets["p"], targets["missing"]
    numbers: dict[str, Any] = {"value": distance, "unit": "share", "threshold": small, "evidence": dict(targets)}
    said = f"The shares of classes differ by {distance:.1%} between training and validation (p = {p:.2g})"
    unseen, lacking = missing["train"]["share"], missing["other"]["share"]
    lost = _lost(targets)
    if p >= alpha or (distance < small and not lost):
        return data_finding("label_shift", "ok", f"{said}.", **numbers)
    advice = ("Split at random, or stratified by class: data sorted by class or by time must not be cut in two.",)
    if lost:
        name, share, of = ("train", unseen, "validation") if unseen >= _UNSEEN else ("other", lacking, "training")
        classes = ", ".join(str(c) for c in missing[name]["classes"][:8])
        lacks = f"{'training' if name == 'train' else 'validation'} has none of class {classes}, which {share:.0%} of {of} are of"
        return data_finding("label_shift", "fail", f"{said}: {lacks}.", advice=advice, **numbers)
    scarce = _scarce(targets)
    if scarce is not None and not (gap is not None and gap.harmful):
        name, found, expected = scarce
        tells = f"validation has {found} examples of class {name}, where its share in training makes {expected:.0f}: how well that is learned is not seen"
        return data_finding("label_shift", "warn", f"{said}: {tells}.", advice=advice, **numbers)
    if gap is not None and not gap.harmful:
        if distance >= large and gap.share >= HARM:
            return data_finding("label_shift", "warn", f"{said}; {_uncertain(gap)}.", advice=advice, **numbers)
        return data_finding("label_shift", "ok", f"{said}; {gap.said}.", **numbers)
    if distance < large and gap is None:
        return data_finding("label_shift", "ok", f"{said}.", **numbers)
    status: Status = "fail" if gap is not None and distance >= large else "warn"
    return data_finding("label_shift", status, f"{said}{f'; {gap.said}' if gap else ''}.", advice=advice, **numbers)


def _lost(targets: Facts) -> bool:
    """Tell whether one split lacks classes that are a part of the other."""
    missing = targets.get("missing")
    return missing is not None and (missing["train"]["share"] >= _UNSEEN or missing["other"]["share"] >= _LACKING)


def _scarce(targets: Facts, *, few: int = 10, expected: int = 20) -> tuple[str, int, float] | None:
    """Return the class with fewer validation examples than can judge it, though its share in training makes enough; None where there is none.

    Args:
        targets: shares of classes in both splits.
        few: examples (rule of thumb).
        expected: examples that a random split would have, from which on that is no matter of a small split (rule of thumb).
    """
    train, other = targets["rows"]
    known = ((name, theirs, ours / train * other) for name, (ours, theirs) in targets["counts"].items())
    return max((c for c in known if c[1] < few and c[2] >= expected), key=lambda c: c[2], default=None)


def _worst(tested: Facts, alpha: float) -> Facts | None:
    """Return the largest difference that is beyond chance."""
    count, farthest = tested["tests"], tested["farthest"]
    beyond = [test for test in tested["worst"] if test["p"] * count < alpha]
    if farthest["distance"] >= FAR and farthest["p_rows"] * count < alpha and min(tested["rows"]) >= _FEWEST:
        beyond.append(farthest)
    return max(beyond, key=lambda test: (float(test["distance"]), test["train"][1] or 0.0), default=None)


def _status(worst: Facts | None, gap: Gap | None, *, small: float, large: float) -> tuple[Status, str]:
    distance = 0.0 if worst is None else float(worst["distance"])
    if distance < small:
        return "ok", ""
    if gap is None:
        return ("fail" if distance >= FAR else "warn" if distance >= large else "ok"), ""
    if gap.harmful:
        return ("fail" if distance >= large else "warn"), f"; {gap.said}"
    if distance >= large and gap.share >= HARM:
        return "warn", f"; {_uncertain(gap)}"
    return "ok", f"; {gap.said}"


def _uncertain(gap: Gap) -> str:
    return f"{gap.share:.0%} of what was learned does not hold on validation, by {gap.z:.1f} standard errors"


def _judged(
    name: str, tested: Facts, worst: Facts | None, status: Status, why: str, *, threshold: float, what: str
) -> Finding:
    evidence = {**tested, "split": _SPLIT}
    if worst is None:
        some = f"{tested['tests']:,} features" if tested["tests"] > 1 else what
        return data_finding(name, "ok", f"Validation and training do not differ beyond chance ({some} compared).", evidence=evidence)  # fmt: skip
    numbers: dict[str, Any] = {"value": float(worst["distance"]), "unit": "distance", "threshold": threshold, "evidence": evidence}  # fmt: skip
    (mean, sd), (other_mean, other_sd) = ([math.nan if v is None else v for v in worst[s]] for s in ("train", "other"))
    said = (
        f"{worst['name'][0].upper()}{worst['name'][1:]} is {mean:.3g} +- {sd:.2g} in training and {other_mean:.3g} +- "
        f"{other_sd:.2g} in validation (distance {worst['distance']:.2f} of 1){why}"
    )
    split = "Split at random where examples are independent; where time or source divides them, expect the gap and measure it."
    advice = () if status == "ok" else (_SAME_CONSTANTS, split)
    return data_finding(name, status, f"{said}.", advice=advice, **numbers)


def _renumbered(facts: Facts, gap: Gap | None) -> tuple[float, float] | None:
    """Return how many predictions on validation are right, and how many with classes matched anew, where that is far more."""
    found = facts.get("yardsticks") or {}
    carried = found.get("carried") or {}
    seen = [(carried.get("score"), carried.get("renumbered"), carried.get("rows", 0), max((found.get("score") or {"": 0.0}).values()))]  # fmt: skip
    if gap is not None:
        seen.append((gap.score, gap.renumbered, gap.examples, gap.train_score))
    for score, anew, rows, trained in seen:
        if score is None or anew is None or trained is None or rows < _FEWEST:
            continue
        if anew >= max(0.6, 0.85 * trained) and anew - score >= 0.4:
            return float(score), float(anew)
    return None


def _relation(facts: Facts) -> str | None:
    """Return what is wrong where what holds in training does not on validation: "inputs", "targets", their "sign", or None."""
    found = facts.get("yardsticks") or {}
    carried, own = found.get("carried"), found.get("own")
    if not carried or own is None or "reason" in own or max(found["z"].values()) < 10:
        return None
    overlap = facts.get("overlap") or {}
    if overlap.get("train_duplicates", 0) >= _COPIED * max(overlap.get("train_rows", 0), 1):
        return None
    learned = max(found["score"].values())
    rows = carried["rows"]
    spread = math.sqrt(max(learned * (1 - learned), 0.25 / rows) / rows) if found["classes"] else 1 / math.sqrt(rows)
    if learned - carried["score"] < 6 * spread:
        return None
    targets = facts["shift"][_SPLIT]["targets"]
    if _renumbered(facts, None) is not None:
        return None
    if targets.get("kind") == "classes" and targets["distance"] >= 0.15:  # that alone moves an accuracy
        return None
    if not found["classes"] and carried["score"] < -max(_CERTAIN * spread, _LIKE * learned):
        inputs = facts["shift"][_SPLIT]["inputs"]
        moved = None if "reason" in inputs else _worst(inputs, _CHANCE)
        if moved is None or moved["distance"] < _MOVED:
            return "sign"
    z = max(own["z"].values())
    return "inputs" if z >= 6 else "targets" if z < 3 and own["rows"] >= 100 else None


def _scores(facts: Facts) -> str:
    found = facts["yardsticks"]
    what = "accuracy" if found["classes"] else "correlation"
    return f"{what} {max(found['score'].values()):.2g} within training, {found['carried']['score']:.2g} carried over, {max(found['own']['score'].values()):.2g} within validation"
