"""`closure_size`: how many updates a worker should make each time it is asked (T13.7, T14.3)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

SIZES = 32
"""Sizes that are tried, in even ratios from 1 to all updates."""


def closure_size(dispatch_s: float, step_s: Sequence[float], updates: int, *, jitter: float = 0.1) -> int:
    """Return the number of updates a closure with which a stretch is over soonest.

    Small closures lose time to their dispatch. At the end of a stretch, before everybody waits for everybody, large ones leave workers
    idle that find nothing left to take while a slower one works off its last. So the stretch is played with each of some sizes,
    every worker being slower than measured by `jitter` once, and the size with the smallest mean is taken.

    Args:
        dispatch_s: what a closure costs a worker beside its updates, in seconds.
        step_s: an update on each worker, in seconds; workers that were not measured are left out.
        updates: until everybody waits for everybody (an evaluation, a checkpoint).
        jitter: how much slower a worker may turn out to be (rule of thumb).

    Returns:
        From 1 to `updates`; 1 where nothing was measured.

    Source: T14.3; the way is ours.
    """
    steps = [step for step in step_s if step > 0 and math.isfinite(step)]
    if not (dispatch_s > 0 and math.isfinite(dispatch_s) and steps and updates > 1):
        return 1
    sizes = sorted({math.ceil(updates ** (k / SIZES) - 1e-9) for k in range(SIZES)} | {math.ceil(updates / len(steps))})
    played = [[step * (1 + jitter * (k == slow)) for k, step in enumerate(steps)] for slow in range(len(steps))]
    return min(sizes, key=lambda size: sum(stretch_seconds(size, dispatch_s, each, updates) for each in played))


def stretch_seconds(size: int, dispatch_s: float, step_s: Sequence[float], updates: int) -> float:
    """Return how long `updates` take in closures of `size`, each taken by whoever is free first."""
    free = [(0.0, worker) for worker in range(len(step_s))]
    for done in range(0, updates, size):
        begun, worker = free[0]
        heapq.heapreplace(free, (begun + dispatch_s + min(size, updates - done) * step_s[worker], worker))
    return max(free)[0]
