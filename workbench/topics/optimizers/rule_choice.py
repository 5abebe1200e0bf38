"""Which update rule is better than the baseline's: by its best checkpoint, or by a wider range of learning rates.

The other rule is chosen under one seed and held against the baseline's under fresh ones, because the best of six is lucky too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.curves.judged import judged
from workbench.curves.seed_comparison import prove
from workbench.curves.selection import compare_selected
from workbench.curves.sweep import paired_difference
from workbench.curves.trial_curves import RecordLike
from workbench.record.read import periodic_rows
from workbench.topics.optimizers.rule_ranges import RuleRange


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The best other rule against the baseline's, each at the lr of its own best checkpoint.

    Attributes:
        gain: by how much the rival's selected metric is better, above 0; over fresh seeds where there are any.
        learned: what the better of the two learned of that metric, the scale of a gain.
        seeds: how many fresh seeds, 0 where only the one of the search was trained.
        wins: better by more than noise and chance, and by enough to matter.
        too_small: better by more than noise and chance, and by too little to matter.
        reason: the numbers in words.
        proof: what `prove` says of the fresh seeds; None without.
    """

    own: RuleRange
    rival: RuleRange
    gain: float
    learned: float
    seeds: int
    wins: bool
    too_small: bool
    reason: str
    proof: Mapping[str, Any] | None

    @property
    def words(self) -> str:
        """How near the rival comes, as a sentence."""
        doubt = "" if self.seeds else ", which one seed cannot tell from chance"
        if self.too_small:
            doubt = f", a gain of {abs(self.gain) / self.learned:.2g} of what was learned, too small to matter"
            doubt = doubt if self.learned > 0 else ""
        return f"The best other one, {self.rival.optimizer}, is {'ahead' if self.gain > 0 else 'behind'}: {self.reason}{doubt}."

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
    if own is None or other is None or own.selected is None or own.selected_lr is None or other.selected_lr is None:
        return None
    arms = [dict(record.config) | {"optimizer": each.optimizer, "peak_lr": each.selected_lr} for each in (own, other)]
    fresh = prove(record, baseline=arms[0], candidate=arms[1], limit=false_adoption)
    learned = _learned(record, own, other)
    if fresh is not None:
        arm = fresh["arms"][0]
        gain, wins, means = arm["gain"], fresh["wins"], [np.mean(fresh["candidate"]), np.mean(arm["values"])]
        reason = (
            f"{fresh['select']} {means[0]:.4g} against {own.optimizer}'s {means[1]:.4g} over {len(fresh['seeds'])} fresh "
            f"seeds; chance alone gives such a gain in {arm['chance']:.1%} of cases"
        )
    else:
        runs = [[_selected_trial(record, each)] for each in (own, other)]
        pair = compare_selected(record, baseline=runs[0], candidates={other.optimizer: runs[1]})
        gain, wins = pair["gain"], pair["adopted"]
        against = f"{other.selected:.4g} against {own.optimizer}'s {own.selected:.4g}"
        reason = f"{record.config['select']} {against}, one run each"
    return Contest(
        own=own, rival=other, gain=gain, learned=learned, seeds=0 if fresh is None else len(fresh["seeds"]),
        wins=bool(wins and gain > gain_frac * learned), too_small=bool(wins and gain <= gain_frac * learned), reason=reason, proof=fresh,
    )  # fmt: skip


def wider_than(
    record: RecordLike, ranges: Mapping[str, RuleRange], *, noise_sds: float, material_frac: float, wider_decades: float
) -> list[tuple[RuleRange, float]]:
    """Return the rules whose range is wider than that of the baseline's for certain, with by how many decades; widest first.

    The brackets of both ends count against them, and so does an end loss that is worse by more than `noise_sds` standard errors of the
    paired difference and `material_frac` of what was learned.
    """
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


def _selected_trial(record: RecordLike, found: RuleRange) -> int:
    first = int(record.config.get("shared_seed") or 0)
    point = next(p for p in found.points if p.lr == found.selected_lr)
    return next(trial for seed, trial in zip(point.seeds, point.trials, strict=True) if seed == first)


def _learned(record: RecordLike, own: RuleRange, other: RuleRange) -> float:
    """Return what the better of two rules learned of the selected metric, from the initial model on."""
    split, metric = str(record.config["select"]).split("/", 1)
    evals = periodic_rows(record.evals)
    rows = evals[(evals["trial"] == _selected_trial(record, own)) & (evals["step"] == 0)]
    rows = rows[(rows["split"] == split) & (rows["metric"] == metric)]
    start = float(rows["value"].iloc[0]) if len(rows) else math.nan
    best = [abs(start - found.selected) for found in (own, other) if found.selected is not None]
    return max(best) if math.isfinite(start) else 0.0
