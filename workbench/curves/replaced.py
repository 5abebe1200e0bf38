"""`replaced`: what a baseline loses by a setting that is far from usual, by the same run with the usual value (`topics/recommendation/replaced.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.curves.classify import ignorance
from workbench.curves.judged import judged
from workbench.curves.sweep import objective, paired_difference
from workbench.curves.trials import RecordLike, TrialCurve, initial_loss
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis, Finding, Status
from workbench.record.read import periodic_rows

__all__ = ["LOST_FRAC", "Replaced", "diagnose_replaced", "lost_by", "replaced"]

LOST_FRAC = 0.1
"""A setting costs something where it takes this share of what training learns without it (rule of thumb)."""
MOST_FRAC = 0.5
"""Where the selected metric lacks this much, a better fit is none (rule of thumb)."""
ALL_FRAC = 0.9
"""Where it takes this much, training does not work (rule of thumb)."""
NOISE_SDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A setting, and the run with the usual value in its place.

    Attributes:
        field: of the config.
        own, usual: its value in the baseline and in the other run.
        loss: training loss at the end of either, the last tenth.
        select: selected metric at the end of either, because the best checkpoint may be one from before a run was lost; None where
            it was not evaluated.
        lost: share of what the other run learns that the baseline does not, in training and by the selected metric: the smaller
            of the two, because a worse fit that generalises as well costs nothing, unless the metric is lost for the most part.
            0 where it may be noise.
        norm: length of the weights at the end of the baseline over that of the other run; None where it is not known.
    """

    field: str
    own: float
    usual: float
    loss: tuple[float, float]
    select: tuple[float, float] | None
    lost: float
    norm: float | None

    @property
    def costs(self) -> bool:
        """Whether the baseline is worth mending."""
        return self.lost >= LOST_FRAC

    @property
    def status(self) -> Status:
        """How bad it is: "fail" where next to nothing is learned."""
        return "ok" if not self.costs else "fail" if self.lost >= ALL_FRAC else "warn"

    @property
    def told(self) -> str:
        """Where both runs end, in words."""
        ends = [f"{value:.3g}" if math.isfinite(value) else "no finite number" for value in self.loss]
        also = (
            ""
            if self.select is None
            else f" (the selected metric at {self.select[1]:.3g} instead of {self.select[0]:.3g})"
        )
        return f"with {self.field}={self.usual:g} the training loss ends at {ends[1]} instead of {ends[0]}{also}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def replaced(record: RecordLike) -> dict[str, list[Replaced]]:
    """Return code -> the settings that were replaced for it, what costs most first.

    Args:
        record: a study; its facts may hold "replaced".
    """
    rows = (record.facts.get("replaced") or {}).get("rows", ())
    curves = {c.trial: c for c in judged(record).curves if c.finished} if rows else {}
    found: dict[str, list[Replaced]] = {}
    for row in rows:
        own, other = (curves.get(int(row[name])) for name in ("baseline", "trial"))
        if own is not None and other is not None:
            found.setdefault(row["code"], []).append(_compared(record, row, own, other))
    return {code: sorted(each, key=lambda r: -r.lost) for code, each in found.items()}


def _compared(record: RecordLike, row: Mapping[str, Any], own: TrialCurve, other: TrialCurve) -> Replaced:
    lost, select = lost_by(record, own, other)
    norms = [_last(c, "param_norm") for c in (own, other)]
    return Replaced(
        field=row["field"], own=row["own"], usual=row["usual"], loss=(objective(own), objective(other)), lost=lost, select=select,
        norm=norms[0] / norms[1] if all(map(math.isfinite, norms)) and norms[1] > 0 else None,
    )  # fmt: skip


def lost_by(record: RecordLike, own: TrialCurve, other: TrialCurve) -> tuple[float, tuple[float, float] | None]:
    """Return the share of what one run learns that another lacks, and the selected metric at the end of either; see `Replaced`.

    Args:
        record: a study.
        own: the run that may lack it.
        other: what it is held against, of the same length and seed.
    """
    ends = (objective(own), objective(other))
    start = ignorance(initial_loss(own, [own]), own.chance)
    gain, se = paired_difference(own, other)
    sure = gain > NOISE_SDS * (se if math.isfinite(se) else 0.0) or not ends[0] < start
    lost = _lost(start, *ends) if sure else 0.0
    sign = 1.0 if record.config.get("select_mode", "min") == "min" else -1.0
    values = [_evaluated(record, c.trial) for c in (own, other)]
    if not all(values) or not math.isfinite(values[1][-1]):
        return lost, None
    first, select = values[0][0], (values[0][-1], values[1][-1])
    first = ignorance(first, own.chance) if str(record.config["select"]).endswith("/loss") else first
    also = _lost(sign * first, sign * select[0], sign * select[1])
    return also if also >= MOST_FRAC else min(lost, also), select


CODES = ("optimizers.constants", "optimizers.weight_decay_shrinks")


def diagnose_replaced(record: RecordLike) -> Diagnosis:
    """Say whether a constant of the update rule, or its weight decay, keeps the baseline from learning.

    Args:
        record: a study whose facts hold "replaced".

    Returns:
        `optimizers.constants` and `optimizers.weight_decay_shrinks`, once each.
    """
    facts = record.facts.get("replaced")
    if not facts:
        reason = why_missing(record.facts, "replaced", "nobody looked for unusual settings")
        findings = tuple(Finding(code=code, status="not_measured", clause="F7.7", summary=reason) for code in CODES)
    else:
        found = replaced(record)
        findings = (_constants(found, facts["constants"]), _decay(found, facts["constants"]))
    return Diagnosis.of(record, findings)


_MEANS = {
    "momentum": "gradients are averaged over {memory:,.0f} steps",
    "beta1": "gradients are averaged over {memory:,.0f} steps",
    "beta2": "squared gradients are averaged over {memory:,.2g} steps",
    "rho": "squared gradients are averaged over {memory:,.2g} steps",
    "eps": "it is added to the root mean square of the gradients, and a step is about lr only where that is much larger",
}


def _constants(found: Mapping[str, list[Replaced]], constants: Mapping[str, float]) -> Finding:
    code = "optimizers.constants"
    known = {name: value for name, value in constants.items() if name in _MEANS}
    common: dict[str, Any] = {"code": code, "clause": "F7.7", "evidence": {"constants": known}}
    if code not in found:
        shown = ", ".join(f"{name}={value:g}" for name, value in known.items())
        said = (
            f"The constants of the update rule are usual: {shown}."
            if shown
            else "Does not apply: the update rule has no constant that is known."
        )
        return Finding(status="ok", summary=said, **common)
    worst = found[code][0]
    common["evidence"] |= {"replaced": [each.to_dict() for each in found[code]]}
    common |= {"value": worst.own, "threshold": worst.usual}
    head = f"{worst.field}={worst.own:g} is unusual ({worst.usual:g} is usual)"
    if not worst.costs:
        return Finding(status="ok", summary=f"{head}, and costs little: {worst.told}.", **common)
    memory = 1 / max(1 - worst.own, 1e-12)
    return Finding(
        status=worst.status, summary=f"{head}, and keeps training from learning: {worst.told}.", **common,
        advice=[f"Set {worst.field}={worst.usual:g}: at {worst.own:g}, {_MEANS[worst.field].format(memory=memory)}. Then tune the learning rate."],
    )  # fmt: skip


def _decay(found: Mapping[str, list[Replaced]], constants: Mapping[str, float]) -> Finding:
    code, decay = "optimizers.weight_decay_shrinks", constants.get("weight_decay", 0.0)
    common: dict[str, Any] = {"code": code, "clause": "F7.7", "evidence": {"weight_decay": decay}}
    if code not in found:
        small = f"Weight decay {decay:g} is small beside the gradients, or adds up to little over the run."
        return Finding(
            status="ok", summary=small if decay else "No weight decay is set, so none can shrink the weights.", **common
        )
    worst = found[code][0]
    norms = "" if worst.norm is None else f", and the weights at {worst.norm:.2g} times their length"
    common |= {
        "value": worst.norm,
        "unit": "norm of the weights / that without decay",
        "evidence": common["evidence"] | {"replaced": [worst.to_dict()]},
    }
    if not worst.costs:
        return Finding(status="ok", summary=f"Weight decay {decay:g} costs little: {worst.told}{norms}.", **common)
    return Finding(
        status=worst.status, summary=f"Weight decay {decay:g} keeps training from learning: {worst.told}{norms}.", **common,
        advice=["Set weight_decay=0, or find out how much helps from there: what it takes is the sum of lr * weight_decay over the steps, so "
                "a larger lr, a longer run and momentum ask for less of it."],
    )  # fmt: skip


def _lost(start: float, own: float, other: float) -> float:
    """Return the share of `start - other` that `own` lacks, from 0 to 1; all of it where `own` is not finite."""
    learned = start - other
    if not learned > 0:
        return 0.0
    return min(max((own - other) / learned, 0.0), 1.0) if math.isfinite(own) else 1.0


def _evaluated(record: RecordLike, trial: int) -> list[float]:
    """Return the selected metric from the initial model to the last."""
    split, _, metric = str(record.config["select"]).partition("/")
    rows = periodic_rows(record.evals)
    rows = rows[(rows["trial"] == trial) & (rows["split"] == split) & (rows["metric"] == metric)]
    return [float(value) for value in rows.sort_values("step")["value"]]


def _last(curve: TrialCurve, name: str) -> float:
    known = curve.steps[name].dropna().tolist() if name in curve.steps.columns else []
    return float(known[-1]) if known else math.nan
