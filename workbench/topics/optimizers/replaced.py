"""What a baseline loses by a setting that is far from usual, by the same run with the usual value (`topics/recommendation/collect.py` trains it)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.curves.classify import ignorance
from workbench.curves.judged import judged
from workbench.curves.selection import metric_sign, selected_rows
from workbench.curves.sweep import objective, paired_difference
from workbench.curves.trial_curves import RecordLike, TrialCurve, initial_losses
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status
from workbench.topics.optimizers.memory_and_decay import last_norm

CODES = Codes({"optimizers.constants": "F7.7", "optimizers.weight_decay_shrinks": "F7.7"})
_CONSTANTS, _DECAY = CODES
LOST_FRAC = 0.1
"""A setting costs something where it takes this share of what training learns without it (rule of thumb)."""
_MOST_FRAC = 0.5
"""Where the selected metric lacks this much, a better fit is none (rule of thumb)."""
_ALL_FRAC = 0.9
"""Where it takes this much, training does not work (rule of thumb)."""
_NOISE_SDS = 2.0
_MEANS = {
    "momentum": "gradients are averaged over {memory:,.0f} steps",
    "beta1": "gradients are averaged over {memory:,.0f} steps",
    "beta2": "squared gradients are averaged over {memory:,.2g} steps",
    "rho": "squared gradients are averaged over {memory:,.2g} steps",
    "eps": "it is added to the root mean square of the gradients, and a step is about lr only where that is much larger",
}


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A setting, and the run with the usual value in its place.

    Attributes:
        own, usual: value of the config's `field` in the baseline and in the other run.
        loss: training loss at the end of either, the last tenth.
        select, lost: see `lost_by`.
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
        return "ok" if not self.costs else "fail" if self.lost >= _ALL_FRAC else "warn"

    @property
    def words(self) -> str:
        """Where both runs end."""
        ends = [f"{value:.3g}" if math.isfinite(value) else "no finite number" for value in self.loss]
        also = ""
        if self.select is not None:
            also = f" (the selected metric at {self.select[1]:.3g} instead of {self.select[0]:.3g})"
        return f"with {self.field}={self.usual:g} the training loss ends at {ends[1]} instead of {ends[0]}{also}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def replaced(record: RecordLike) -> dict[str, list[Replaced]]:
    """Return code -> the settings that were replaced for it, what costs most first; its facts may hold "replaced"."""
    rows = (record.facts.get("replaced") or {}).get("rows", ())
    curves = {c.trial: c for c in judged(record).curves if c.finished} if rows else {}
    found: dict[str, list[Replaced]] = {}
    for row in rows:
        own, other = (curves.get(int(row[name])) for name in ("baseline", "trial"))
        if own is None or other is None:
            continue
        lost, select = lost_by(record, own, other)
        norms = [last_norm(c) for c in (own, other)]
        found.setdefault(row["code"], []).append(Replaced(
            field=row["field"], own=row["own"], usual=row["usual"], loss=(objective(own), objective(other)), lost=lost, select=select,
            norm=norms[0] / norms[1] if all(map(math.isfinite, norms)) and norms[1] > 0 else None,
        ))  # fmt: skip
    return {code: sorted(each, key=lambda r: -r.lost) for code, each in found.items()}


def lost_by(record: RecordLike, own: TrialCurve, other: TrialCurve) -> tuple[float, tuple[float, float] | None]:
    """Return the share of what another run of the same length and seed learns that one lacks, and the selected metric at the end of either.

    In training and by the selected metric, the smaller of the two, because a worse fit that generalises as well costs nothing,
    unless the metric is lost for the most part. 0 where it may be noise.
    """
    ends = (objective(own), objective(other))
    start = ignorance(initial_losses([own], [own])[0], own.chance)
    gain, se = paired_difference(own, other)
    sure = gain > _NOISE_SDS * (se if math.isfinite(se) else 0.0) or not ends[0] < start
    lost = _share_lost(start, *ends) if sure else 0.0
    sign = metric_sign(record)
    values = [selected_rows(record, c.trial).sort_values("step")["value"].tolist() for c in (own, other)]
    if not all(values) or not math.isfinite(values[1][-1]):
        return lost, None
    first, select = float(values[0][0]), (float(values[0][-1]), float(values[1][-1]))
    first = ignorance(first, own.chance) if str(record.config["select"]).endswith("/loss") else first
    also = _share_lost(sign * first, sign * select[0], sign * select[1])
    return also if also >= _MOST_FRAC else min(lost, also), select


def _share_lost(start: float, own: float, other: float) -> float:
    """Return the share of `start - other` that `own` lacks, from 0 to 1; all of it where `own` is not finite."""
    learned = start - other
    if not learned > 0:
        return 0.0
    return min(max((own - other) / learned, 0.0), 1.0) if math.isfinite(own) else 1.0


def diagnose_replaced(record: RecordLike) -> Diagnosis:
    """Say whether a constant of the update rule, or its weight decay, keeps the baseline from learning."""
    facts = record.facts.get("replaced")
    if not facts:
        reason = why_missing(record.facts, "replaced", "nobody looked for unusual settings")
        return Diagnosis.of(record, [CODES.finding(code, "not_measured", reason) for code in CODES])
    found = replaced(record)
    return Diagnosis.of(record, [_constants(found, facts["constants"]), _decay(found, facts["constants"])])


def _constants(found: Mapping[str, list[Replaced]], constants: Mapping[str, float]) -> Finding:
    known = {name: value for name, value in constants.items() if name in _MEANS}
    if _CONSTANTS not in found:
        shown = ", ".join(f"{name}={value:g}" for name, value in known.items())
        summary = f"The constants of the update rule are usual: {shown}."
        summary = summary if shown else "Does not apply: the update rule has no constant that is known."
        return CODES.finding(_CONSTANTS, "ok", summary, evidence={"constants": known})
    worst = found[_CONSTANTS][0]
    head = f"{worst.field}={worst.own:g} is unusual ({worst.usual:g} is usual)"
    costs = "keeps training from learning" if worst.costs else "costs little"
    means = _MEANS[worst.field].format(memory=1 / max(1 - worst.own, 1e-12))
    advice = [f"Set {worst.field}={worst.usual:g}: at {worst.own:g}, {means}. Then tune the learning rate."]
    return CODES.finding(
        _CONSTANTS, worst.status, f"{head}, and {costs}: {worst.words}.", value=worst.own, threshold=worst.usual,
        evidence={"constants": known, "replaced": [each.to_dict() for each in found[_CONSTANTS]]},
        advice=advice if worst.costs else (),
    )  # fmt: skip


def _decay(found: Mapping[str, list[Replaced]], constants: Mapping[str, float]) -> Finding:
    decay = constants.get("weight_decay", 0.0)
    if _DECAY not in found:
        small = f"Weight decay {decay:g} is small beside the gradients, or adds up to little over the run."
        summary = small if decay else "No weight decay is set, so none can shrink the weights."
        return CODES.finding(_DECAY, "ok", summary, evidence={"weight_decay": decay})
    worst = found[_DECAY][0]
    norms = "" if worst.norm is None else f", and the weights at {worst.norm:.2g} times their length"
    costs = "keeps training from learning" if worst.costs else "costs little"
    advice = [
        "Set weight_decay=0, or find out how much helps from there: what it takes is the sum of lr * weight_decay over the steps, so "
        "a larger lr, a longer run and momentum ask for less of it."
    ]
    return CODES.finding(
        _DECAY, worst.status, f"Weight decay {decay:g} {costs}: {worst.words}{norms}.", value=worst.norm,
        unit="norm of the weights / that without decay", evidence={"weight_decay": decay, "replaced": [worst.to_dict()]},
        advice=advice if worst.costs else (),
    )  # fmt: skip
