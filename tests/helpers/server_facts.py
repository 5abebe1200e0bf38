"""Facts of a healthy trial on parameter servers, as a trainer writes them; tests plant one thing in them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd

from tests.helpers.records import BASELINE, MemoryRecord, _evals, _steps, _trial, empty

UPDATES, WORKERS, SERVERS = 300, 3, 2


def block(requests: int = 600, size: int = 1000, apply_s: float = 0.1, **more: Any) -> dict[str, Any]:
    return {
        "requests": requests, "bytes_in": requests // 2 * size, "bytes_out": requests // 2 * size, "apply_s": apply_s,
        "version": UPDATES, "staleness_steps": {}, **more,
    }  # fmt: skip


def server(index: int, **blocks: dict[str, Any]) -> dict[str, Any]:
    held = {f"net@{index}": block(parameters={"0.weight": 150, "0.bias": 100}), **blocks}
    sums = {name: sum(b[name] for b in held.values()) for name in ("requests", "bytes_in", "bytes_out", "apply_s")}
    return sums | {"blocks": held}


def work(
    compute_s: float = 3.0, pull_s: float = 0.2, push_s: float = 0.2, data_wait_s: float = 0.1
) -> dict[str, float]:
    return {
        "data_wait_s": data_wait_s,
        "pull_s": pull_s,
        "compute_s": compute_s,
        "push_s": push_s,
        "updates": UPDATES / WORKERS,
    }


def facts(**changes: Any) -> dict[str, Any]:
    """Three workers that compute most of 4 s, two servers with equal loads, and gradients 0 to 4 updates old."""
    ages = {"0": 30, "1": 90, "2": 90, "3": 75, "4": 15}
    whole = {
        "seconds": 5.0, "workers": WORKERS, "steps": UPDATES, "steps_per_closure": 1, "engine": "threads", "data_plane": "direct",
        "why": "", "servers": [server(0), server(1)], "staleness_steps": [dict(ages), dict(ages)], "busy_s": [3.6] * 3,
        "closures": [100] * 3, "worker_failures": 0, "training_s": 4.0, "updates": UPDATES, "closures_timed": UPDATES,
        "stretches": 10, "work": [work() for _ in range(WORKERS)],
    }  # fmt: skip
    return copy.deepcopy(whole | changes)


def served(*trials: dict[str, Any], stages: list[str] | None = None, lags: np.ndarray | None = None) -> MemoryRecord:
    """A record with these trials' facts, and with steps that say who made which update how late."""
    rng = np.random.default_rng(0)
    loss = np.exp(-np.arange(UPDATES) / 150 + 0.1 * rng.standard_normal(UPDATES))
    if not trials:
        return empty()
    numbers = range(len(trials))
    steps = pd.concat([_steps(k, BASELINE, loss) for k in numbers], ignore_index=True)
    steps["staleness_steps"] = np.tile(rng.integers(0, 5, UPDATES) if lags is None else lags, len(trials)).astype(float)
    steps["worker"] = np.tile(np.arange(UPDATES) % WORKERS, len(trials)).astype(float)
    return MemoryRecord(
        pd.DataFrame([_trial(k, (stages or ["parameter_server"] * len(trials))[k], "complete", BASELINE, UPDATES) for k in numbers]),
        steps,
        _evals(0, np.arange(3), np.ones(3)),
        BASELINE.to_dict(),
        facts={"parameter_server": {str(k): each for k, each in enumerate(trials)}},
    )  # fmt: skip
