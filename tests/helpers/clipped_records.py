"""Simulated runs with gradient norms and clipping, for records that are never trained."""

from __future__ import annotations

import math

import numpy as np

from tests.helpers.simulated_records import trial

STEPS = 200
FALLING = 2.3 * np.exp(-np.arange(STEPS) / 40)
BLOWN = np.concatenate([FALLING[:60], np.full(STEPS - 60, 9.0)])
DIVERGED = np.append(FALLING[:80], math.nan)
LR, LIMIT = 2.5, 0.5


def norms_with(above: int, limit: float = 1.0, *, seed: int = 0) -> np.ndarray:
    """Stationary heavy-tailed norms of which exactly `above` lie above the limit, in random order."""
    rng = np.random.default_rng(seed)
    norms = np.concatenate([limit * (1 + rng.pareto(2.0, above)) + 1e-6, limit * rng.uniform(0.2, 1.0, STEPS - above)])
    return rng.permutation(norms)


def plain(loss=FALLING, lr=0.1, **more):
    """A run without clipping; a tenth of its norms lies above 1."""
    return trial(loss, lr, columns={"grad_norm": norms_with(20)[: len(loss)]}, **more)


def clipped(above, loss=FALLING, lr=0.1, *, limit=1.0, stage="clipping", **more):
    """A run with clipping, of whose 200 norms exactly `above` lie above the limit."""
    columns = {"grad_norm": norms_with(above, limit)[: len(loss)]}
    return trial(loss, lr, stage=stage, max_grad_norm=limit, columns=columns, **more)


def descended(theta: float, steps: int, *, lr: float = LR, limit: float = math.inf) -> np.ndarray:
    """theta at each step of clipped gradient descent on 1/2 theta^2, shape (steps,)."""
    path = [theta]
    for _ in range(steps - 1):
        path.append(path[-1] - lr * float(np.clip(path[-1], -limit, limit)))
    return np.array(path)


def descent(theta, lr=LR, limit=None, columns=None):
    """The run that takes this path."""
    above = np.abs(theta) > (math.inf if limit is None else limit)
    return trial(
        0.5 * theta**2, lr, stage="lr_sweep" if limit is None else "clipping", max_grad_norm=limit,
        columns={"grad_norm": np.abs(theta), "clipped": above * 1} | (columns or {}),
    )  # fmt: skip
