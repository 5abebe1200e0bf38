"""`diagnose_optimizers`: is another rule better, and are the forms of the baseline's or its memory the trouble (F2.3, F7)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from workbench.config import is_callable_name
from workbench.curves.judged import JudgedStudy, judged
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.topics.optimizers.constants import MEMORY_FIELD, StaleMoment, stale_moments
from workbench.topics.optimizers.rule_ranges import (
    Contest,
    RuleRange,
    Twin,
    contest,
    read_ranges,
    read_twins,
    wider_than,
)

CODES = Codes({
    "optimizers.better": "F2.3", "optimizers.rule_mismatch": "F7.4", "optimizers.stale_second_moment": "F7.5",
})  # fmt: skip
ONE_FORM = ("sgd", "momentum", "nesterov")


def diagnose_optimizers(
    record: RecordLike,
    *,
    trains_frac: float = 0.1,
    noise_sds: float = 2.0,
    material_frac: float = 0.01,
    gain_frac: float = 1e-3,
    false_adoption: float = 0.1,
    wider_decades: float = 0.3,
    stale_ratio: float = 2.3,
) -> Diagnosis:
    """Hold the update rules of a study against each other, and look for what goes wrong with one of them.

    Args:
        record: a study of rules, or any study: what was not tried is `not_measured`.
        trains_frac: an lr trains where its end loss is above the rule's best by no more than this share of what the rule learned
            (rule of thumb).
        noise_sds: standard errors of a paired difference that count as equal.
        material_frac: share of what was learned by which end losses have to differ to count (rule of thumb).
        gain_frac: the same for the selected metric (rule of thumb: rounding decides about less).
        false_adoption: another rule is better where its mean gain over fresh seeds would come by chance less often than this
            (rule of thumb).
        wider_decades: by how many decades another rule's range has to be wider for certain (rule of thumb: 0.3 is a factor of
            2; under another seed the edge of a network moves by up to a fifth).
        stale_ratio: by which factor a step is longer than steady gradients make it, for its second moment to be out of date
            (Wortsman et al. 2023, arXiv:2304.13013, for single tensors; here a rule of thumb).
    """
    study = judged(record)
    noise = {"noise_sds": noise_sds, "material_frac": material_frac}
    ranges = read_ranges(study, trains_frac=trains_frac)
    held = contest(study, ranges, gain_frac=gain_frac, false_adoption=false_adoption)
    wider = wider_than(study, ranges, wider_decades=wider_decades, **noise)
    findings = (_better(study, ranges, held, wider), _mismatch(study, noise), _stale(study, ranges, stale_ratio))
    return Diagnosis.of(study, findings)


def better_rule(record: RecordLike, **thresholds: float) -> dict[str, Any] | None:
    """Return optimizer and peak_lr, the lr of its best checkpoint, that a config needs to train with the better rule; None where no rule is better."""
    found = diagnose_optimizers(record, **thresholds)["optimizers.better"]
    change: dict[str, Any] | None = found.evidence.get("change")
    return change


def _better(
    study: JudgedStudy, ranges: Mapping[str, RuleRange], held: Contest | None, wider: Sequence[tuple[RuleRange, float]]
) -> Finding:
    code, rule, lr = "optimizers.better", study.config.get("optimizer"), study.config.get("peak_lr")
    evidence: dict[str, Any] = {"own": rule, "ranges": [found.row() for found in ranges.values()], "change": None}
    trained = [found for found in ranges.values() if found.best_lr is not None]
    own = next(iter(ranges.values()), None)
    if own is None or own.optimizer != rule or own.best_lr is None or len(trained) < 2:
        reason = "no rule beside the baseline's was trained" if len(ranges) < 2 else "too few rules learned anything"
        return CODES.not_measured(code, reason, evidence=evidence)
    evidence |= {
        "wider": [{"optimizer": found.optimizer, "decades": more} for found, more in wider],
        "contest": None if held is None else held.to_dict(),
    }
    make = partial(CODES.finding, code, unit=study.config.get("select"), value=None if held is None else held.gain)
    chosen, why = None, ""
    if held is not None and held.wins:
        chosen, why = held.rival, f"trains better than {own.optimizer}: {held.reason}"
    elif wider and not (lr is None or own.trains_to is None or lr <= own.trains_to * (1 + 1e-9)):
        chosen = wider[0][0]
        why = f"trains as well as {own.optimizer}, which does not train at the baseline's lr {lr:.4g}"
    if chosen is not None:
        change = {"optimizer": chosen.optimizer, "peak_lr": chosen.selected_lr or chosen.best_lr}
        times = [10**decades for found, decades in wider if found is chosen]
        more = "".join(f", which trains over a range at least {ratio:.3g} times as wide," for ratio in times)
        advice = [f"config.replace(optimizer={change['optimizer']!r}, peak_lr={change['peak_lr']:.6g})"]
        summary = f"{chosen.optimizer} at lr {change['peak_lr']:.4g}{more} {why}."
        return make("warn", summary, advice=advice, evidence=evidence | {"change": change})
    start = f"Keep {own.optimizer}: no other optimizer tried is significantly better"
    nearly = "" if held is None else f" {held.words}"
    if wider:
        found, decades = wider[0]
        over = f"over a range of learning rates at least {10**decades:.3g} times as wide"
        return make("ok", f"{start}. {found.optimizer} is as good {over}.{nearly}", evidence=evidence)
    best = min(trained, key=lambda found: found.loss)
    lowest = f" The lowest training loss is that of {best.optimizer}, {best.loss:.3g} against {own.loss:.3g}."
    summary = (
        f"{start}, and none trains over a clearly wider range of learning rates.{nearly}{'' if best is own else lowest}"
    )
    return make("ok", summary, evidence=evidence)


def _mismatch(study: JudgedStudy, noise: Mapping[str, float]) -> Finding:
    """Say whether the baseline's rule trains otherwise in the other form, by a run of each."""
    code, own = "optimizers.rule_mismatch", str(study.config.get("optimizer"))
    forms: Mapping[str, Any] = (study.facts.get("optimizers") or {}).get("forms") or {}
    mine: Mapping[str, Any] = forms.get(own) or {}
    twins = read_twins(study, "rules")
    differing = [twin for twin in twins if twin.differs(**noise)]
    evidence = {"forms": forms, "twins": [t.to_dict() for t in twins], "differing": [t.optimizer for t in differing]}
    if is_callable_name(own):
        return CODES.not_measured(code, "an optimizer of your own has one form only", evidence=evidence)
    known: dict[str, Any] = {
        "unit": "torch's first differing update / the playbook's", "value": mine.get("first_ratio"), "evidence": evidence
    }  # fmt: skip
    others = sorted({t.optimizer for t in differing if t.optimizer != own})
    tail = f" Of the other rules tried it matters for {', '.join(others)}." if others else ""
    if own in ONE_FORM:
        return CODES.finding(code, "ok", f"{own} is the same in the playbook's form and in torch's.{tail}", **known)
    if not any(twin.optimizer == own for twin in twins):
        return CODES.not_measured(code, f"{own} was not trained in both forms", evidence=evidence)
    odd = next((twin for twin in differing if twin.optimizer == own), None)
    if odd is None:
        return CODES.finding(code, "ok", f"{own} trains alike in the playbook's form and in torch's.{tail}", **known)
    how = f"its end loss is {'lower' if odd.gain > 0 else 'higher'} by {abs(odd.gain):.3g}."
    if odd.own.verdict.is_lasting != odd.twin.verdict.is_lasting:
        words = ["unstable without recovery" if side.verdict.is_lasting else "stable" for side in (odd.own, odd.twin)]
        how = f"{words[0]} here, {words[1]} there."
    if mine.get("first_step") is not None:
        how += (
            f" The updates part at step {mine['first_step']}, torch's {mine['first_ratio']:.3g} times the playbook's."
        )
    return CODES.finding(
        code, "warn",
        f"{own} at lr {odd.own.curve.lr:.4g} trains otherwise in the {odd.after} form than in the {odd.before} form: {how}{tail}",
        advice=[f"Say rules={str(study.config.get('rules'))!r} where results are compared; a learning rate that was tuned in one "
                "form has to be tuned again in the other."], **known,
    )  # fmt: skip


def _stale(study: JudgedStudy, ranges: Mapping[str, RuleRange], ratio: float) -> Finding:
    """Say whether a rise of the loss came from a second moment out of date: a shorter memory takes it away."""
    code = "optimizers.stale_second_moment"
    adaptive = [name for name in ranges if name in MEMORY_FIELD]
    if not adaptive:
        return CODES.not_measured(code, "no rule with a second moment was trained")
    if "grad_norm" not in study.steps.columns or not study.steps["grad_norm"].notna().any():
        return CODES.not_measured(code, "no gradient norm was recorded")
    hits = [hit for hit in stale_moments(study, ratio=ratio) if matters(hit, ranges)]
    known: dict[str, Any] = {"unit": "length of a step / that of steady gradients", "threshold": ratio}
    if not hits:
        summary = f"No rise of the loss with {', '.join(adaptive)} began with a second moment out of date."
        return CODES.finding(code, "ok", summary, evidence={"rules": adaptive}, **known)
    twins = {t.own.curve.trial: t for name in dict.fromkeys(MEMORY_FIELD.values()) for t in read_twins(study, name)}
    pairs = [(hit, twins.get(hit.trial.curve.trial)) for hit in hits]
    rows = [
        {
            "optimizer": (curve := hit.trial.curve).config["optimizer"], "trial": curve.trial, "lr": curve.lr,
            "onset_step": hit.rise.onset_step, "step": hit.step, "ratio": hit.ratio, "field": hit.field, "memory": hit.memory,
            "twin": None if twin is None else twin.to_dict(),
        }
        for hit, twin in pairs
    ]  # fmt: skip
    evidence = {"rules": adaptive, "hits": rows}
    cured = [(hit, twin) for hit, twin in pairs if twin is not None and _cures(twin)]
    cured.sort(key=lambda pair: _harmless(study, ranges, pair[0]) != "")
    told, twin = cured[0] if cured else pairs[0]
    known |= {"evidence": evidence, "value": told.ratio, "step": told.step}
    start = (
        f"{told.trial.curve.config['optimizer']} at lr {told.trial.curve.lr:.4g}: the loss rises after step {told.rise.onset_step}, "
        f"where a step was up to {told.ratio:.3g} times as long as with steady gradients"
    )
    if cured and twin is not None:
        said = f"{start}; with {told.field} {twin.after:g} instead of {told.memory:g} it does not"
        if harmless := _harmless(study, ranges, told):
            return CODES.finding(code, "ok", f"{said}. That is {harmless}.", **known)
        advice = [f"config.replace({told.field}={twin.after:g}): a shorter memory follows gradients that grow.",
                  "Or clip the gradient norm, where single batches are the cause (F4.3)."]  # fmt: skip
        return CODES.finding(code, "warn", f"{said}.", advice=advice, **known)
    if any(twin is None for _, twin in pairs):
        return CODES.not_measured(code, f"{start}, and no run with a shorter memory shows the cause", evidence=evidence)
    return CODES.finding(code, "ok", f"{start}; with a shorter memory it rises as well: the cause is another.", **known)


def matters(hit: StaleMoment, ranges: Mapping[str, RuleRange]) -> bool:
    """Tell whether a rise happened at a learning rate that somebody might train with, the first unstable one included."""
    edge = ranges[str(hit.trial.curve.config["optimizer"])].unstable
    return edge is None or hit.trial.curve.lr <= edge * (1 + 1e-9)


def _harmless(study: JudgedStudy, ranges: Mapping[str, RuleRange], hit: StaleMoment) -> str:
    """Return why a rise is not the baseline's trouble, "" where it is."""
    name = str(hit.trial.curve.config["optimizer"])
    if name != study.config.get("optimizer"):
        return "not the baseline's rule"
    above = hit.trial.curve.lr > (ranges[name].trains_to or 0.0) * (1 + 1e-9)
    return "above every learning rate that trains" if above else ""


def _cures(twin: Twin) -> bool:
    healed = twin.own.verdict.is_lasting and not twin.twin.verdict.is_lasting
    return healed or (not twin.twin.verdict.rises and not twin.twin.verdict.high)
