"""What the best of several noisy draws owes to luck: the expected maximum, and the noise of a series."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from workbench.errors import ConfigError

__all__ = ["FEWEST_TO_SEE_NOISE", "expected_maximum", "wobble"]

FEWEST_TO_SEE_NOISE = 4
"""Evaluations; fewer have less than two second differences."""


@lru_cache(maxsize=256)
def expected_maximum(draws: int) -> float:
    """Return the mean of the largest of `draws` independent standard normal draws.

    The integral of x d(Phi(x) ** draws): 0 for one draw, 1/sqrt(pi) for two, 1.54 for ten, 2.51 for a hundred.

    Args:
        draws: at least 1.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(draws, bool) or not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ConfigError(f"draws={draws!r} must be an integer of at least 1.")
    x = np.linspace(-12.0, 12.0, 4001)
    density = draws * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * ndtr(x) ** (draws - 1)
    return float(np.trapezoid(x * density, x))


def wobble(values: NDArray[np.float64]) -> float:
    """Return a metric's standard deviation from evaluation to evaluation, free of its trend: MAD of its second differences.

    Args:
        values: finite, in order of the steps; 0.0 where they are too few to tell.
    """
    if values.size < FEWEST_TO_SEE_NOISE:
        return 0.0
    return float(1.4826 * np.median(np.abs(np.diff(values, n=2))) / math.sqrt(6.0))
