"""Three simulated sweeps of one comparison: a baseline, a modification that loses the high lrs, and a warmup that cures it."""

from __future__ import annotations

import numpy as np

from tests.helpers.simulated_records import record, trial

TOTAL, WARMUP = 400, 40
LRS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
SEEDS = (0, 1, 2)
LEVEL = dict(zip(LRS, (0.8, 0.6, 0.4, 0.3, 0.25, 0.2, 0.15), strict=True))
SPREAD = 0.01
"""Standard deviation of the end loss from seed to seed."""


def falling(level, total=TOTAL):
    return level + (2.3 - level) * np.exp(-np.arange(total) / 30)


def jumping(level, total=TOTAL):
    """Falls for half of the run and then stands above where it began."""
    return np.r_[falling(level, total // 2), np.full(total - total // 2, 3.0)]


def recovering(level, total=TOTAL):
    """Rises early, comes back, and ends at `level`."""
    k = np.arange(total)
    return falling(level, total) + 6 * np.exp(-(((k - 20) / 6.0) ** 2))


def diverging(_level=0.0):
    return np.r_[2.3, 50.0, np.inf]


def arm(shapes=None, *, shift=0.0, lrs=LRS, seeds=SEEDS, warmup=0, **more):
    """One arm: every lr falls to its level plus `shift`, but where `shapes` says otherwise (lr -> curve, or one a seed)."""
    shapes, total = shapes or {}, TOTAL + warmup
    trials = []
    for lr in lrs:
        for k, seed in enumerate(seeds):
            shape = shapes.get(lr, falling)
            shape = shape[k] if isinstance(shape, tuple) else shape
            level = LEVEL[lr] + shift + SPREAD * (k - 1)
            loss = shape(level) if shape is diverging else shape(level, total)
            trials.append(trial(loss, lr, seed=seed, total_steps=total, warmup_steps=warmup))
    return record(trials, total_steps=total, peak_lr=0.04, warmup_steps=warmup, **more)


def healthy(**more):
    """Trains up to 0.32, diverges at 0.64."""
    return arm({0.64: diverging}, **more)


def lost(**more):
    """Trains up to 0.08 only."""
    return arm({0.16: jumping, 0.32: diverging, 0.64: diverging}, **more)


def cured(**more):
    """The lost arm with a warmup: trains up to 0.32 again."""
    return healthy(warmup=WARMUP, **more)
