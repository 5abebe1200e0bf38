"""What a rule's constants and weight decay cost: a second moment out of date, shrunken weights, settings far from usual.

Where gradients grow at once, Adam's average of squares, which reaches 1 / (1 - beta2) steps back, is out of date and the step longer than
the learning rate says (Wortsman et al. 2023, arXiv:2304.13013). That alone is no proof; the same run with a shorter memory is. What a
setting far from usual costs is told by the same run with the usual value (`topics/recommendation/collect.py` trains it).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.instability import Rise, ignorance
from workbench.curves.judged import judged
from workbench.curves.selection import metric_sign, selected_rows, unlearned
from workbench.curves.sweep import objective, paired_difference
from workbench.curves.trial_curves import RecordLike, TrialCurve, TrialVerdict, initial_losses, judge
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status
from workbench.topics.optimizers.rule_ranges import rule_view, rules_in

CODES = Codes({"optimizers.constants": "F7.7", "optimizers.weight_decay_shrinks": "F7.7"})
_CONSTANTS, _DECAY = CODES
LOST_FRAC = 0.1
"""A setting costs something where it takes this share of what training learns without it (rule of thumb)."""
_LEAST_FRAC = 0.02  # or this one (O1 calls differences of 2 % equal), of a constant without which both losses are
_EASED_FRAC = (
    0.25  # so much lower: what is learned of a loss that begins far above its end tells little (rule of thumb)
)
_MOST_FRAC = 0.5  # where the selected metric lacks this much, a better fit is none (rule of thumb)
ALL_FRAC = 0.9  # where it takes this much, training does not work (rule of thumb)
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
    """A setting, and the run with the usual value in its place."""

    field: str
    own: float
    usual: float
    loss: tuple[float, float]
    select: tuple[float, float] | None
    lost: float
    norm: float | None

    fit_only: bool = False

    @property
    def costs(self) -> bool:
        """Whether the baseline is worth mending; a worse fit alone is what weight decay is there for, unless next to nothing is learned."""
        of_rule = self.field in _MEANS or self.field == "weight_decay"
        if of_rule and not self.fit_only and self.lost >= _LEAST_FRAC and self.eased >= _EASED_FRAC:
            return True
        return self.lost >= (ALL_FRAC if self.fit_only and self.field == "weight_decay" else LOST_FRAC)

    @property
    def eased(self) -> float:
        """Share of the training loss, and of the loss that selects, that the usual value takes away; 0 or less for a metric that is better when larger."""
        pairs = (self.loss, self.select or (0.0, 0.0))
        return min(1 - other / own if other >= 0 < own < math.inf else 0.0 for own, other in pairs)

    @property
    def status(self) -> Status:
        """How bad it is: "fail" where next to nothing is learned."""
        return "ok" if not self.costs else "fail" if self.lost >= ALL_FRAC else "warn"

    @property
    def effect(self) -> str:
        """What it does to the training, in words."""
        if self.lost >= LOST_FRAC:
            return "keeps training from learning" if self.costs else "costs little"
        return "leaves the loss higher" if self.costs else "costs little"

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
            fit_only=str(record.config["select"]).startswith("train/"),
            norm=norms[0] / norms[1] if all(map(math.isfinite, norms)) and norms[1] > 0 else None,
        ))  # fmt: skip
    return {code: sorted(each, key=lambda r: -r.lost) for code, each in found.items()}


def lost_by(record: RecordLike, own: TrialCurve, other: TrialCurve) -> tuple[float, tuple[float, float] | None]:
    """Return the share of what another run of the same length and seed learns that one lacks, and the selected metric at the end of either."""
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
    also = _share_lost(unlearned(record, first, own.chance), sign * select[0], sign * select[1])
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
        return Diagnosis.of(record, CODES.missing(record.facts, "replaced", "unusual settings were not looked for"))
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
    means = _MEANS[worst.field].format(memory=1 / max(1 - worst.own, 1e-12))
    advice = [f"Set {worst.field}={worst.usual:g}: at {worst.own:g}, {means}. Then tune the learning rate."]
    return CODES.finding(
        _CONSTANTS, worst.status, f"{head}, and {worst.effect}: {worst.words}.", value=worst.own, threshold=worst.usual,
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
    advice = [
        "Set weight_decay=0, or find out how much helps from there: its effect is the sum of lr * weight_decay over the steps, so "
        "a larger lr, a longer run and momentum need less of it."
    ]
    return CODES.finding(
        _DECAY, worst.status, f"Weight decay {decay:g} {worst.effect}: {worst.words}{norms}.", value=worst.norm,
        unit="norm of the weights / that without decay", evidence={"weight_decay": decay, "replaced": [worst.to_dict()]},
        advice=advice if worst.costs else (),
    )  # fmt: skip


FloatArray = NDArray[np.float64]
MEMORY_FIELD = {"adam": "beta2", "nadam": "beta2", "adamw": "beta2", "rmsprop": "rho"}
"""The config field that says how far back a rule's second moment reaches."""


class StaleMoment(NamedTuple):
    """A rise of the loss that began with a second moment out of date."""

    trial: TrialVerdict
    rise: Rise
    field: str
    memory: float
    step: int
    ratio: float


def staleness(grad_norm: ArrayLike, memory: float) -> FloatArray:
    """Return by which factor an out-of-date second moment makes each step longer, shape (steps,); NaN where a gradient is not finite.

    It is |g| over the root of the bias-corrected average of |g|^2 that the update divides by: 1 for steady gradients and at the
    first step, at most 1 / sqrt(1 - memory). `memory` is beta2 of adam, nadam and adamw, rho of rmsprop; of the norm over all parameters,
    shape (steps,), it is smaller than of a single tensor's.
    """
    squares = np.square(np.asarray(grad_norm, dtype=np.float64).ravel())
    found = np.full(squares.size, np.nan)
    average, weight = 0.0, 0.0
    for step, square in enumerate(squares):
        if not np.isfinite(square):
            continue
        average, weight = memory * average + (1 - memory) * square, memory * weight + (1 - memory)
        found[step] = np.sqrt(square * weight / average) if average > 0 else 1.0
    return found


def shorter(memory: float, factor: float) -> float:
    """Return the decay whose memory reaches back `factor` times fewer steps: 0.999 and 10 give 0.99."""
    return round(1.0 - factor * (1.0 - memory), 12)


def stale_moments(
    record: RecordLike, *, ratio: float = 2.3, before_steps: int = 8, min_memory_steps: float = 50.0
) -> list[StaleMoment]:
    """Return for each adaptive rule the rise at its smallest learning rate that began with an out-of-date second moment.

    Args:
        ratio: from which factor on a second moment is out of date (the threshold of Wortsman et al. for single tensors; for the
            norm over all parameters a rule of thumb).
        before_steps: how many steps before the rise to look (the same source: spikes follow within 1 to 8 steps).
        min_memory_steps: a rule that reaches back fewer steps has no long memory (rule of thumb).
    """
    found = []
    for name in (n for n in rules_in(record) if n in MEMORY_FIELD):
        view, field = rule_view(record, name), MEMORY_FIELD[name]
        memory = float(view.config[field])
        if 1.0 / (1.0 - memory) < min_memory_steps:
            continue
        trials = sorted(judge(view.full_length, view.full_length), key=lambda item: (item.curve.lr, item.curve.seed))
        hits = (hit for item in trials for hit in _rises(item, field, memory, before_steps) if hit.ratio >= ratio)
        found += [hit for hit in [next(hits, None)] if hit is not None]
    return found


def _rises(item: TrialVerdict, field: str, memory: float, before_steps: int) -> Iterator[StaleMoment]:
    """Yield each rise with the step about its onset at which the second moment was most out of date, and by how much."""
    steps, half = item.curve.steps, item.verdict.width // 2
    if "grad_norm" not in steps.columns or not item.verdict.rises:
        return
    ratios = staleness(steps["grad_norm"].to_numpy(dtype=np.float64), memory)
    for rise in item.verdict.rises:
        onset = item.curve.row(rise.onset_step)
        low = max(onset - before_steps - half, 0)
        window = ratios[low : onset + 2 + half]
        if np.isfinite(window).any():
            at = int(np.nanargmax(window))
            yield StaleMoment(item, rise, field, memory, low + at, float(window[at]))


def last_norm(curve: TrialCurve) -> float:
    """Return the last norm of the weights that was recorded; NaN without one."""
    norms = curve.steps["param_norm"].dropna().tolist() if "param_norm" in curve.steps.columns else []
    return float(norms[-1]) if norms else math.nan
