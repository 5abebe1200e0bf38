"""Records of runs whose evaluations are given: no training, only what selection sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.helpers.simulated_records import evaluations, record, trial

TOTAL = 1000


def evaluated(
    curves: Sequence[Any],
    test: Sequence[Any] | None = None,
    *,
    metric: str = "loss",
    states: str = "complete",
    **config: Any,
) -> Any:
    """One finished run a curve, evaluated from step 0 to `TOTAL` at equal distances; `test` are the same on the test split."""
    trials = [trial(np.ones(2), 0.1, stage="baseline", seed=k, state=states) for k in range(len(curves))]
    rows = []
    for split, series in (("validation", curves), ("test", test or ())):
        for number, values in enumerate(series):
            steps = np.linspace(0, TOTAL, len(values)).astype(int)
            rows += evaluations(number, steps, values, split=split, metric=metric)
    for one in trials:
        one["config"] = {"total_steps": TOTAL}
    return record(trials, evals=rows, total_steps=TOTAL, **config)


def overfitted(*, seed: int = 0, rise: float = 0.5, noise: float = 0.01, evaluations: int = 41) -> np.ndarray:
    """Falls from 2.3 to 0.5 until 40 % of the run, and rises by `rise` from there on."""
    at = np.linspace(0, 1, evaluations)
    fall, up = 0.5 + 1.8 * np.clip(1 - at / 0.4, 0, 1) ** 2, rise * np.clip((at - 0.4) / 0.6, 0, 1)
    return fall + up + noise * np.random.default_rng(seed).standard_normal(evaluations)
