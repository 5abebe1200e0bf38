"""`compare_selected`: runs held against each other by their selected checkpoints, not their last (P4.7, F3.12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.diagnostics.luck import FEWEST_TO_SEE_NOISE, wobble
from workbench.diagnostics.trials import RecordLike
from workbench.record import periodic_rows

__all__ = ["compare_selected", "selected", "selected_by_seed"]


def compare_selected(
    record: RecordLike, *, baseline: Sequence[int], candidates: Mapping[str, Sequence[int]], noise_sds: float = 2.0
) -> dict[str, Any]:
    """Compare the baseline with the best of some candidates by the selected metric of their best checkpoints.

    The noise is that of the candidate's metric from evaluation to evaluation, free of its trend; with several seeds also
    their spread. The baseline's own noise raises no bar: its selected checkpoint is its best moment already, and an
    unstable baseline would protect itself. The best candidate is the one whose metric is best with its noise counted
    against it, not the one with the luckiest evaluation; it is adopted only where it is better by more than its noise.

    Args:
        record: a study.
        baseline: trial numbers of the baseline, one a seed.
        candidates: what a candidate is called -> its trial numbers.
        noise_sds: how many standard deviations the gain has to be (rule of thumb).

    Returns:
        baseline and recommended results (best_step, the selected metric, noise, seeds, trials), candidate (its name or
        None), gain, noise, promising (better by more than the noise as far as that is known), adopted, reason.
    """
    select = str(record.config["select"])
    sign = _sign(record)
    ours = selected(record, baseline)
    found = {name: result for name, numbers in candidates.items() if (result := selected(record, numbers))}
    if not ours or not found:
        reason = (
            "there is no finite value of the baseline"
            if not ours
            else "the baseline trains at the best lr already, and nothing else was tried"
        )
        return {
            "baseline": ours,
            "recommended": ours,
            "candidate": None,
            "promising": False,
            "adopted": False,
            "reason": f"Not adopted: {reason}.",
        }
    name = min(found, key=lambda n: sign * found[n][select] + noise_sds * found[n]["noise"])
    theirs = found[name]
    gain = sign * (ours[select] - theirs[select])
    noise = noise_sds * theirs["noise"]
    adopted = bool(gain > noise) and theirs["noise_known"]
    end = "Adopted." if adopted else "Not adopted: not better by more than the noise."
    if gain > noise and not adopted:
        end = "Not adopted: a single run with too few evaluations does not show its noise."
    reason = (
        f"Selected checkpoints: {select} {ours[select]:.4g} at step {ours['best_step']} (baseline), {theirs[select]:.4g} "
        f"at step {theirs['best_step']} ({name}): {_by(gain, noise)}. {end}"
    )
    return {
        "baseline": ours,
        "recommended": theirs,
        "candidate": name,
        "gain": gain,
        "noise": noise,
        "promising": bool(gain > noise),
        "adopted": adopted,
        "reason": reason,
    }


def _by(gain: float, noise: float) -> str:
    """Return the difference in words; a noise of 0 means that there were too few evaluations to see it."""
    if gain == 0:
        return "equally good"
    known = f"noise {noise:.2g}" if noise > 0 else "noise not measured (too few evaluations)"
    return f"{'better' if gain > 0 else 'worse'} by {abs(gain):.2g}, {known}"


def selected_by_seed(record: RecordLike, numbers: Sequence[int]) -> dict[int, float]:
    """Return for each seed the selected metric of its trial's best checkpoint; seeds without a finite value are left out.

    Args:
        record: a study.
        numbers: of trials with the same config, one a seed.
    """
    seeds = dict(zip(record.trials["trial"].tolist(), record.trials["seed"].tolist(), strict=True))
    found = {int(seeds[n]): _selectable(record, n)[0] for n in numbers}
    sign = _sign(record)
    return {seed: float((sign * values).min() * sign) for seed, values in found.items() if values.size}


def _sign(record: RecordLike) -> float:
    return 1.0 if record.config["select_mode"] == "min" else -1.0


def _selectable(record: RecordLike, number: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the finite values that selection compares for one trial, and their steps."""
    split, metric = str(record.config["select"]).split("/", 1)
    evals = periodic_rows(record.evals)
    rows = evals[(evals["trial"] == number) & (evals["split"] == split) & (evals["metric"] == metric)]
    rows = rows[np.isfinite(rows["value"].to_numpy(dtype=np.float64))]
    return rows["value"].to_numpy(dtype=np.float64), rows["step"].to_numpy(dtype=np.int64)


def selected(record: RecordLike, numbers: Sequence[int]) -> dict[str, Any]:
    """Return best_step, the selected metric, noise (and whether it is known), seeds and trials of a config.

    Empty if no trial has a finite value.

    Args:
        record: a study.
        numbers: of trials with the same config, one a seed; the metric is their mean.
    """
    select, sign = str(record.config["select"]), _sign(record)
    best: list[tuple[float, int]] = []
    noise: list[float] = []
    counts: list[int] = []
    for number in numbers:
        values, steps = _selectable(record, number)
        if values.size:
            at = int(np.argmin(sign * values))
            best.append((float(values[at]), int(steps[at])))
            noise.append(wobble(values))
            counts.append(values.size)
    if not best:
        return {}
    with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges, it has no end
        spread = float(np.std([v for v, _ in best], ddof=1)) if len(best) > 1 else 0.0
    return {
        "best_step": best[0][1],
        select: float(np.mean([v for v, _ in best])),
        "noise": max(float(np.mean(noise)), spread),
        "noise_known": all(count >= FEWEST_TO_SEE_NOISE for count in counts) or len(best) > 1,
        "seeds": len(best),
        "trials": [int(n) for n in numbers],
    }
