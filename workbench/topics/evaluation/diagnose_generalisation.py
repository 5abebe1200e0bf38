"""`evaluation.generalisation_gap` and `.underfits`: how much of what was learned holds on validation, and was it as much as could be?"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from workbench.curves.instability import chance_loss, ignorance
from workbench.curves.judged import judged
from workbench.curves.selection import FEWEST_TO_SEE_NOISE, selected_rows, wobble
from workbench.curves.sweep import mean_and_error
from workbench.curves.trial_curves import RecordLike
from workbench.findings.audited import Audited, why_missing
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Status

CODES = Codes({"evaluation.generalisation_gap": "P3.2", "evaluation.underfits": "P3.2"})
_GAP, _FIT = CODES
HARM = 0.1
"""Share of what was learned that does not hold on validation, from which on a difference between the splits is put down to it."""
_SURE = 3.0  # standard errors
_LEAST = 0.1  # of the initial loss, that has to be learned for a gap to mean anything (rule of thumb)


class Gap(NamedTuple):
    """Validation minus training loss of one model in evaluation mode."""

    share: float  # of what training learned that does not hold on validation
    z: float  # the gap in its standard errors
    train: float  # loss
    validation: float  # loss
    train_score: float | None  # accuracy on training examples; None where examples have no classes
    score: float | None  # the same on validation
    renumbered: float | None  # accuracy on validation if classes are matched anew
    examples: int  # of validation

    @property
    def harmful(self) -> bool:
        """Whether a part of what was learned is lost on validation."""
        return self.share >= HARM and self.z >= _SURE

    @property
    def said(self) -> str:
        """The two losses in words."""
        worse = "worse on" if self.harmful else "as good on"
        return f"the trained model is {worse} validation (loss {self.validation:.3g}, on training examples {self.train:.3g})"


def gap_of(facts: Mapping[str, Any], *, at: str = "last") -> Gap | None:
    """Return the gap of the baseline "at" its last or selected checkpoint; None where none was trained, or it learned nothing to lose."""
    found, start = (facts.get("generalisation") or {}).get(at), _start(facts)
    if not found or start is None:
        return None
    train, held = found["train"], found["validation"]
    if not _finite(train["loss"]) or not _finite(train["se"]):
        return None
    learned = start - train["loss"]
    if learned <= max(4 * train["se"], _LEAST * abs(start)):
        return None
    gap = held["loss"] - train["loss"] if _finite(held["loss"]) else math.inf
    se = math.hypot(train["se"], held["se"]) if _finite(held["se"]) else 0.0
    scored = held.get("classes") is not None and classifies(facts)
    return Gap(
        share=gap / learned, z=gap / se if se > 0 else math.copysign(math.inf, gap), train=train["loss"], validation=train["loss"] + gap,
        train_score=train["score"] if scored else None, score=held["score"] if scored else None,
        renumbered=held["renumbered"] if scored else None, examples=held["examples"],
    )  # fmt: skip


def diagnose_generalisation_gap(
    record: Audited,
    *,
    broken: float = 0.25,
    rise: float = 0.25,
    lost: float = 0.5,
    carried: float = 0.1,
    hidden: float = 0.5,
) -> Diagnosis:
    """Say how far validation is from training in evaluation mode, and whether a mode itself or overfitting makes the gap.

    Args:
        broken: of what was learned in training mode, the share that evaluation mode may lose on training examples (rule of thumb).
        rise: of what was learned, the share by which the validation loss may rise from its best to its last (rule of thumb).
        lost: share of what was learned that does not hold on validation at the end, from which on such a rise is overfitting (rule
            of thumb).
        carried: share of what was learned that has to hold on validation at its best, for training to mean anything (rule of thumb).
        hidden: share of what was learned that training mode may hide on training examples; dropout of one half hides about a tenth (rule
            of thumb).
    """
    facts = record.facts
    found = facts.get("generalisation") or {}
    if "last" not in found:
        return _missing(record, _GAP)

    def judged(status: Status, summary: str, *advice: str, **numbers: Any) -> Diagnosis:
        numbers = {"unit": "of what was learned", "evidence": dict(found), **numbers}
        return Diagnosis.of(record, [CODES.finding(_GAP, status, summary, advice=advice, **numbers)])

    now, mode, start = found["last"]["train"], found["training_mode"], _start(facts)
    both = f"On training examples the loss is {now['loss']:.3g} in evaluation mode, and {mode['loss']:.3g} in training mode at the end of the run"
    in_training, noise = _lost_from(mode, now, start), _lost_from(now, mode, start)
    if in_training is not None and in_training >= broken:
        return judged(
            "fail", f"{both}: evaluation measures another model.",
            "Look at what differs in evaluation mode: batch norm's running statistics, dropout that is kept or scaled, code under `if self.training`.",
            "Look at what differs for the data: a transform that only one of the two gets.", value=in_training, threshold=broken,
        )  # fmt: skip
    if noise is not None and hidden <= noise < math.inf:
        return judged(
            "warn", f"{both}: what training mode adds hides {noise:.0%} of what was learned.",
            "Use less dropout: p is the share that is dropped, not kept. Without dropout, look at batch norm with small batches and at code under "
            "`if self.training`.", value=noise, threshold=hidden,
        )  # fmt: skip
    gap, best = gap_of(facts), gap_of(facts, at="selected")
    if gap is None or start is None:
        return judged("ok", "The baseline has learned too little on training examples for a gap to open.")
    how = found.get("how", "both in evaluation mode")
    said = f"Loss {gap.validation:.3g} on validation and {gap.train:.3g} on training examples, {how}"
    held, learned = found["selected"]["validation"]["loss"], start - gap.train
    judged = partial(judged, value=gap.share, threshold=lost)
    if gap.share >= 1 - carried and gap.z >= _SURE and not (_finite(held) and start - held >= carried * learned):
        return judged(
            "fail", f"{said}: next to nothing of what is learned holds on validation, at no checkpoint.",
            "Compare the two splits: inputs, targets, and the code that prepares each.",
            "If they are alike, the model memorises: more examples, augmentation, weight decay, a smaller model.",
        )  # fmt: skip
    risen = (gap.validation - held) / learned if _finite(held) else 0.0
    if gap.share >= lost and gap.z >= _SURE and risen >= rise:
        earlier = "" if best is None else f", and {best.validation:.3g} at step {found['selected']['step']:,}"
        fix = "Take the selected checkpoint; then more examples, augmentation, weight decay or dropout, or fewer steps."
        return judged("warn", f"{said}{earlier}: the run overfits in its later part.", fix)
    return judged("ok", f"{said}: {max(0.0, gap.share):.0%} of what was learned does not carry over.")


def _missing(record: Audited, code: str) -> Diagnosis:
    why = (record.facts.get("generalisation") or {}).get("reason", "this study did not look at its training examples")
    summary = why_missing(record.facts, "generalisation", why)
    return Diagnosis.of(record, [CODES.finding(code, "not_measured", summary)])


def _lost_from(better: Mapping[str, Any], worse: Mapping[str, Any], start: float | None) -> float | None:
    """Return the share of what was learned in one mode that is lost in the other; None where it is not beyond chance."""
    if start is None or not _finite(better["loss"]):
        return None
    if not _finite(worse["loss"]):
        return math.inf
    learned, lost = start - better["loss"], worse["loss"] - better["loss"]
    if learned <= _LEAST * abs(start) or lost < 5 * math.hypot(better["se"], worse["se"]):
        return None
    return float(lost / learned)


def classifies(facts: Mapping[str, Any]) -> bool:
    """Tell whether outputs are scores of the classes: an embedding, a reconstruction or thresholds are not, though examples have labels."""
    loss = (facts.get("one_batch") or {}).get("loss") or {}
    return loss.get("kind", "classes") in ("classes", "binary")


def _start(facts: Mapping[str, Any]) -> float | None:
    """Return the training loss of knowing nothing."""
    before = (facts.get("preflight") or {}).get("train") or {}
    if not _finite(before.get("loss")):
        return None
    classes = before.get("classes")
    return ignorance(before["loss"], chance_loss(classes) if classes and classes > 1 else None)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def diagnose_underfit(
    record: Audited, *, least: float = 0.75, broken: float = 0.5, skill: float = 0.2, ses: float = 4.0
) -> Diagnosis:
    """Hold the baseline against yardsticks that need no training, by accuracy or correlation on training examples.

    The yardsticks predict rows that they were not fitted to, the model examples that it was trained on: it has every advantage.

    Args:
        least: share of the better yardstick's skill that the model has to have (rule of thumb). Skill is what a score has above chance.
        broken: share below which it is a failure (rule of thumb).
        skill: of the better yardstick, from which on it says something (rule of thumb).
        ses: standard errors of the model's score by which it has to fall short.
    """
    facts = record.facts
    trained, sticks = facts.get("generalisation") or {}, (facts.get("data") or {}).get("yardsticks") or {}
    if "last" not in trained:
        return _missing(record, _FIT)

    def judged(status: Status, summary: str, *advice: str, **numbers: Any) -> Diagnosis:
        return Diagnosis.of(record, [CODES.finding(_FIT, status, summary, advice=advice, **numbers)])

    models = [m for name in ("last", "selected") if (m := trained[name]["train"]).get("score") is not None]
    other = any(m["classes"] is None for m in models) != (sticks.get("classes") is None)
    if "score" not in sticks or not models or other or not (sticks["classes"] is None or classifies(facts)):
        return judged("ok", "Does not apply: no linear model can be compared with the trained one by accuracy or correlation.")  # fmt: skip
    name = max(sticks["score"], key=lambda each: float(sticks["score"][each]))
    # a correlation without its sign: the output may be a distance, or a score that is better where it is low
    theirs, model = float(sticks["score"][name]), max(models, key=lambda m: abs(float(m["score"])))
    ours, chance, what = abs(float(model["score"])), sticks["chance"], "correlation" if sticks["classes"] is None else "accuracy"  # fmt: skip
    high = ours + ses * math.sqrt(max(ours * (1 - ours), 1 / model["examples"]) / model["examples"])
    needed = chance + least * (theirs - chance)
    who = {"linear": "a linear model", "neighbours": "nearest neighbours"}[name]
    said = f"{what} {ours:.2g} on {model['examples']:,} training examples, {theirs:.2g} of {who} on rows left out of its fit"
    numbers: dict[str, Any] = {
        "value": ours, "unit": what, "threshold": needed,
        "evidence": {"trained": dict(model), "yardsticks": sticks["score"], "chance": chance},
    }  # fmt: skip
    if theirs - chance < skill or high >= needed:
        return judged("ok", f"The trained model keeps up: {said}.", **numbers)
    far = high < chance + broken * (theirs - chance)
    return judged(
        "fail" if far else "warn", f"The trained model is {'far ' if far else ''}behind {who}: {said}.",
        "Something keeps this model from using its inputs: look for dropout that drops what it should keep (p is the share that is "
        "dropped), a bottleneck, inputs that are transformed on their way, weight decay, and a learning rate far off.",
        "Overfit a few examples first; add layers one at a time to a model that works.", **numbers,
    )  # fmt: skip


_NEAR = 0.05  # share of the run on each side of an evaluation whose training losses it is held against (rule of thumb)


def facts_of_curves(record: RecordLike, trial: int) -> dict[str, Any]:
    """Return the facts that `diagnose_generalisation_gap` reads, from one trial's training losses and logged validation losses."""
    rows = selected_rows(record, trial).sort_values("step")
    curve = judged(record).curve(trial)
    select, steps = str(record.config.get("select", "")), rows["step"].to_numpy(dtype=np.int64)
    values = rows["value"].to_numpy(dtype=np.float64)
    reason = None
    if not select.endswith("/loss") or not values.size:
        reason = "the log has no validation loss"
    elif curve is None or curve.diverged or not np.isfinite(values).all():
        reason = "a loss is not finite"
    elif values.size < FEWEST_TO_SEE_NOISE:
        reason = f"{values.size} validation losses do not show their noise, {FEWEST_TO_SEE_NOISE} do"
    if reason is not None or curve is None:
        return {"generalisation": {"reason": reason}}
    near = _NEAR * curve.total_steps

    def row(place: int) -> dict[str, Any]:
        away = np.abs(curve.at_steps - steps[place])
        around = curve.loss[away <= max(near, away.min())]
        loss, error = mean_and_error([around[np.isfinite(around)]])
        unknown = dict.fromkeys(("classes", "score", "renumbered"))
        train = {"loss": loss, "se": error if math.isfinite(error) else 0.0, "examples": 0, **unknown}
        held = {"loss": float(values[place]), "se": wobble(values), "examples": 0, **unknown}
        return {"step": int(steps[place]), "train": train, "validation": held}

    last, best = row(values.size - 1), row(int(np.argmin(values)))
    head = curve.loss[: max(1, round(0.02 * curve.loss.size))]
    found = {"last": last, "selected": best, "training_mode": last["train"], "how": "as they were logged"}
    return {"generalisation": found, "preflight": {"train": {"loss": float(np.median(head))}}}
