"""Facts of an input pipeline from numbers, and a loader that is played batch by batch: the truth that a model has to meet."""

from __future__ import annotations

from typing import Any

import numpy as np


def played(fetch_s: float, compute_s: float, workers: int, *, batches: int = 400, ahead: int = 2) -> float:
    """Seconds of a step, by playing which worker makes which batch when; workers prefetch `ahead` batches each."""
    if not workers:
        return fetch_s + compute_s
    free, now, times = np.zeros(workers), 0.0, []
    asked = np.zeros(batches + workers * ahead)  # when each batch may be begun
    for batch in range(batches):
        worker = batch % workers
        free[worker] = max(free[worker], asked[batch]) + fetch_s
        now = max(now, free[worker])
        asked[batch + workers * ahead] = now  # taking one asks for the next
        now += compute_s
        times.append(now)
    counted = batches // 2 // workers * workers  # they deliver in turns: whole turns are counted
    return (times[-1] - times[-1 - counted]) / counted


def pipeline(
    *, fetch_s: float = 0.03, blocked: float = 1.0, collate: float = 0.0, compute_s: float = 0.01, workers: int = 0,
    tried: tuple[int, ...] = (1, 2, 4), start_s: float | None = None, batches: int = 100, step: str = "function", **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return facts as `collect_input` does, of a loader that takes `fetch_s` a batch.

    Args:
        blocked: share of fetching the items that waits.
        collate: share of `fetch_s`.
        workers: that the loader has; `tried` are those that were tried.
        start_s: until the first batch of an epoch; None is what it takes to make it.
        changes: of the facts.
    """
    steady = played(fetch_s, compute_s, workers)
    one = {
        "steps": 50, "steady_s": steady, "wait_s": steady - compute_s, "step_s": compute_s,
        "starts": [fetch_s if start_s is None else start_s] * 2, "cached_s": compute_s, "cached_cpu_s": 0.0,
    }  # fmt: skip
    items, collate_s = (1 - collate) * fetch_s, collate * fetch_s
    row = {"handoff_s": 0.0, "cpu_s": 0.0, "items_s": items, "collate_s": collate_s, "same_order": True}  # fmt: skip
    rows = [{"change": "as_is", "value": workers, "workers": workers, "batch_s": fetch_s / max(1, workers), **row}]
    rows += [
        {"change": "workers", "value": k, "workers": k, "persistent": True, "batch_s": fetch_s / k, **row}
        for k in tried
    ]
    rows.append(
        {"change": "cache", "value": "items", "workers": workers, "batch_s": collate_s / max(1, workers), **row}
    )
    del rows[-1]["same_order"]
    facts = {
        "step": step, "ahead": False, "cores": 8, "cold_s": fetch_s, "rounds": [dict(one) for _ in range(3)],
        "loader": {"type": "DataLoader", "dataset": "Reader", "stream": False, "batch_size": 8, "num_workers": workers,
                   "persistent_workers": False, "batches": batches, "examples_per_batch": 8.0, "drop_last": False},
        "fetch": {"items_s": items, "items_blocked_s": blocked * items, "items_queued_s": 0.0, "collate_s": collate_s, "cpu_s": 0.0},
        "variants": rows, "length": {"claimed": 8 * batches, "yielded": None}, "epochs": None,
        "syncs": {"steps": 20, "share": 0.0, "per_step": 0.0, "places": {}, "how": "calls"},
        "item_bytes": {"x": 64, "y": 8}, "batch_bytes": {"x": 512, "y": 64},
        "reads": {"read": ["x", "y"], "unread": [], "bytes": {"x": 512, "y": 64}, "moved_bytes": 576, "read_bytes": 576, "known": True},
        "draws": {"workers": 0, "random": None, "same_in_workers": None, "same_in_epochs": None, "p": None, "visits": 0},
        "fix": None,
    }  # fmt: skip
    return {**facts, **changes}
