"""`equivalence`: two one-sided tests, because "no significant difference" says nothing where little was measured (F6.8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from workbench.errors import UsageError

__all__ = ["Equivalence", "Verdict", "equivalence"]

Verdict = Literal["equivalent", "different", "undecided"]


class Equivalence(NamedTuple):
    """How two groups of results compare.

    Attributes:
        verdict: "equivalent" where the whole interval lies within the margin, "different" where the whole of it lies beyond,
            else "undecided": neither was shown.
        ratio: of the geometric means, the first group's over the second's; of the means where a value is not above 0.
        low, high: confidence interval of that ratio.
        chance: the larger p-value of the two one-sided tests: how likely results within the margin would be if the groups
            differed by just the margin.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    chance: float


def equivalence(
    ours: Sequence[float], theirs: Sequence[float], *, margin: float = 0.1, alpha: float = 0.05
) -> Equivalence | None:
    """Test whether two groups of losses, or of another metric above 0, are the same up to a margin.

    Two one-sided t-tests (Schuirmann 1987) by Welch's degrees of freedom, over logarithms, so that the margin is a factor.

    Args:
        ours: results, one a seed, all finite and above 0.
        theirs: those that they are held against.
        margin: largest ratio that does not matter, as a share: 0.1 is from 1/1.1 to 1.1 (rule of thumb).
        alpha: level of each of the two tests; the interval holds 1 - 2 alpha.

    Returns:
        The comparison, or None where a group has fewer than two results or one that has no logarithm.

    Raises:
        UsageError: margin or alpha are out of their range.
    """
    if not 0 < margin < math.inf:
        raise UsageError(f"margin={margin!r} must be a finite number above 0: 0.1 lets results differ by a tenth.")
    if not 0 < alpha < 0.5:
        raise UsageError(f"alpha={alpha!r} must lie between 0 and 0.5: 0.05 is usual.")
    groups = [np.asarray(list(values), dtype=np.float64) for values in (ours, theirs)]
    if any(len(v) < 2 or not np.isfinite(v).all() or v.min() <= 0 for v in groups):
        return None
    logs = [np.log(v) for v in groups]
    errors = [float(v.var(ddof=1)) / len(v) for v in logs]
    gap, se = float(logs[0].mean() - logs[1].mean()), math.sqrt(sum(errors))
    bound = math.log1p(margin)
    if se == 0:
        inside = abs(gap) < bound
        ratio = math.exp(gap)
        return Equivalence("equivalent" if inside else "different", ratio, ratio, ratio, 0.0 if inside else 1.0)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True))
    reach = float(stats.t.ppf(1 - alpha, freedom)) * se
    chance = float(max(stats.t.sf((bound - gap) / se, freedom), stats.t.sf((bound + gap) / se, freedom)))
    verdict: Verdict = "undecided"
    if abs(gap) + reach < bound:
        verdict = "equivalent"
    elif abs(gap) - reach > bound:
        verdict = "different"
    return Equivalence(verdict, math.exp(gap), math.exp(gap - reach), math.exp(gap + reach), chance)
