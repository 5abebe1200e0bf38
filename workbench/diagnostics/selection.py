"""`compare_selected`: two runs held against each other by their selected checkpoints, not their last (P4.7, F3.12)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from workbench.diagnostics.trials import RecordLike

__all__ = ["compare_selected"]


def compare_selected(
    record: RecordLike, *, baseline: float, candidate: float | None, noise_sds: float = 2.0
) -> dict[str, Any]:
    """Compare the trials at two learning rates by the best value of the selected metric.

    The noise is that of the evaluations around the selected one: the standard deviation of a run's second half
    around its own median; with several seeds also their spread. A metric that still improves has little of it.

    Args:
        record: a study with full-length trials at both learning rates.
        baseline: peak lr of the baseline.
        candidate: peak lr of the other; None compares nothing.
        noise_sds: the difference has to be this many standard deviations (rule of thumb).

    Returns:
        baseline and recommended results (best_step and the selected metric), difference, noise, adopted, reason.
    """
    select, mode = record.config["select"], record.config["select_mode"]
    ours = _selected(record, baseline)
    if candidate is None or math.isclose(candidate, baseline, rel_tol=1e-9):
        reason = (
            "no learning rate was found to be best"
            if candidate is None
            else "the baseline already has the best learning rate"
        )
        return {"baseline": ours, "recommended": ours, "adopted": False, "reason": f"Not adopted: {reason}."}
    theirs = _selected(record, candidate)
    if not ours or not theirs:
        return {
            "baseline": ours,
            "recommended": theirs,
            "adopted": False,
            "reason": "Not adopted: one of the two runs has no finite value.",
        }
    sign = 1.0 if mode == "min" else -1.0
    gain = sign * (ours[select] - theirs[select])
    noise = noise_sds * max(ours["noise"], theirs["noise"])
    adopted = gain > noise
    word = "better" if gain > 0 else "worse"
    reason = (
        f"Selected checkpoints: {select} {ours[select]:.4g} at step {ours['best_step']} (baseline), {theirs[select]:.4g} at "
        f"step {theirs['best_step']} (lr {candidate:.4g}): {word} by {abs(gain):.2g}, noise {noise:.2g}. "
        + ("Adopted." if adopted else "Not adopted: not better by more than the noise.")
    )
    return {
        "baseline": ours,
        "recommended": theirs,
        "gain": gain,
        "noise": noise,
        "adopted": bool(adopted),
        "reason": reason,
    }


def _selected(record: RecordLike, lr: float) -> dict[str, Any]:
    """Return the selected checkpoint of the full-length trials at `lr`, the mean over seeds; empty if none is finite."""
    trials = _full_length(record, lr)
    split, metric = record.config["select"].split("/", 1)
    evals = record.evals
    best: list[tuple[float, int]] = []
    noise: list[float] = []
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    for number in trials["trial"]:
        rows = evals[(evals["trial"] == number) & (evals["split"] == split) & (evals["metric"] == metric)]
        values, steps = rows["value"].to_numpy(dtype=float), rows["step"].to_numpy(dtype=int)
        if not np.isfinite(values).any():
            continue
        at = int(np.nanargmin(np.where(np.isfinite(values), sign * values, np.nan)))
        best.append((float(values[at]), int(steps[at])))
        noise.append(_wobble(values))
    if not best:
        return {}
    spread = float(np.std([v for v, _ in best], ddof=1)) if len(best) > 1 else 0.0
    return {
        "best_step": best[0][1],
        record.config["select"]: float(np.mean([v for v, _ in best])),
        "noise": max(float(np.mean(noise)), spread),
        "seeds": len(best),
        "trials": trials["trial"].tolist(),
    }


def _full_length(record: RecordLike, lr: float) -> pd.DataFrame:
    trials = record.trials
    same = np.isclose(trials["peak_lr"].to_numpy(dtype=float), lr, rtol=1e-9, atol=0.0)
    whole = (trials["total_steps"] == record.config["total_steps"]) & ~trials["stage"].isin(
        ["probe", "fix", "lr_range"]
    )
    chosen: pd.DataFrame = trials[same & whole]
    return chosen


def _wobble(values: np.ndarray) -> float:
    """Return the noise of a metric from evaluation to evaluation, free of its trend: MAD of second differences."""
    finite = values[np.isfinite(values)]
    if finite.size < 4:
        return 0.0
    second = np.diff(finite, n=2)
    return float(1.4826 * np.median(np.abs(second)) / math.sqrt(6.0))
