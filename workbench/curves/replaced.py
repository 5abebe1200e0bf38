"""`replaced`: what a baseline loses by a setting that is far from usual, by the same run with the usual value (`topics/recommendation/replaced.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.curves.classify import ignorance
from workbench.curves.judged import equal, judged, plain_cell
from workbench.curves.rules import TWIN, rule_view
from workbench.curves.selection import selected_by_seed
from workbench.curves.sweep import objective, paired_difference
from workbench.curves.trials import RecordLike, TrialCurve, TrialVerdict, initial_loss, judge
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, Status
from workbench.record.read import periodic_rows

TWIN_FIELDS = ("rules", "weight_decay", "beta2", "rho")
"""What a twin may differ in."""


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A trial, and the same with one field changed.

    Attributes:
        field: what differs.
        before, after: its value in the trial and in the twin.
        own, twin: both with their stability verdict.
        gain: mean training loss of the trial less that of the twin over the last tenth of the steps: above 0 the twin is better.
        gain_se: standard error of that.
        selected_gain: the same of the selected metric of the best checkpoints; None where it was not evaluated.
        progress: what the rule learned at best.
    """

    field: str
    before: Any
    after: Any
    own: TrialVerdict
    twin: TrialVerdict
    gain: float
    gain_se: float
    selected_gain: float | None
    progress: float

    @property
    def optimizer(self) -> str:
        """The rule of both."""
        return str(self.own.curve.config["optimizer"])

    def differs(self, *, noise_sds: float, material_frac: float) -> bool:
        """Tell whether the twin trains otherwise: stable where the other is not, or to another loss by more than the noise."""
        if self.own.verdict.is_lasting != self.twin.verdict.is_lasting:
            return True
        return abs(self.gain) > self.bar(noise_sds=noise_sds, material_frac=material_frac)

    def bar(self, *, noise_sds: float, material_frac: float) -> float:
        """Return the smallest difference of the training loss that counts."""
        noise = self.gain_se if math.isfinite(self.gain_se) else 0.0
        return max(noise_sds * noise, material_frac * self.progress)

    def to_dict(self) -> dict[str, Any]:
        """Return both as JSON values."""
        return {
            "optimizer": self.optimizer, "lr": self.own.curve.lr, "field": self.field, "before": self.before,
            "after": self.after, "trial": self.own.curve.trial, "twin": self.twin.curve.trial,
            "outcome": self.own.verdict.outcome, "twin_outcome": self.twin.verdict.outcome, "gain": self.gain,
            "gain_se": self.gain_se, "selected_gain": self.selected_gain, "progress": self.progress,
        }  # fmt: skip


def read_twins(record: RecordLike, field: str) -> list[Twin]:
    """Return the pairs of a study that differ in one field alone, in order of the twin's number.

    Args:
        record: a study with trials of the stage "optimizers_twin".
    """
    if not len(record.trials):
        return []
    rows = [{str(k): v for k, v in row.items()} for row in record.trials.to_dict("records")]
    found = []
    for twin in (row for row in rows if row["stage"] == TWIN):
        for own in (row for row in rows if row["stage"] != TWIN):
            if _differing(own, twin, list(record.config)) == [field]:
                pair = _pair(record, own, twin, field)
                found += [] if pair is None else [pair]
                break
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    return [name for name in fields if not equal(plain_cell(one[name]), plain_cell(other[name]))]


def _pair(record: RecordLike, own: Mapping[str, Any], twin: Mapping[str, Any], field: str) -> Twin | None:
    curves = {c.trial: c for c in judged(record).curves if c.finished}
    numbers = [int(own["trial"]), int(twin["trial"])]
    if not all(number in curves for number in numbers):
        return None
    peers = rule_view(record, str(own["optimizer"])).full_length
    first, second = judge([curves[n] for n in numbers], peers)
    gain, se = paired_difference(first.curve, second.curve)
    sign = 1.0 if record.config.get("select_mode", "min") == "min" else -1.0
    values = [list(selected_by_seed(record, [n]).values()) for n in numbers]
    return Twin(
        field=field,
        before=plain_cell(own[field]),
        after=plain_cell(twin[field]),
        own=first,
        twin=second,
        gain=gain,
        gain_se=se,
        selected_gain=sign * (values[0][0] - values[1][0]) if all(values) else None,
        progress=first.verdict.progress,
    )


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
