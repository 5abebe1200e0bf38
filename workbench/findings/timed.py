"""Where evaluations would fall if they came every so many seconds instead of every so many steps (P2.8)."""

from __future__ import annotations

import numpy as np
import pandas as pd

__all__ = ["timed_steps", "trial_seconds"]


def timed_steps(steps: pd.DataFrame, every_s: float) -> list[int]:
    """Return the steps at which an evaluation every `every_s` seconds of training would come.

    Args:
        steps: of one trial, in order; `step_time_s` is the time from one step to the next.
        every_s: seconds; a pause longer than that gives one evaluation, not several.
    """
    elapsed = _elapsed(steps)
    if not elapsed.size or not every_s > 0:
        return []
    periods = np.floor(elapsed / every_s).astype(np.int64)
    new = np.flatnonzero(np.diff(periods, prepend=0) > 0)
    return [int(step) for step in steps["step"].to_numpy()[new]]


def trial_seconds(steps: pd.DataFrame) -> float:
    """Return the time that the steps of one trial took together, evaluation left out."""
    elapsed = _elapsed(steps)
    return float(elapsed[-1]) if elapsed.size else 0.0


def _elapsed(steps: pd.DataFrame) -> np.ndarray:
    if "step_time_s" not in steps:
        return np.empty(0)
    return np.cumsum(np.nan_to_num(steps["step_time_s"].to_numpy(dtype=np.float64)))
