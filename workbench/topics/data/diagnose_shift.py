"""`data.train_validation_shift`, `.label_shift`, `.no_signal`: are the splits alike, do targets belong to their inputs (P3.2, F1.1)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from workbench.findings.finding import Finding, Status
from workbench.topics.data.diagnose_rows import CODES
from workbench.topics.evaluation.diagnose_generalisation import HARM, Gap

Facts = Mapping[str, Any]

_SPLIT = "validation"
FAR = 0.8  # Kolmogorov-Smirnov distance of distributions with next to nothing in common: other units, another normalisation
_FEWEST = 20  # rows of either split for that, however they depend on each other (rule of thumb)
_COPIED = 0.5  # share of training rows that are copies, from which on a yardstick knows a left-out row by its copy (rule of thumb)
_UNSEEN, _LACKING = 0.05, 0.25
"""Shares of validation in classes that are never trained on, and of training in classes that validation lacks (rule of thumb)."""
_CERTAIN, _LIKE = 3.0, 0.5
"""Standard errors below 0, and share of the correlation within training, from which on predictions have the wrong sign (rule of thumb)."""
# chance and distance of inputs that differ enough to make a model extrapolate (rule of thumb)
_CHANCE, _MOVED = 1e-4, 0.15
_CLEAR_Z = 6.0
"""Deviations of chance by which the targets of validation can be told from their inputs (as in `_relation`)."""
_SAME_CONSTANTS = "Prepare both splits by the same code and with the same constants, taken from the training split."


def train_validation_shift(facts: Facts, gap: Gap | None, *, alpha: float, small: float, large: float) -> Finding:
    """Judge whether the inputs of validation are distributed as those of training; what harms no metric is no alarm.

    Args:
        alpha: chance of a difference as large in any of the features.
        small: distance from which on a gap is put down to it.
        large: distance from which on it is an alarm where no gap was measured.
    """
    code, found = "data.train_validation_shift", facts.get("shift", {}).get(_SPLIT)
    if found is None:
        return CODES.not_measured(code, "there is no validation split to compare with")
    inputs = found["inputs"]
    worst = None if "reason" in inputs else _worst(inputs, alpha)
    far = worst is not None and worst["distance"] >= large
    if not far and _relation(facts) == "inputs" and (gap is None or gap.share >= 0.5):
        return CODES.finding(
            code, "fail", f"What a simple model learns from training does not hold on validation, though validation "
            f"can be learned by itself ({_scores(facts)}): inputs are prepared differently, such as other columns or channels.",
            evidence=inputs, advice=(_SAME_CONSTANTS,),
        )  # fmt: skip
    if "reason" in inputs:
        return CODES.finding(code, "ok", f"Does not apply: {inputs['reason']}.", evidence=inputs)
    return _number_shift(code, inputs, worst, gap, small=small, large=large, what="inputs")


def label_shift(facts: Facts, gap: Gap | None, *, alpha: float, small: float, large: float) -> Finding:
    """Judge whether the targets of validation are distributed, and numbered, as those of training; arguments as in `train_validation_shift`."""
    code, found = "data.label_shift", facts.get("shift", {}).get(_SPLIT)
    if found is None:
        return CODES.not_measured(code, "there is no validation split to compare with")
    targets, said, fix = found["targets"], "", ""
    renumbered = None if _lost(targets) else _renumbered(facts, gap)
    relation = _relation(facts) if gap is None or gap.share >= 0.5 else None
    if renumbered is not None:
        said = f"Validation numbers its classes differently: {renumbered[0]:.0%} of the predictions are right as they are, {renumbered[1]:.0%} with classes matched anew."
        fix = "Number the classes once, for all splits: an offset of one, or a mapping by the order in which they are met, differs between splits."
    elif relation == "sign":
        sticks = facts["yardsticks"]
        said = (
            f"Predictions have the wrong sign on validation: what a simple model learns from training has correlation {max(sticks['score'].values()):.2g} "
            f"with the targets there, and {sticks['carried']['score']:.2g} with those of validation: its targets are negated, or all of its inputs."
        )
        fix = "Prepare the targets of both splits by the same code: is one split a gain, and the other a cost?"
    elif relation == "targets":
        said = f"Training can be learned by a simple model, validation cannot, not even from its own examples ({_scores(facts)}): its targets do not belong to its inputs."
        fix = "Look at some validation examples with their targets: is one of the two shuffled, or shifted by a row?"
    if said:
        return CODES.finding(code, "fail", said, evidence=dict(targets), advice=(fix,))
    if "reason" in targets:
        return CODES.finding(code, "ok", f"Does not apply: {targets['reason']}.", evidence=targets)
    if targets["kind"] == "numbers":
        return _number_shift(code, targets, _worst(targets, alpha), gap, small=small, large=large, what="targets")
    return _class_shift(code, targets, gap, alpha=alpha, small=small, large=large)


def _class_shift(code: str, targets: Facts, gap: Gap | None, *, alpha: float, small: float, large: float) -> Finding:
    distance, p, missing = targets["distance"], targets["p"], targets["missing"]
    said = f"The shares of classes differ by {distance:.1%} between training and validation (p = {p:.2g})"
    lost, scarce, why = _lost(targets), _scarce(targets), ""
    status: Status = "ok"
    if p < alpha and lost:
        name, of, where, lacks = ("train", "validation", "training", missing["train"])
        if missing["train"]["share"] < _UNSEEN:
            name, of, where, lacks = ("other", "training", "validation", missing["other"])
        status = "fail"
        why = f": {where} has none of class {', '.join(map(str, lacks['classes'][:8]))}, which {lacks['share']:.0%} of {of} are of"
    elif p < alpha and distance >= small:
        if scarce is not None and not (gap is not None and gap.harmful):
            name, found, expected = scarce
            status = "warn"
            why = f": validation has {found} examples of class {name}, where its share in training makes {expected:.0f}: how well that is learned is not seen"
        else:
            status, why = _status(distance, gap, small=small, large=large)
            status = "warn" if gap is None and status == "fail" else status
    advice = ("Split at random, or stratified by class: data sorted by class or by time must not be cut in two.",)
    return CODES.finding(
        code, status, f"{said}{why}.", advice=() if status == "ok" else advice, value=distance, unit="share", threshold=small, evidence=dict(targets)
    )  # fmt: skip


def _lost(targets: Facts) -> bool:
    """Tell whether one split lacks classes that are a part of the other."""
    missing = targets.get("missing")
    return missing is not None and (missing["train"]["share"] >= _UNSEEN or missing["other"]["share"] >= _LACKING)


def _scarce(targets: Facts, *, few: int = 10, expected: int = 20) -> tuple[str, int, float] | None:
    """Return the class with fewer validation examples than can judge it, though its share in training makes enough, with both numbers (rules of thumb)."""
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


def _status(distance: float, gap: Gap | None, *, small: float, large: float) -> tuple[Status, str]:
    """Return how bad a distance between the splits is, by what the trained model lost on validation, and that in words."""
    if distance < small:
        return "ok", ""
    if gap is None:
        return ("fail" if distance >= FAR else "warn" if distance >= large else "ok"), ""
    if gap.harmful:
        return ("fail" if distance >= large else "warn"), f"; {gap.said}"
    if distance >= large and gap.share >= HARM:
        said = f"; {gap.share:.0%} of what was learned does not hold on validation, by {gap.z:.1f} standard errors"
        return "warn", said
    return "ok", f"; {gap.said}"


def _number_shift(
    code: str, tested: Facts, worst: Facts | None, gap: Gap | None, *, small: float, large: float, what: str
) -> Finding:
    evidence = {**tested, "split": _SPLIT}
    if worst is None:
        some = f"{tested['tests']:,} features" if tested["tests"] > 1 else what
        return CODES.finding(code, "ok", f"Validation and training do not differ beyond chance ({some} compared).", evidence=evidence)  # fmt: skip
    distance = float(worst["distance"])
    status, why = _status(distance, gap, small=small, large=large)
    (mean, sd), (other_mean, other_sd) = ([math.nan if v is None else v for v in worst[s]] for s in ("train", "other"))
    numbers = f"is {mean:.3g} +- {sd:.2g} in training and {other_mean:.3g} +- {other_sd:.2g} in validation"
    differs = "differs between training and validation" if math.isnan(mean) else numbers
    said = f"{worst['name'][0].upper()}{worst['name'][1:]} {differs} (distance {distance:.2f} of 1){why}."
    split = "Split at random where examples are independent; where time or source divides them, expect the gap and measure it."
    advice = () if status == "ok" else (_SAME_CONSTANTS, split)
    return CODES.finding(code, status, said, advice=advice, value=distance, unit="distance", threshold=small, evidence=evidence)  # fmt: skip


def _renumbered(facts: Facts, gap: Gap | None) -> tuple[float, float] | None:
    """Return how many predictions on validation are right, and how many with classes matched anew, where that is far more."""
    found = facts.get("yardsticks") or {}
    carried, own = found.get("carried") or {}, found.get("score") or {"": 0.0}
    seen = [(carried.get("score"), carried.get("renumbered"), carried.get("rows", 0), max(own.values()))]
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
    overlap, learned, rows = facts.get("overlap") or {}, max(found["score"].values()), carried["rows"]
    copied = overlap.get("train_duplicates", 0) >= _COPIED * max(overlap.get("train_rows", 0), 1)
    spread = math.sqrt(max(learned * (1 - learned), 0.25 / rows) / rows) if found["classes"] else 1 / math.sqrt(rows)
    if copied or learned - carried["score"] < 6 * spread or _renumbered(facts, None) is not None:
        return None
    inputs, targets = (facts["shift"][_SPLIT][kind] for kind in ("inputs", "targets"))
    if targets.get("kind") == "classes" and targets["distance"] >= 0.15:  # that alone moves an accuracy
        return None
    if not found["classes"] and carried["score"] < -max(_CERTAIN * spread, _LIKE * learned):
        moved = None if "reason" in inputs else _worst(inputs, _CHANCE)
        if moved is None or moved["distance"] < _MOVED:
            return "sign"
    z = max(own["z"].values())
    return "inputs" if z >= 6 else "targets" if z < 3 and own["rows"] >= 100 else None


def _scores(facts: Facts) -> str:
    found = facts["yardsticks"]
    what = "accuracy" if found["classes"] else "correlation"
    return f"{what} {max(found['score'].values()):.2g} within training, {found['carried']['score']:.2g} carried over, {max(found['own']['score'].values()):.2g} within validation"


def no_signal(
    facts: Facts, trained: Facts | None, *, chance: float = 0.05, neighbour_z: float = 8.0, few_rows: int = 100
) -> Finding:
    """Judge whether the targets depend on the inputs at all; only a training that finds nothing either makes it an alarm.

    Args:
        chance: of finding as much where there is nothing, over all tests.
        neighbour_z: deviations of chance by which the target of the next row is found instead.
        few_rows: on which finding nothing says nothing (rule of thumb).
    """
    found, code = facts.get("yardsticks") or {"reason": "they were not fitted"}, "data.no_signal"
    if found.get("constant"):
        return CODES.finding(
            code, "fail", f"The inputs are the same in all {found['rows']:,} examples that were read: nothing can be learned from them.",
            advice=("Look at one example as the model gets it: an empty picture, a transform that clips, a column that was not filled.",),
        )  # fmt: skip
    if "reason" in found:
        return CODES.finding(code, "ok", f"Does not apply: {found['reason']}.")
    z, limit = max(found["z"].values()), float(stats.norm.isf(chance / found["tests"]))
    say = partial(CODES.finding, code, value=z, unit="deviations of chance", threshold=limit, evidence=dict(found))
    beside = {row: float(found.get(name) or 0.0) for name, row in (("next", "after"), ("before", "before"))}
    row = max(beside, key=lambda name: beside[name])
    if z < limit and beside[row] >= neighbour_z:
        return say(
            "fail", f"Inputs do not predict their own target, but that of the row {row} it: inputs and targets are shifted by a row.",
            advice=("Pair each input with its own target: look for a header, a dropped row, or a lag that was applied to one of the two.",),
        )  # fmt: skip
    what = "accuracy" if found["classes"] else "correlation"
    said = f"{what} {found['score']['linear']:.2g} of a linear model and {found['score']['neighbours']:.2g} of nearest neighbours on rows left out, {found['chance']:.2g} by chance"
    if z >= limit:
        return say("ok", f"The targets can be predicted from the inputs: {said}.")
    if found["rows"] < few_rows:
        return say("ok", f"{found['rows']} examples are too few to tell whether inputs predict targets: {said}.")
    nothing = f"Neither a linear model nor nearest neighbours can predict the targets from {'the largest of the' if found.get('beside') else 'the'} inputs ({said})"
    own = found.get("own") or {}
    if "z" in own and own["rows"] >= few_rows and max(own["z"].values()) >= _CLEAR_Z:
        return say(
            "fail", f"{nothing}, though those of validation can be ({what} {max(own['score'].values()):.2g}): the targets of training do not belong to their inputs, or too many of them are wrong.",
            advice=("Look at how inputs and targets of training are put together: is one of the two shuffled or joined by the wrong key, or are many labels wrong?",),
        )  # fmt: skip
    status, why = _trained(trained or {})
    if status == "ok":
        return say("ok", f"{why}: {said}.")
    advice = (
        "Look at some examples with their targets: are they shuffled, or joined by the wrong key?",
        "Fit a simple model to the inputs by hand, before a network is tuned.",
    )
    return say(status, f"{nothing}{why}.", advice=advice)


def _trained(found: Facts) -> tuple[Status, str]:
    """Return what the trained model adds to yardsticks that find nothing."""
    at = [_at_chance((found.get(name) or {}).get("validation") or {}, found) for name in ("last", "selected")]
    if None in at:
        start = _at_chance((found.get("last") or {}).get("train") or {}, found)
        if start:
            return "warn", ", nor has the training learned anything"
        return "ok", "Simple models do not tell whether inputs predict targets, a trained one may"
    if not all(at):
        return "ok", "The trained model predicts the targets of validation, where simple models do not"
    if _at_chance(found["last"]["train"], found) is False:
        return "fail", ", and the trained model has memorised its training examples and fails on validation: the targets do not depend on the inputs"  # fmt: skip
    return "warn", ", nor does the trained model on validation"


def _at_chance(found: Facts, trained: Facts, *, alpha: float = 1e-3) -> bool | None:
    """Return whether a model does no better than a constant, or than chance allows at `alpha`; None where that cannot be told."""
    score, examples = found.get("score"), found.get("examples", 0)
    if score is not None and examples:
        if found["classes"] is None:
            return bool(score * np.sqrt(examples) < stats.norm.isf(alpha))
        return bool(stats.binom.sf(round(score * examples) - 1, examples, max(found["chance"], 1 / found["classes"])) > alpha)  # fmt: skip
    constant = trained.get("constant")
    if constant is None or found.get("loss") is None:
        return None
    return bool(found["loss"] > constant - 3 * found["se"])
