"""What guessing costs: the loss from which on a run has learned something, wherever it started."""

from __future__ import annotations

import math

__all__ = ["chance_loss", "ignorance"]


def chance_loss(classes: int) -> float:
    """Return the cross-entropy of guessing uniformly among `classes`: log(classes)."""
    return math.log(classes)


def ignorance(start: float, chance: float | None) -> float:
    """Return the loss of knowing nothing: that of the initial model, or of guessing where the initial model is worse.

    An untrained model that is confidently wrong starts far above chance; coming down to it takes no learning.

    Args:
        start: loss before the first update.
        chance: loss of guessing, None where unknown.
    """
    return start if chance is None else min(start, chance)
