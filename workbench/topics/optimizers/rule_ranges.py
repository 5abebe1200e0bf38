"""The range of learning rates in which each update rule trains, trials beside control runs, and which rule is better than the baseline's.

The other rule is chosen under one seed and held against the baseline's under fresh ones, because the best of six is lucky too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.curves.judged import JudgedStudy, judged
from workbench.curves.lr_search import lr_best, unstable_bracket
from workbench.curves.seed_comparison import prove
from workbench.curves.selection import compare_selected, metric_sign, selected_by_seed, selected_rows
from workbench.curves.sweep import LRPoint, paired_difference
from workbench.curves.trial_curves import RecordLike, TrialVerdict, equal, judge, plain_cell
from workbench.record.json_values import number
from workbench.record.roles import POINTS, Role

_NO_POINTS = (Role.OPTIMIZERS_RANGE, Role.OPTIMIZERS_SEEDS, Role.OPTIMIZERS_TWIN)


@dataclass(frozen=True, kw_only=True)
class RuleRange:
    """The lrs around lr* at which one update rule trains: stable, with an end loss within a tenth of what the rule learned.

    Attributes:
        points, progress: the measurements in order of lr, and what the rule learned at best.
        sign: 1 where a smaller selected metric is the better one, else -1.
        best_lr: lr*, None where no lr learned anything; then so is all else.
        low, high: interval of lrs that are as good.
        trains_from, trains_to: smallest and largest lr that train, without a gap.
        fails_below, fails_above: the next smaller and larger lr tried, which do not; None where none was tried.
        stable, unstable: largest lr below `unstable` that is not unstable without recovery, and the smallest above lr* that is.
        selected_lr, selected, selected_trial: of the best selected checkpoint among the lrs that train, under the first seed.
        decades, most_decades: between the ends that train, and those that fail; infinite where an end was not found.
    """

    optimizer: str
    points: tuple[LRPoint, ...]
    progress: float
    sign: float
    top: float | None
    best_lr: float | None = None
    low: float | None = None
    high: float | None = None
    loss: float = math.nan
    loss_se: float = math.nan
    trains_from: float | None = None
    trains_to: float | None = None
    fails_below: float | None = None
    fails_above: float | None = None
    stable: float | None = None
    unstable: float | None = None
    selected_lr: float | None = None
    selected: float | None = None
    selected_trial: int | None = None
    decades: float | None = None
    most_decades: float = math.inf
    trial: int | None = None

    def row(self) -> dict[str, Any]:
        """Return what a figure and a table need of a rule, as JSON values."""
        names = (
            "optimizer", "best_lr", "low", "high", "loss", "loss_se", "trains_from", "trains_to", "fails_below", "fails_above", "stable",
            "unstable", "top", "selected_lr", "selected", "decades", "most_decades",
        )  # fmt: skip
        points = [{"lr": p.lr, "loss": p.loss, "unstable": p.unstable, "trials": list(p.trials)} for p in self.points]
        return {name: getattr(self, name) for name in names} | {"points": points}


def _decades(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else math.log10(high / low)


def rules_in(record: RecordLike) -> list[str]:
    """Return the rules that a study has trained at full length, the baseline's own first."""
    trials, own = record.trials, str(record.config.get("optimizer"))
    if not len(trials):
        return []
    there = trials["optimizer"][~trials["stage"].isin(_NO_POINTS)].astype(str).tolist()
    return [name for name in dict.fromkeys([own, *there]) if name in there]


def rule_view(record: RecordLike, optimizer: str) -> JudgedStudy:
    """Return the trials of one rule as a sweep of their own; those of the baseline's rule count whatever they were run for."""
    table = record.trials
    trials = table[table["optimizer"].astype(str) == optimizer] if len(table) else table
    return JudgedStudy(record, trials=trials, config={"optimizer": optimizer}, points=POINTS | {Role.OPTIMIZERS})


def read_ranges(record: RecordLike, *, trains_frac: float = 0.1) -> dict[str, RuleRange]:
    """Return the range of every rule of a study, the baseline's own first.

    An lr trains where its end loss is above the rule's best by no more than `trains_frac` of what the rule learned (rule of thumb).
    """
    return {name: _range(rule_view(record, name), name, trains_frac) for name in rules_in(record)}


def _range(view: JudgedStudy, optimizer: str, trains_frac: float) -> RuleRange:
    table = view.sweep()
    points, best, bracket, sign = table.points, lr_best(table), unstable_bracket(table), metric_sign(view)
    known: dict[str, Any] = {
        "optimizer": optimizer, "points": points, "progress": table.progress, "sign": sign, "top": points[-1].lr if points else None,
    }  # fmt: skip
    if best is None or table.best is None:
        return RuleRange(**known)
    limit = points[table.best].loss + trains_frac * table.progress
    good = [not p.unstable and p.loss <= limit for p in points]
    first = last = table.best
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(points) and good[last + 1]:
        last += 1
    seed = int(view.config.get("shared_seed") or 0)  # the baseline's own, which the search used
    fails_below = points[first - 1].lr if first else None
    fails_above = points[last + 1].lr if last + 1 < len(points) else None
    selected = [
        (sign * value, point.lr, trial)
        for point in points[first : last + 1]
        for trial in [t for s, t in zip(point.seeds, point.trials, strict=True) if s == seed][:1]
        for value in selected_by_seed(view, [trial]).values()
    ]
    if selected:
        value, lr, number = min(selected)
        known |= {"selected_lr": lr, "selected": sign * value, "selected_trial": number}
    at = best.point
    return RuleRange(
        best_lr=best.lr, low=best.low, high=best.high, loss=at.loss, loss_se=at.loss_se,
        trains_from=points[first].lr, trains_to=points[last].lr, fails_below=fails_below, fails_above=fails_above,
        stable=None if bracket is None else bracket.lower, unstable=None if bracket is None else bracket.upper,
        decades=_decades(points[first].lr, points[last].lr), most_decades=_decades(fails_below, fails_above) or math.inf,
        trial=dict(zip(at.seeds, at.trials, strict=True)).get(seed, at.trials[0] if at.trials else None), **known,
    )  # fmt: skip


def ends_next(
    found: RuleRange, *, ratio: float = 2.0, factor: float = 4.0, lowest: float = 0.0, highest: float = math.inf
) -> tuple[float, ...]:
    """Return the lrs between `lowest` and `highest` that narrow the two ends of a range; () where both are narrow enough.

    The uncertainty of the edge may stay `ratio` wide; `factor` is the step outwards while every lr tried trains (rules of thumb).
    """
    ends = ((found.trains_from, found.fails_below, 1 / factor), (found.trains_to, found.fails_above, factor))
    wanted = []
    for trains, fails, step in ends:
        if trains is not None and fails is None:
            wanted.append(trains * step)
        elif trains is not None and fails is not None and max(trains / fails, fails / trains) > ratio * (1 + 1e-9):
            wanted.append(math.sqrt(trains * fails))
    return tuple(lr for lr in wanted if lowest <= lr <= highest)


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A trial, and a control run with one field changed.

    Attributes:
        gain, gain_se: mean training loss of the trial less that of the control run over the last tenth of the steps, and its
            standard error: above 0 the control run is better.
    """

    field: str
    before: Any
    after: Any
    own: TrialVerdict
    twin: TrialVerdict
    gain: float
    gain_se: float

    @property
    def optimizer(self) -> str:
        """The rule of both."""
        return str(self.own.curve.config["optimizer"])

    def differs(self, *, noise_sds: float, material_frac: float) -> bool:
        """Tell whether one alone is stable, or they end at different losses by more than the noise."""
        noise = self.gain_se if math.isfinite(self.gain_se) else 0.0
        bar = max(noise_sds * noise, material_frac * self.own.verdict.progress)
        return self.own.verdict.is_lasting != self.twin.verdict.is_lasting or abs(self.gain) > bar

    def to_dict(self) -> dict[str, Any]:
        """Return both as JSON values."""
        return {
            "optimizer": self.optimizer, "lr": self.own.curve.lr, "field": self.field, "before": self.before,
            "after": self.after, "trial": self.own.curve.trial, "twin": self.twin.curve.trial,
            "outcome": self.own.verdict.outcome, "twin_outcome": self.twin.verdict.outcome, "gain": self.gain,
            "gain_se": self.gain_se, "progress": self.own.verdict.progress,
        }  # fmt: skip


def read_twins(record: RecordLike, field: str) -> list[Twin]:
    """Return the trials that have a control run ("optimizers_twin") which differs in `field` alone, in order of its number."""
    if not len(record.trials):
        return []
    curves = {c.trial: c for c in judged(record).curves if c.finished}
    rows = record.trials.to_dict("records")
    others, found = [row for row in rows if row["stage"] != Role.OPTIMIZERS_TWIN], []

    def differ_by(own: Mapping[Any, Any], twin: Mapping[Any, Any]) -> list[str]:
        return [n for n in record.config if not equal(plain_cell(own[n]), plain_cell(twin[n]))]

    for twin in (row for row in rows if row["stage"] == Role.OPTIMIZERS_TWIN):
        own = next((row for row in others if differ_by(row, twin) == [field]), None)
        if own is None or not {int(own["trial"]), int(twin["trial"])} <= curves.keys():
            continue
        numbers = [int(own["trial"]), int(twin["trial"])]
        first, second = judge([curves[n] for n in numbers], rule_view(record, str(own["optimizer"])).full_length)
        gain, se = paired_difference(first.curve, second.curve)
        found.append(Twin(
            field=field, before=plain_cell(own[field]), after=plain_cell(twin[field]), own=first, twin=second, gain=gain, gain_se=se,
        ))  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The best other rule against the baseline's, each at the lr of its own best checkpoint."""

    own: RuleRange
    rival: RuleRange
    gain: float  # by how much the rival's selected metric is better, above 0; over fresh seeds where there are any
    learned: float  # what the better of the two learned of that metric, the scale of a gain
    seeds: int
    better: bool  # by more than noise and chance
    wins: bool  # and by enough to matter
    reason: str  # the numbers in words
    proof: Mapping[str, Any] | None

    @property
    def words(self) -> str:
        """How near the rival comes, as a sentence."""
        doubt = "" if self.seeds else "; one seed cannot tell that from chance"
        if self.better and not self.wins:
            doubt = (
                f", but the gain is negligible, {abs(self.gain) / self.learned:.2g} of what was learned"
                if self.learned > 0
                else ""
            )
        return f"The best other, {self.rival.optimizer}, is {'ahead' if self.gain > 0 else 'behind'}: {self.reason}{doubt}."

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "rival": self.rival.optimizer, "lr": self.rival.selected_lr, "own_lr": self.own.selected_lr, "gain": self.gain,
            "learned": self.learned, "fresh_seeds": self.seeds, "wins": self.wins, "reason": self.reason, "proof": self.proof,
        }  # fmt: skip


def rival(ranges: Mapping[str, RuleRange]) -> RuleRange | None:
    """Return the other rule with the best selected checkpoint under the search's seed; None where there is none."""
    others = [found for found in list(ranges.values())[1:] if found.selected is not None]
    return min(others, key=lambda found: found.sign * (found.selected or 0.0), default=None)


def contest(
    record: RecordLike, ranges: Mapping[str, RuleRange], *, gain_frac: float, false_adoption: float
) -> Contest | None:
    """Hold the best other rule against the baseline's; None where one of them has no checkpoint to select.

    A gain below the share `gain_frac` of what was learned does not count; for `false_adoption` see `prove`.
    """
    own, other = next(iter(ranges.values()), None), rival(ranges)
    if own is None or other is None or own.selected is None or other.selected is None:
        return None
    arms = [dict(record.config) | {"optimizer": each.optimizer, "peak_lr": each.selected_lr} for each in (own, other)]
    fresh = prove(record, baseline=arms[0], candidate=arms[1], limit=false_adoption)
    numbers = [int(each.selected_trial or 0) for each in (own, other)]
    learned = _learned(record, own, other)
    if fresh is not None:
        arm = fresh["arms"][0]
        gain, better, means = arm["gain"], fresh["wins"], [np.mean(fresh["candidate"]), np.mean(arm["values"])]
        reason = (
            f"{fresh['select']} {means[0]:.4g} against {own.optimizer}'s {means[1]:.4g} over {len(fresh['seeds'])} fresh "
            f"seeds; chance alone gives such a gain in {arm['chance']:.1%} of cases"
        )
    else:
        pair = compare_selected(record, baseline=numbers[:1], candidates={other.optimizer: numbers[1:]})
        gain, better = pair["gain"], pair["adopted"]
        against = f"{other.selected:.4g} against {own.optimizer}'s {own.selected:.4g}"
        reason = f"{record.config['select']} {against}, one run each"
    return Contest(
        own=own, rival=other, gain=gain, learned=learned, seeds=0 if fresh is None else len(fresh["seeds"]), better=bool(better),
        wins=bool(better and gain > gain_frac * learned), reason=reason, proof=fresh,
    )  # fmt: skip


def wider_than(
    record: RecordLike, ranges: Mapping[str, RuleRange], *, noise_sds: float, material_frac: float, wider_decades: float
) -> list[tuple[RuleRange, float]]:
    """Return the rules whose range is wider than that of the baseline's for certain, with by how many decades; widest first."""
    own = next(iter(ranges.values()), None)
    if own is None or own.best_lr is None:
        return []
    curves, found = {c.trial: c for c in judged(record).curves}, []
    for other in list(ranges.values())[1:]:
        more, worse, se = (other.decades or -math.inf) - own.most_decades, math.inf, 0.0
        if other.trial in curves and own.trial in curves:
            worse, error = paired_difference(curves[other.trial], curves[own.trial])
            se = error if math.isfinite(error) else 0.0
        bar = max(noise_sds * se, material_frac * max(own.progress, other.progress))
        if more >= wider_decades and worse <= bar:
            found.append((other, more))
    return sorted(found, key=lambda pair: -pair[1])


def _learned(record: RecordLike, own: RuleRange, other: RuleRange) -> float:
    """Return what the better of two rules learned of the selected metric, from the initial model on."""
    rows = selected_rows(record, int(own.selected_trial or 0))
    start = number(next(iter(rows.loc[rows["step"] == 0, "value"]), None))
    best = [abs(start - found.selected) for found in (own, other) if found.selected is not None]
    return max(best) if math.isfinite(start) else 0.0
