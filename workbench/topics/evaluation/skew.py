"""Does a sample agree with the set that it was drawn from: in its classes, its features and on the metric (P3.2)?

A sample is held against what was left out: where it was drawn without looking, the two are alike, and what they differ by is
known exactly, because the set is finite. So every test here knows that a sample of nearly everything cannot differ.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from workbench.curves.class_counts import class_test
from workbench.errors import DataError, UsageError

SkewTest = dict[str, Any]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MAX_LEVELS = 10  # A feature with no more values than this is a category (rule of thumb)
MEAN_DRAWS = 1999  # samples of examples drawn anew for that of a mean: enough for a p-value of 0.001
MAX_CELLS = 20_000_000
"""Above this many values, draws times examples, the metric's p-value is the normal approximation's (rule of thumb)."""


def skew_tests(
    taken: Sequence[bool] | Mask,
    *,
    labels: Sequence[int] | NDArray[np.int64] | None = None,
    features: Floats | None = None,
    metrics: Mapping[str, Floats] | None = None,
) -> list[SkewTest]:
    """Return one test for the classes, one for each feature and one for each metric.

    Args:
        taken: which examples of the full set are in the sample, shape (examples,).
        labels: class of every example, shape (examples,); None where they have none.
        features: shape (examples, features); NaN counts as a value that is missing.
        metrics: name -> value of every example of the full set, shape (examples,).

    Returns:
        Dicts with kind ("class", "feature", "metric"), name, p, and what was found; hand them to `worst_skew`.
    """
    mask = np.asarray(taken, dtype=bool)
    if not mask.any():
        raise UsageError("the sample has 0 examples, so it cannot be held against the full set: take at least 1.")
    for name, values in {"labels": labels, "features": features, **(metrics or {})}.items():
        if values is not None and len(values) != mask.size:
            raise DataError(f"{name} has {len(values)} rows for {mask.size} examples of the full set.")
    found = [] if labels is None else [class_test(mask, np.asarray(labels))]
    if features is not None:
        table = np.asarray(features, dtype=np.float64)
        if table.ndim != 2:
            raise DataError(f"features have shape {table.shape}, but must be (examples, features): flatten the rest.")
        tested = (_feature_test(mask, values, str(column)) for column, values in enumerate(table.T))
        found += [test for test in tested if test is not None]
    return found + [_metric_test(mask, np.asarray(v, dtype=np.float64), name) for name, v in (metrics or {}).items()]


def _feature_test(mask: Mask, values: Floats, name: str) -> SkewTest | None:
    """Return whether a column is distributed in the sample as in what was left out; None for a column with a single value."""
    missing, tests = np.isnan(values), []
    if missing.any() and not missing.all():
        tests.append(class_test(mask, missing) | {"test": "missing values"})
    here, there = values[mask & ~missing], values[~mask & ~missing]
    levels = np.unique(values[~missing]).size if here.size and there.size else 0
    if 1 < levels <= MAX_LEVELS:
        tests.append(class_test(mask[~missing], values[~missing]))
    elif levels > 1:
        ks = stats.ks_2samp(here, there, method="asymp")
        tests.append({"p": float(ks.pvalue), "test": "Kolmogorov-Smirnov", "distance": float(ks.statistic)})
    if not tests:
        return None
    least = min(tests, key=lambda test: float(test["p"]))
    return least | {"kind": "feature", "name": name, "p": min(1.0, float(least["p"]) * len(tests))}


def _metric_test(mask: Mask, values: Floats, name: str) -> SkewTest:
    """Return the metric on the sample minus that on the full set, with its 95 % interval and a p-value."""
    known: SkewTest = {"kind": "metric", "name": name}
    if bad := int((~np.isfinite(values)).sum()):
        return known | {"p": None, "test": "none", "reason": f"{bad} values of {name} are not finite"}
    n, size = int(mask.sum()), values.size
    full, here = float(values.mean()), float(values[mask].mean())
    spread = float(values.std(ddof=1)) if size > 1 else 0.0
    se = spread / math.sqrt(n) * math.sqrt(1 - n / size)
    half = float(stats.norm.isf((1 - 0.95) / 2)) * se
    apart = here - full
    known |= {"full": full, "sample": here, "difference": apart, "se": se, "low": apart - half, "high": apart + half}
    if se == 0:
        return known | {"p": 1.0, "test": "none: nothing can differ"}
    if size * MEAN_DRAWS > MAX_CELLS:
        return known | {"p": float(2 * stats.norm.sf(abs(here - full) / se)), "test": "normal"}
    drawn = stats.permutation_test(
        (values[mask], values[~mask]), lambda a, b, axis: a.mean(axis) - b.mean(axis), n_resamples=MEAN_DRAWS, batch=100,
        vectorized=True, random_state=0,
    )  # fmt: skip
    return known | {"p": float(drawn.pvalue), "test": "exact"}


def worst_skew(tests: Sequence[SkewTest]) -> list[SkewTest]:
    """Return the `skew_tests` with p_adjusted, the smallest first: none lies below q in more than q of unskewed samples.

    Holm's correction within classes, features and metrics each, and Bonferroni's over these kinds, so that a hundred
    features do not hide a metric that is off. Tests without a p-value are left out.
    """
    usable = sorted((test for test in tests if test["p"] is not None), key=lambda test: float(test["p"]))
    kinds = {test["kind"] for test in usable}
    found = []
    for kind in kinds:
        ordered, largest = [test for test in usable if test["kind"] == kind], 0.0
        for place, test in enumerate(ordered):
            largest = max(largest, min(1.0, test["p"] * (len(ordered) - place) * len(kinds)))
            found.append(test | {"p_adjusted": largest})
    return sorted(found, key=lambda test: (test["p_adjusted"], test["kind"], test["name"]))
