"""The findings about one rule: its two forms, the memory of its second moment, and its weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.config import is_callable_name
from workbench.curves.replaced import Twin, read_twins
from workbench.curves.rules import RuleRange
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Finding
from workbench.topics.batch_size.decay_pairs import decay_pairs
from workbench.topics.optimizers.stale_moment import MEMORY_FIELD, StaleMoment, stale_moments

__all__ = [
    "CLAUSE",
    "ONE_FORM",
    "FindingLimits",
    "matters",
    "mismatch_finding",
    "shrinks_finding",
    "stale_finding",
    "unmeasured",
]

CLAUSE = {
    "optimizers.better": "F2.3",
    "optimizers.rule_mismatch": "F7.4",
    "optimizers.stale_second_moment": "F7.5",
    "optimizers.weight_decay_shrinks": "F7.7",
}
ONE_FORM = ("sgd", "momentum", "nesterov")


@dataclass(frozen=True, kw_only=True)
class FindingLimits:
    """The thresholds of `diagnose_optimizers`, see there."""

    noise_sds: float
    material_frac: float
    gain_frac: float
    false_adoption: float
    wider_decades: float
    shrink_ratio: float
    stale_ratio: float


def unmeasured(code: str, reason: str, **more: Any) -> Finding:
    """Return the finding that says why nothing is known."""
    return Finding(code=code, status="not_measured", clause=CLAUSE[code], summary=f"Not measured: {reason}.", **more)


def mismatch_finding(record: RecordLike, limits: FindingLimits) -> Finding:
    """Say whether the baseline's rule trains otherwise in the other form, by a run of each."""
    code, own = "optimizers.rule_mismatch", str(record.config.get("optimizer"))
    facts: Mapping[str, Any] = record.facts.get("optimizers") or {}
    forms: Mapping[str, Any] = facts.get("forms") or {}
    twins = read_twins(record, "rules")
    differing = [twin for twin in twins if twin.differs(noise_sds=limits.noise_sds, material_frac=limits.material_frac)]
    evidence = {"forms": forms, "twins": [t.to_dict() for t in twins], "differing": [t.optimizer for t in differing]}
    known: dict[str, Any] = {
        "code": code, "clause": CLAUSE[code], "unit": "torch's first differing update / the playbook's",
        "value": (forms.get(own) or {}).get("first_ratio"), "evidence": evidence,
    }  # fmt: skip
    if is_callable_name(own):
        return unmeasured(code, "an optimizer of your own has one form only", evidence=evidence)
    others = sorted({t.optimizer for t in differing if t.optimizer != own})
    tail = f" Of the other rules tried it matters for {', '.join(others)}." if others else ""
    if own in ONE_FORM:
        return Finding(status="ok", summary=f"{own} is the same in the playbook's form and in torch's.{tail}", **known)
    mine = [twin for twin in twins if twin.optimizer == own]
    if not mine:
        return unmeasured(code, f"{own} was not trained in both forms", evidence=evidence)
    at_odds = [twin for twin in mine if twin in differing]
    if not at_odds:
        return Finding(status="ok", summary=f"{own} trains alike in the playbook's form and in torch's.{tail}", **known)
    return Finding(
        status="warn", summary=f"{_odds(at_odds[0])}{_why(forms.get(own) or {})}{tail}", **known,
        advice=[f"Say rules={str(record.config.get('rules'))!r} where results are compared; a learning rate that was tuned in one "
                "form has to be tuned again in the other."],
    )  # fmt: skip


def _odds(twin: Twin) -> str:
    own, other = twin.own, twin.twin
    head = f"{twin.optimizer} at lr {own.curve.lr:.4g} trains otherwise in the {twin.after} form than in the {twin.before} form: "
    if own.verdict.is_lasting != other.verdict.is_lasting:
        words = ["lastingly unstable" if side.verdict.is_lasting else "stable" for side in (own, other)]
        return f"{head}{words[0]} here, {words[1]} there."
    return f"{head}its end loss is {'lower' if twin.gain > 0 else 'higher'} by {abs(twin.gain):.3g}."


def _why(forms: Mapping[str, Any]) -> str:
    causes = forms.get("causes") or ()
    if not causes:
        return ""
    at = f" The updates part at step {forms['first_step']}, torch's {forms['first_ratio']:.3g} times the playbook's;"
    return f"{at} what does most is the {causes[0]['name']}."


def stale_finding(record: RecordLike, ranges: Mapping[str, RuleRange], limits: FindingLimits) -> Finding:
    """Say whether a rise of the loss came from a second moment out of date: a shorter memory takes it away."""
    code = "optimizers.stale_second_moment"
    adaptive = [name for name in ranges if name in MEMORY_FIELD]
    if not adaptive:
        return unmeasured(code, "no rule with a second moment was trained")
    if "grad_norm" not in record.steps.columns or not record.steps["grad_norm"].notna().any():
        return unmeasured(code, "no gradient norm was recorded")
    hits = [hit for hit in stale_moments(record, ratio=limits.stale_ratio) if matters(hit, ranges)]
    known: dict[str, Any] = {
        "code": code, "clause": CLAUSE[code], "unit": "length of a step / that of steady gradients",
        "threshold": limits.stale_ratio,
    }  # fmt: skip
    if not hits:
        return Finding(
            status="ok", evidence={"rules": adaptive}, **known,
            summary=f"No rise of the loss with {', '.join(adaptive)} began with a second moment out of date.",
        )  # fmt: skip
    twins = {t.own.curve.trial: t for name in dict.fromkeys(MEMORY_FIELD.values()) for t in read_twins(record, name)}
    pairs = [(hit, twins.get(hit.trial.curve.trial)) for hit in hits]
    known |= {"evidence": {"rules": adaptive, "hits": [_hit(hit, twin) for hit, twin in pairs]}}
    cured = [(hit, twin) for hit, twin in pairs if twin is not None and _cures(twin)]
    cured.sort(key=lambda pair: _harmless(record, ranges, pair[0]) != "")
    told, twin = cured[0] if cured else pairs[0]
    known |= {"value": told.ratio, "step": told.step}
    start = (
        f"{told.trial.curve.config['optimizer']} at lr {told.trial.curve.lr:.4g}: the loss rises after step {told.rise.onset_step}, "
        f"where a step was up to {told.ratio:.3g} times as long as with steady gradients"
    )
    if cured and twin is not None:
        said, harmless = f"{start}; with {told.field} {twin.after:g} instead of {told.memory:g} it does not", _harmless(record, ranges, told)  # fmt: skip
        if harmless:
            return Finding(status="ok", **known, summary=f"{said}. That is {harmless}.")
        return Finding(
            status="warn", **known, summary=f"{said}.",
            advice=[f"config.replace({told.field}={twin.after:g}): a shorter memory follows gradients that grow.",
                    "Or clip the gradient norm, where single batches are the cause (F4.3)."],
        )  # fmt: skip
    if any(twin is None for _, twin in pairs):
        return unmeasured(
            code, f"{start}, and no run with a shorter memory shows the cause", evidence=known["evidence"]
        )
    return Finding(
        status="ok", **known, summary=f"{start}; with a shorter memory it rises as well: the cause is another."
    )


def matters(hit: StaleMoment, ranges: Mapping[str, RuleRange]) -> bool:
    """Tell whether a rise happened at a learning rate that somebody might train with, the first unstable one included."""
    edge = ranges[str(hit.trial.curve.config["optimizer"])].unstable
    return edge is None or hit.trial.curve.lr <= edge * (1 + 1e-9)


def _harmless(record: RecordLike, ranges: Mapping[str, RuleRange], hit: StaleMoment) -> str:
    """Return why a rise is not the baseline's trouble, "" where it is."""
    name = str(hit.trial.curve.config["optimizer"])
    if name != record.config.get("optimizer"):
        return "not the baseline's rule"
    above = hit.trial.curve.lr > (ranges[name].trains_to or 0.0) * (1 + 1e-9)
    return "above every learning rate that trains" if above else ""


def _cures(twin: Twin) -> bool:
    healed = twin.own.verdict.is_lasting and not twin.twin.verdict.is_lasting
    return healed or (not twin.twin.verdict.rises and not twin.twin.verdict.high)


def _hit(hit: StaleMoment, twin: Twin | None) -> dict[str, Any]:
    curve = hit.trial.curve
    return {
        "optimizer": curve.config["optimizer"], "trial": curve.trial, "lr": curve.lr, "onset_step": hit.rise.onset_step,
        "step": hit.step, "ratio": hit.ratio, "field": hit.field, "memory": hit.memory,
        "twin": None if twin is None else twin.to_dict(),
    }  # fmt: skip


def shrinks_finding(record: RecordLike, limits: FindingLimits) -> Finding:
    """Say whether weight decay shrinks the weights of the baseline's rule, and whether that costs anything."""
    code, own = "optimizers.weight_decay_shrinks", record.config.get("optimizer")
    decay = float(record.config.get("weight_decay") or 0.0)
    known: dict[str, Any] = {
        "code": code, "clause": CLAUSE[code], "unit": "norm of the weights / that without decay",
        "threshold": limits.shrink_ratio,
    }  # fmt: skip
    if not decay:
        return Finding(status="ok", summary="No weight decay is set, so none can shrink the weights.", **known)
    pairs = decay_pairs(record)
    known |= {"evidence": {"pairs": [pair.to_dict() for pair in pairs], "weight_decay": decay}}
    mine = [pair for pair in pairs if pair.twin.optimizer == own and pair.ratio is not None]
    if not mine:
        return unmeasured(
            code,
            f"no run of {own} without weight decay was trained beside one with it",
            **{"evidence": known["evidence"]},
        )
    worst = min(mine, key=lambda pair: pair.ratio or math.inf)
    ratio, lr = float(worst.ratio or 0.0), worst.twin.own.curve.lr
    known |= {"value": ratio}
    said = f"At lr {lr:.4g} weight decay {decay:g} leaves the weights {ratio:.3g} times as large as without it"
    if ratio > limits.shrink_ratio:
        return Finding(status="ok", summary=f"{said}.", **known)
    if not worst.costs(noise_sds=limits.noise_sds, material_frac=limits.material_frac):
        return Finding(status="ok", summary=f"{said}, and costs nothing.", **known)
    gain = worst.twin.gain if worst.twin.selected_gain is None else worst.twin.selected_gain
    return Finding(
        status="warn", summary=f"{said}, and without it training is better by {gain:.3g}.", **known,
        advice=["Lower weight_decay: what it takes is the sum of lr * weight_decay over the steps, so a larger lr, a longer run and "
                "momentum ask for less of it."],
    )  # fmt: skip
