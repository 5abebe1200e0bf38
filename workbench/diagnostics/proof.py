"""`prove`: a candidate against the baseline over seeds, by selected checkpoints, seed by seed (P4.7, F3.12).

Each seed gives both arms the same initial weights and the same batches, so the difference within a seed is what counts.
How likely a mean gain of that size is where nothing is gained follows from the spread over the seeds (Student's t, one-sided).
Losses are compared by their ratio: they differ by factors, and one seed that blew up would drown the others in a difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from workbench.diagnostics.same_config import trials_with
from workbench.diagnostics.selection import selected_by_seed
from workbench.diagnostics.trials import RecordLike

__all__ = ["LOOK_FRAC", "prove", "worth_more_seeds"]

LOOK_FRAC = 0.89
"""Two looks at this share of a level err together as often as one look at the level (simulated: 9.9 % of 10 % for 3 and 5 seeds)."""


def prove(
    record: RecordLike,
    *,
    baseline: Mapping[str, Any],
    candidate: Mapping[str, Any],
    false_adoption: float = 0.1,
    min_seeds: int = 2,
    looks: int = 1,
) -> dict[str, Any] | None:
    """Compare a candidate with the baseline over the seeds that both were trained with.

    The baseline's own seed is left out: the candidate was chosen under it, and luck that was chosen is no evidence.

    A candidate that trains longer than the baseline has to win against a baseline of its own length as well, which must
    not lose by its length alone; where that was not trained, nothing is proved.

    Args:
        record: a study.
        baseline: config fields of the baseline.
        candidate: config fields of the candidate.
        false_adoption: a candidate wins where its mean gain would come by chance less often than this (rule of thumb: what
            is adopted by mistake is about as good as the baseline).
        min_seeds: fewer prove nothing (the fewest that have a spread).
        looks: 2 where more seeds are trained if these do not decide (`worth_more_seeds`); each look then has to be surer.

    Returns:
        select, seeds, arms (each with name, total_steps, values, gains, gain, se, ratios, chance), level (of one look), wins and reason; None where
        fewer than `min_seeds` seeds were trained. ratios, of a seed's loss to that of the arm, are None for other metrics.
    """
    arms = {"baseline": dict(baseline)}
    if candidate["total_steps"] > baseline["total_steps"]:
        arms["baseline of the same length"] = dict(baseline) | {"total_steps": candidate["total_steps"]}
    ours = selected_by_seed(record, trials_with(record, candidate))
    theirs = {name: selected_by_seed(record, trials_with(record, fields)) for name, fields in arms.items()}
    seeds = sorted(set(ours).intersection(*theirs.values()) - {int(record.config["shared_seed"])})
    if len(seeds) < min_seeds:
        return None
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    values = [ours[seed] for seed in seeds]
    every = {name: [found[seed] for seed in seeds] for name, found in theirs.items()}
    by_ratio = sign > 0 and min(values + [value for found in every.values() for value in found]) > 0
    rows = [_arm(name, int(arms[name]["total_steps"]), every[name], values, sign, by_ratio=by_ratio) for name in arms]
    level = false_adoption * (LOOK_FRAC if looks > 1 else 1.0)
    lost = [row for row in rows if not row["chance"] < level]
    select = str(record.config["select"])
    return {
        "select": select,
        "seeds": seeds,
        "candidate": values,
        "arms": rows,
        "false_adoption": false_adoption,
        "level": level,
        "wins": not lost,
        "reason": _reason(select, values, rows, lost, level),
    }


def worth_more_seeds(proof: Mapping[str, Any] | None, *, min_seeds: int = 3) -> bool:
    """Return whether a candidate that was not adopted gained under every seed: then the spread hides it, not the sign.

    One seed under which the baseline dies is the usual cause: the larger its gain, the larger the spread.

    Args:
        proof: of `prove`.
        min_seeds: fewer gain together too often where nothing is gained (2 of 2 seeds: one time in four).
    """
    if proof is None or proof["wins"] or len(proof["seeds"]) < min_seeds:
        return False
    return all(gain > 0 for arm in proof["arms"] for gain in arm["gains"])


def _arm(
    name: str, total_steps: int, theirs: list[float], ours: list[float], sign: float, *, by_ratio: bool
) -> dict[str, Any]:
    gains = [sign * (their - our) for their, our in zip(theirs, ours, strict=True)]
    gain, se = _mean_and_se(gains)
    ratios = [our / their for their, our in zip(theirs, ours, strict=True)] if by_ratio else None
    tested, tested_se = _mean_and_se([-math.log(ratio) for ratio in ratios]) if ratios else (gain, se)
    alike = float(tested <= 0)  # seeds that all gain the same leave nothing to chance
    return {
        "name": name,
        "total_steps": total_steps,
        "values": theirs,
        "gains": gains,
        "gain": gain,
        "se": se,
        "ratios": ratios,
        "chance": float(stats.t.sf(tested / tested_se, df=len(gains) - 1)) if tested_se > 0 else alike,
    }


def _mean_and_se(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _difference(row: dict[str, Any]) -> str:
    """Return how far the candidate lies from an arm: seed by seed as shares of its loss, or as a mean with its error."""
    if row["ratios"] is None:
        return f"{'better' if row['gain'] >= 0 else 'worse'} by {abs(row['gain']):.2g} +- {row['se']:.2g}"
    return f"seed by seed {', '.join(f'{ratio - 1:+.0%}' for ratio in row['ratios'])}"


def _reason(
    select: str, values: list[float], rows: list[dict[str, Any]], lost: list[dict[str, Any]], level: float
) -> str:
    said = "; ".join(f"{row['name']} {np.mean(row['values']):.4g}: {_difference(row)}" for row in rows)
    head = f"{select} of the selected checkpoints, mean over {len(values)} fresh seeds: {np.mean(values):.4g} against {said}."
    chance = max(row["chance"] for row in rows)
    if not lost:
        return f"{head} Adopted: by chance alone such a gain comes in {chance:.1%} of cases."
    return (
        f"{head} Not adopted: against the {lost[0]['name']} that may be chance ({lost[0]['chance']:.0%}, allowed are "
        f"{level:.0%})."
    )
