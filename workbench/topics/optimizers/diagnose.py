"""`diagnose_optimizers`: do the forms of a rule differ, is its memory or its decay the trouble, and is another rule better (F2.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.curves.judged import judged
from workbench.curves.rules import RuleRange, read_ranges
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.optimizers.diagnose_rules import (
    CLAUSE,
    FindingLimits,
    mismatch_finding,
    shrinks_finding,
    stale_finding,
    unmeasured,
)
from workbench.topics.optimizers.rule_choice import Contest, contest, wider_than

__all__ = ["CODES", "better_rule", "diagnose_optimizers"]

CODES = (
    "optimizers.better",
    "optimizers.rule_mismatch",
    "optimizers.stale_second_moment",
    "optimizers.weight_decay_shrinks",
)


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
    shrink_ratio: float = 0.5,
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
        shrink_ratio: weights shrink where weight decay leaves less than this share of their norm (rule of thumb).

    Returns:
        The codes `optimizers.better`, `.rule_mismatch`, `.stale_second_moment` and `.weight_decay_shrinks`, once each.
    """
    record = judged(record)
    limits = FindingLimits(
        noise_sds=noise_sds, material_frac=material_frac, gain_frac=gain_frac, false_adoption=false_adoption, wider_decades=wider_decades,
        shrink_ratio=shrink_ratio, stale_ratio=stale_ratio,
    )  # fmt: skip
    ranges = read_ranges(record, trains_frac=trains_frac)
    findings = (
        _better(record, ranges, limits),
        mismatch_finding(record, limits),
        stale_finding(record, ranges, limits),
        shrinks_finding(record, limits),
    )
    return Diagnosis.of(record, findings)


def better_rule(record: RecordLike, **thresholds: float) -> dict[str, Any] | None:
    """Return what a config has to change to train with the better rule, None where no rule is better.

    Args:
        record: a study of rules.
        **thresholds: passed to `diagnose_optimizers`.

    Returns:
        optimizer and peak_lr, fields of `TrainConfig`: the lr of the rule's best checkpoint.
    """
    found = diagnose_optimizers(record, **thresholds)["optimizers.better"]
    change: dict[str, Any] | None = found.evidence.get("change")
    return change


def _better(record: RecordLike, ranges: Mapping[str, RuleRange], limits: FindingLimits) -> Finding:
    code = "optimizers.better"
    rows = [_row(found) for found in ranges.values()]
    evidence: dict[str, Any] = {"own": record.config.get("optimizer"), "ranges": rows, "change": None}
    trained = [found for found in ranges.values() if found.best_lr is not None]
    own = next(iter(ranges.values()), None)
    if own is None or own.optimizer != record.config.get("optimizer") or own.best_lr is None or len(trained) < 2:
        reason = "no rule beside the baseline's was trained" if len(ranges) < 2 else "too few rules learned anything"
        return unmeasured(code, reason, evidence=evidence)
    held = contest(record, ranges, gain_frac=limits.gain_frac, false_adoption=limits.false_adoption)
    wider = wider_than(
        record, ranges, noise_sds=limits.noise_sds, material_frac=limits.material_frac,
        wider_decades=limits.wider_decades,
    )  # fmt: skip
    evidence |= {
        "wider": [{"optimizer": found.optimizer, "decades": more} for found, more in wider],
        "contest": None if held is None else _told(held),
    }
    known: dict[str, Any] = {"code": code, "clause": CLAUSE[code], "unit": record.config.get("select")}
    known |= {"value": None if held is None else held.gain, "evidence": evidence}
    if held is not None and held.wins:
        return _warned(held.rival, f"trains better than {own.optimizer}: {held.reason}", wider, known)
    if wider and not _trains(own, record.config.get("peak_lr")):
        said = f"trains as well as {own.optimizer}, which does not train at the baseline's lr {record.config.get('peak_lr'):.4g}"
        return _warned(wider[0][0], said, wider, known)
    nearly = "" if held is None else f" {_nearly(held)}"
    if wider:
        found, more = wider[0]
        return Finding(
            status="ok", **known,
            summary=f"No rule tried is better than {own.optimizer} by more than the noise. {found.optimizer} is as good over a range "
            f"of learning rates at least {10**more:.3g} times as wide.{nearly}",
        )  # fmt: skip
    best = min(trained, key=lambda found: found.loss)
    lowest = f" The lowest training loss is that of {best.optimizer}, {best.loss:.3g} against {own.loss:.3g}."
    return Finding(
        status="ok", **known,
        summary=f"No rule tried is better than {own.optimizer} by more than the noise, nor its range of learning rates certainly wider."
        f"{nearly}{'' if best is own else lowest}",
    )  # fmt: skip


def _trains(own: RuleRange, lr: float | None) -> bool:
    """Tell whether the baseline's lr lies below the upper end of the range that trains."""
    return lr is None or own.trains_to is None or lr <= own.trains_to * (1 + 1e-9)


def _warned(
    chosen: RuleRange, said: str, wider: Sequence[tuple[RuleRange, float]], known: Mapping[str, Any]
) -> Finding:
    change = {"optimizer": chosen.optimizer, "peak_lr": chosen.selected_lr or chosen.best_lr}
    more = [
        f", which trains over a range at least {10**decades:.3g} times as wide,"
        for found, decades in wider
        if found is chosen
    ]
    return Finding(
        status="warn",
        summary=f"{chosen.optimizer} at lr {change['peak_lr']:.4g}{''.join(more)} {said}.",
        advice=[f"config.replace(optimizer={change['optimizer']!r}, peak_lr={change['peak_lr']:.6g})"],
        **(dict(known) | {"evidence": known["evidence"] | {"change": change}}),
    )


def _nearly(held: Contest) -> str:
    chance = "" if held.seeds else ", which one seed cannot tell from chance"
    if held.too_small:
        chance = (
            f", a gain of {abs(held.gain) / held.learned:.2g} of what was learned, too small to matter"
            if held.learned > 0
            else ""
        )
    side = "ahead" if held.gain > 0 else "behind"
    return f"The best other one, {held.rival.optimizer}, is {side}: {held.reason}{chance}."


def _told(held: Contest) -> dict[str, Any]:
    return {
        "rival": held.rival.optimizer, "lr": held.rival.selected_lr, "own_lr": held.own.selected_lr, "gain": held.gain,
        "learned": held.learned, "fresh_seeds": held.seeds, "wins": held.wins, "reason": held.reason, "proof": held.proof,
    }  # fmt: skip


def _row(found: RuleRange) -> dict[str, Any]:
    """Return what a figure and a table need of a rule."""
    names = (
        "optimizer", "best_lr", "low", "high", "loss", "loss_se", "trains_from", "trains_to", "fails_below", "fails_above", "stable", "unstable", "top",
        "selected_lr", "selected", "decades", "most_decades",
    )  # fmt: skip
    return {name: getattr(found, name) for name in names} | {
        "points": [{"lr": p.lr, "loss": p.loss, "unstable": p.unstable, "trials": list(p.trials)} for p in found.points]
    }
