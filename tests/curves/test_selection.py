"""Two runs are compared by their selected checkpoints, and only a difference beyond the noise counts (P4.7, F3.12)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.records import MemoryRecord
from workbench.config import TrainConfig
from workbench.curves.selection import compare_selected

CONFIG = TrainConfig(peak_lr=0.1, total_steps=100, batch_size=8).to_dict()
FALLING = [1.0, 0.8, 0.6, 0.4, 0.2]


def record(curves: dict[tuple[float, int], list[float]], *, mode: str = "min") -> MemoryRecord:
    """One trial for each (lr, seed), evaluated every 25 steps."""
    config = CONFIG | {"select_mode": mode}
    trials, evals = [], []
    for number, ((lr, seed), values) in enumerate(curves.items()):
        trials.append({"trial": number, "stage": "lr_sweep", "seed": seed, **config, "peak_lr": lr})
        evals += [
            {"trial": number, "step": 25 * k, "split": "validation", "metric": "loss", "value": v}
            for k, v in enumerate(values)
        ]
    return MemoryRecord(trials=pd.DataFrame(trials), steps=pd.DataFrame(), evals=pd.DataFrame(evals), config=config)


def compared(found: MemoryRecord, *, noise_sds: float = 2.0) -> dict[str, Any]:
    """The baseline is what was trained at lr 0.1; every other lr is a candidate."""
    by_lr = {lr: rows["trial"].tolist() for lr, rows in found.trials.groupby("peak_lr")}
    ours = by_lr.pop(0.1)
    candidates = {f"lr {lr:g}": numbers for lr, numbers in by_lr.items()}
    return compare_selected(found, baseline=ours, candidates=candidates, noise_sds=noise_sds)


def test_the_best_checkpoint_counts_not_the_last() -> None:
    u_shape = [1.0, 0.5, 0.1, 0.5, 0.9]
    result = compared(record({(0.1, 0): FALLING, (0.2, 0): u_shape}), noise_sds=0.0)
    assert result["baseline"]["best_step"] == 100
    assert (result["recommended"]["best_step"], result["recommended"]["validation/loss"]) == (50, 0.1)
    assert result["adopted"] is True
    assert result["gain"] == pytest.approx(0.1)


def test_the_luckiest_evaluation_is_not_the_best_candidate() -> None:
    """One that swings wildly touches 0.05 once; a steady one at 0.1 is chosen, and adopted."""
    baseline = [1.0] * 10
    wild = [2.2, 0.7, 0.05, 0.7, 0.9, 2.0, 0.6, 1.8, 0.7, 0.9]
    steady = [0.1 + 0.001 * (k % 2) for k in range(10)]
    result = compared(record({(0.1, 0): baseline, (0.2, 0): wild, (0.4, 0): steady}))
    assert (result["candidate"], result["adopted"]) == ("lr 0.4", True)


def test_a_noise_that_nobody_saw_adopts_nothing_but_is_worth_a_proof() -> None:
    result = compared(record({(0.1, 0): [1.0, 0.5, 0.4], (0.2, 0): [1.0, 0.4, 0.3]}))
    assert (result["promising"], result["adopted"]) == (True, False)
    assert "too few evaluations" in result["reason"]


def test_a_gain_within_the_noise_is_not_adopted() -> None:
    rng = np.random.default_rng(0)
    noisy = [(1 + 0.2 * rng.standard_normal(40)).tolist() for _ in range(2)]
    noisy[1][3] = min(noisy[0]) - 0.01
    result = compared(record({(0.1, 0): noisy[0], (0.2, 0): noisy[1]}))
    assert 0 < result["gain"] < result["noise"]
    assert result["adopted"] is False
    assert 0.2 < result["noise"] < 0.7, "two standard deviations of the planted noise are 0.4"


def test_seeds_are_averaged_and_their_spread_is_noise() -> None:
    shifted = {(0.1, s): [v + d for v in FALLING] for s, d in enumerate((-0.1, 0.0, 0.1))}
    shifted |= {(0.2, s): [v + d - 0.15 for v in FALLING] for s, d in enumerate((-0.1, 0.0, 0.1))}
    result = compared(record(shifted))
    assert result["baseline"]["seeds"] == 3
    assert result["baseline"]["validation/loss"] == pytest.approx(0.2)
    assert result["noise"] == pytest.approx(2 * 0.1)
    assert result["adopted"] is False


@pytest.mark.parametrize("bad", [[math.nan] * 5, [math.inf] * 5, []])
def test_a_run_without_a_finite_value_is_never_adopted(bad: list[float]) -> None:
    result = compared(record({(0.1, 0): FALLING, (0.2, 0): bad}))
    assert result["adopted"] is False
    assert result["recommended"] == result["baseline"]


STEPS = np.arange(20_000) / 20_000


@pytest.mark.parametrize("trend", [0.0, 30.0 * STEPS, -20.0 * STEPS + 10 * STEPS**2, 5 * np.exp(-3 * STEPS)])
@pytest.mark.parametrize("sd", [0.01, 0.3])
def test_the_noise_is_the_standard_deviation_around_the_trend(trend: Any, sd: float) -> None:
    """White noise of known size, on trends many times as large: the second differences have 6 times its variance."""
    rng = np.random.default_rng(0)
    curves = [(trend + sd * rng.standard_normal(STEPS.size)).tolist() for _ in range(2)]
    result = compared(record({(0.1, 0): curves[0], (0.2, 0): curves[1]}), noise_sds=1.0)
    assert result["noise"] == pytest.approx(sd, rel=0.04)
    assert result["baseline"]["noise"] == pytest.approx(sd, rel=0.04)
    assert result["recommended"]["noise"] == pytest.approx(sd, rel=0.04)
