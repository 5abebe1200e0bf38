"""Statistics of several devices as one: the law of total variance, beside the average that leaves the spread of the means out."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import UsageError


class MergedStatistics(NamedTuple):
    """Mean and variance of each channel over the examples of all devices, each shape (channels,)."""

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    """Mean of the variances plus variance of the means: what the examples of all devices have together."""
    average_variance: NDArray[np.float64]
    """Mean of the variances alone, which is what averaging running statistics gives."""
    spread: NDArray[np.float64]  # variance of the means: what that average leaves out


def merge_statistics(means: ArrayLike, variances: ArrayLike, counts: ArrayLike | None = None) -> MergedStatistics:
    """Return the statistics of the union of several groups of examples, exact where the variances are the biased ones.

    Means -3, -1, 1, 3 with unit variances give the variance 6; the average of the variances is 1. Running means may be
    averaged at any time, because a moving average is linear (P6.7); running variances may not.

    Args:
        means: of each group and channel, shape (groups, channels) or (groups,).
        variances: the same shape.
        counts: examples of each group, shape (groups,); None is as many in each. A group of 0 has no say.

    Raises:
        UsageError: shapes do not fit, there is no group, or the counts are negative, not finite or all 0.

    Source: P6.7 (ours for the variance).
    """
    mean, var = (np.asarray(values, dtype=np.float64) for values in (means, variances))
    weight = np.ones(mean.shape[:1]) if counts is None else np.asarray(counts, dtype=np.float64)
    if not mean.ndim or not len(mean) or mean.shape != var.shape or weight.shape != mean.shape[:1]:
        raise UsageError(
            f"means {mean.shape}, variances {var.shape} and counts {weight.shape} must be of the shapes (groups, channels), "
            "(groups, channels) and (groups,), with at least one group."
        )
    if not np.isfinite(weight).all() or (weight < 0).any() or not weight.sum() > 0:
        raise UsageError(f"counts={weight.tolist()} must be finite, at least 0, and not all 0.")
    kept = weight > 0
    mean, var, weight = mean[kept], var[kept], weight[kept]
    share = (weight / weight.sum()).reshape(-1, *(1 for _ in mean.shape[1:]))
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite stays so
        together = (share * mean).sum(0)
        average, spread = (share * var).sum(0), (share * (mean - together) ** 2).sum(0)
    return MergedStatistics(together, average + spread, average, spread)
