"""A simulated study of batch norm: facts about a healthy model, virtual batches under several seeds, and simulated devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.helpers.simulated_records import evaluations, record, trial

STEPS = 40
HEALTHY: dict[str, Any] = {
    "layers": 2, "asked": None, "examples": 64, "values": 4096, "step": 40,
    "ema": [{"layer": "1", "momentum": 0.1, "batches": 400, "warm": 1 - 0.9**400}],
    "estimate": {"batches": 20, "layers": [{"layer": "1", "shift": 0.03, "noise": 0.01}], "loss": {"stored": 0.5, "anew": 0.5}},
}  # fmt: skip


def study(arms: dict[int | None, list[float]] | None = None, *, select_mode: str = "min", **facts: Any) -> Any:
    """A study of virtual batches: statistic examples -> the selected metric under each seed."""
    trials, evals = [], []
    for examples, values in (arms or {}).items():
        for seed, value in enumerate(values):
            config = {"bn_stat_examples": examples, "batch_size": 128}
            curve = np.linspace(2.3, 0.1, STEPS) if math.isfinite(value) else np.full(STEPS, np.nan)
            evals += evaluations(len(trials), [0, STEPS], [2.3, value], split="validation")
            trials.append(trial(curve, 0.1, seed=seed, stage="batch_norm_virtual", best_step=STEPS, **config))
    known = {
        "batch_norm": HEALTHY | facts.pop("batch_norm", {}),
        "batch_norm_virtual": list(range(len(trials))),
        **facts,
    }
    return record(trials, evals=evals, facts=known, batch_size=128, peak_lr=0.1, total_steps=STEPS, full_batch=False, select_mode=select_mode)  # fmt: skip


def row(devices: int, *, shards: str = "dealt", spread: float = 0.01, missing: float = 0.0) -> dict[str, Any]:
    own = list(np.roll(np.linspace(1 - spread / 2, 1 + spread / 2, devices), 1))  # the first device is not the best
    losses = {"own": own, "average": 1.0, "merged": 1.0, "whole": 1.0}
    return {"devices": devices, "examples": 128 // devices, "shards": shards, "apart": spread, "step_apart": spread,
            "missing": missing, "batches": 20, "losses": losses}  # fmt: skip
