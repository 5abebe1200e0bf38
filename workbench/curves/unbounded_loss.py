"""Losses without a minimum: `bottomless` tells them by the runs of a study, `is_deep` by a single value."""

from __future__ import annotations

import numpy as np

from workbench.curves.judged import judged
from workbench.curves.trials import RecordLike

__all__ = ["DEEP", "bottomless", "is_deep"]

DEEP = 100.0
"""A loss so many times as far below zero as it began above or below, and at least 1, is too low to be one (rule of thumb)."""
_APART = 3.9
"""Factor between learning rates whose depths are held against each other, a little under the four of a sweep's grid."""


def is_deep(lowest: float, first: float, *, deep: float = DEEP) -> bool:
    """Tell whether a loss lies far deeper below zero than it began from zero.

    Args:
        lowest: loss that was reached.
        first: loss of the untrained model.
        deep: how many times, see `DEEP`.
    """
    return lowest < -deep * max(abs(first), 1.0)


def bottomless(record: RecordLike, *, deep: float = DEEP) -> tuple[float, float, float] | None:
    """Return (lowest training loss, its lr, its first loss) where that run falls without end; None where none does.

    A loss that has a minimum, however low, is reached at learning rates a factor of four apart, and is not twice as far from zero at
    the end of the best run as after a quarter of it. A run that rises further above zero than it falls below diverges: what is negative
    there is rounding, such as that of a cross-entropy of logits beyond 1e15.

    Args:
        record: a study; without runs there is nothing to see.
        deep: see `DEEP`.
    """
    by_lr: dict[float, tuple[float, float, float]] = {}
    for curve in judged(record).curves:
        known = curve.loss[np.isfinite(curve.loss)]
        if known.size >= 4 and not (is_deep(known.min(), known[0], deep=deep) and known.max() > -known.min()):
            row = (float(known.min()), float(known[: known.size // 4].min()), float(known[0]))
            by_lr[curve.lr] = min(row, by_lr.get(curve.lr, row))
    ranked = sorted((row, lr) for lr, row in by_lr.items())
    if len(ranked) < 2:
        return None
    (lowest, quarter, first), lr = ranked[0]
    second = next((row[0] for row, other in ranked if other <= lr / _APART), ranked[1][0][0])
    falls_on = lowest < 2 * min(second, 0.0) and lowest < 2 * min(quarter, 0.0)
    return (lowest, lr, first) if falls_on and is_deep(lowest, first, deep=deep) else None
