"""`prove`: a candidate against the baseline over seeds, by selected checkpoints, seed by seed (P4.7, F3.12).

Each seed gives both arms the same initial weights and the same batches, so the difference within a seed is what counts.
How likely a mean gain of that size is where nothing is gained follows from the spread over the seeds (Student's t, one-sided).
Losses are compared by their ratio: they differ by factors, and one seed that blew up would drown the others in a difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from workbench.curves.adoption import by_size
from workbench.curves.same_config import trials_with
from workbench.curves.selection import selected_by_seed, spacing, starts_by_seed
from workbench.curves.trials import RecordLike

__all__ = ["LIMIT", "p_value", "p_words", "prove", "worth_more_seeds"]

LIMIT = 0.05
"""Largest p of one look at the seeds (rule of thumb). The two looks of `worth_more_seeds` adopt 8 % of what is no better (simulated)."""
MOST_FLIPPED = 10
"""Seeds up to which all signs are tried: 2 ** 10 sums."""


def prove(
    record: RecordLike,
    *,
    baseline: Mapping[str, Any],
    candidate: Mapping[str, Any],
    limit: float = LIMIT,
    min_seeds: int = 2,
) -> dict[str, Any] | None:
    """Compare a candidate with the baseline over the seeds that both were trained with.

    The baseline's own seed is left out: the candidate was chosen under it, and luck that was chosen is no evidence.

    A candidate that trains longer than the baseline has to win against a baseline of its own length as well, which must
    not lose by its length alone; where that was not trained, nothing is proved. What diverges under every seed has lost to a
    candidate that diverges under none.

    Args:
        record: a study.
        baseline: config fields of the baseline.
        candidate: config fields of the candidate.
        limit: a candidate wins where p is below this.
        min_seeds: fewer prove nothing (the fewest that have a spread).

    Returns:
        select, seeds, candidate (its values), arms (each with name, total_steps, values, gains, gain, se, ratios, chance (p), None where it
        diverges under every seed and the candidate under none),
        learned (what the better of candidate and baseline gained on the untrained model, None where that was not evaluated), level
        (the limit), wins, said (the numbers) and verdict; None where fewer than `min_seeds` seeds were trained. ratios, of a seed's
        loss to that of the arm, are None for other metrics.
    """
    arms = {"baseline": dict(baseline)}
    if candidate["total_steps"] > baseline["total_steps"]:
        arms["baseline of the same length"] = dict(baseline) | {"total_steps": candidate["total_steps"]}
    chosen, numbers = trials_with(record, candidate), {name: trials_with(record, arms[name]) for name in arms}
    every = spacing(record, [*chosen, *itertools.chain(*numbers.values())])
    ours = selected_by_seed(record, chosen, every=every)
    theirs = {name: selected_by_seed(record, found, every=every) for name, found in numbers.items()}
    seeds = sorted(set(ours).intersection(*theirs.values()) - {int(record.config["shared_seed"])})
    if len(seeds) < min_seeds:
        return None
    sign, select = 1.0 if record.config["select_mode"] == "min" else -1.0, str(record.config["select"])
    values = [ours[seed] for seed in seeds]
    held = {name: [found[seed] for seed in seeds] for name, found in theirs.items()}
    by_ratio = sign > 0 and min(itertools.chain(values, *held.values())) > 0
    rows = [_arm(name, int(arms[name]["total_steps"]), held[name], values, sign, by_ratio=by_ratio) for name in arms]
    if not any(_diverged(record, chosen, seeds)):
        rows = [row | {"chance": None} if all(_diverged(record, numbers[row["name"]], seeds)) else row for row in rows]
    starts = [start for seed, start in starts_by_seed(record, chosen).items() if seed in seeds]
    best = min(float(np.mean([sign * v for v in found])) for found in (values, held["baseline"]))
    worst = max(rows, key=lambda row: row["chance"] or 0.0)
    wins = (worst["chance"] or 0.0) < limit
    return {
        "select": select,
        "seeds": seeds,
        "candidate": values,
        "arms": rows,
        "learned": sign * float(np.mean(starts)) - best if starts else None,
        "level": limit,
        "wins": wins,
        "said": _said(select, values, rows),
        "verdict": _verdict(worst, len(seeds), limit, several=len(rows) > 1),
    }


def worth_more_seeds(proof: Mapping[str, Any] | None, *, min_seeds: int = 3) -> bool:
    """Return whether a candidate that was not adopted gained enough in the mean for more seeds to decide.

    Three seeds leave a gain of 1.5 standard deviations unproven in 22 % of cases, five in 12 % (simulated).

    Args:
        proof: of `prove`.
        min_seeds: fewer gain together too often where nothing is gained (2 of 2 seeds: one time in four).
    """
    if proof is None or proof["wins"] or len(proof["seeds"]) < min_seeds:
        return False
    gain = min(arm["gain"] for arm in proof["arms"])
    return gain > 0 and not by_size(gain, proof["learned"])


def p_value(gains: Sequence[float], *, flip_from: int = 5) -> float:
    """Return how likely a mean gain of this size is where nothing is gained.

    The smaller of Student's t, one-sided, and, from `flip_from` values on, the share of all choices of their signs that give as
    large a mean: exact whatever the spread.

    Args:
        gains: one a seed.
        flip_from: fewer than 5 values cannot come below 5 % by their signs.
    """
    mean, se = _mean_and_se(gains)
    if se == 0:  # seeds that all gain the same leave nothing to chance
        return float(mean <= 0)
    chance = float(stats.t.sf(mean / se, df=len(gains) - 1))
    if not flip_from <= len(gains) <= MOST_FLIPPED:
        return chance
    sums = np.array(list(itertools.product((1.0, -1.0), repeat=len(gains)))) @ np.asarray(gains)
    return min(chance, float((sums >= sum(gains) * (1 - 1e-12)).mean()))


def _diverged(record: RecordLike, numbers: Sequence[int], seeds: Sequence[int]) -> list[bool]:
    """Return for each trial under one of `seeds` whether it ended non-finite."""
    rows = record.trials[record.trials["trial"].isin(numbers) & record.trials["seed"].isin(seeds)]
    return (rows["state"] == "diverged").tolist()


def _verdict(worst: Mapping[str, Any], seeds: int, limit: float, *, several: bool) -> str:
    """Return p of the arm that is hardest to beat, or that it diverges."""
    if worst["chance"] is None:
        return f"the {worst['name']} diverges under each of n = {seeds} seeds, the candidate under none"
    against = f", against the {worst['name']}" if several and worst["chance"] >= limit else ""
    return f"{p_words(worst['chance'])} over n = {seeds} seeds (limit {limit:g}){against}"


def _arm(
    name: str, total_steps: int, theirs: list[float], ours: list[float], sign: float, *, by_ratio: bool
) -> dict[str, Any]:
    gains = [sign * (their - our) for their, our in zip(theirs, ours, strict=True)]
    gain, se = _mean_and_se(gains)
    ratios = [our / their for their, our in zip(theirs, ours, strict=True)] if by_ratio else None
    return {
        "name": name,
        "total_steps": total_steps,
        "values": theirs,
        "gains": gains,
        "gain": gain,
        "se": se,
        "ratios": ratios,
        "chance": p_value([-math.log(ratio) for ratio in ratios] if ratios else gains),
    }


def p_words(p: float) -> str:
    """Return p as it is written, with two digits."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _said(select: str, values: list[float], rows: list[dict[str, Any]]) -> str:
    said = "; ".join(f"{row['name']} {np.mean(row['values']):.4g}: {_difference(row)}" for row in rows)
    return f"{select} of the selected checkpoints, mean over {len(values)} fresh seeds: {np.mean(values):.4g} against {said}."


def _difference(row: dict[str, Any]) -> str:
    """Return how far the candidate lies from an arm: seed by seed as shares of its loss, or as a mean with its error."""
    if row["ratios"] is None:
        return f"{'better' if row['gain'] >= 0 else 'worse'} by {abs(row['gain']):.2g} +- {row['se']:.2g}"
    return f"seed by seed {', '.join(f'{ratio - 1:+.0%}' for ratio in row['ratios'])}"
