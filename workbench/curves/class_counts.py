"""Correct predictions as counts, class by class: what a metric of a rare class rests on (P3.6, P3.7)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from workbench.curves.trial_curves import RecordLike
from workbench.errors import UsageError

COLUMNS = ["class", "total", "correct", "recall", "low", "high", "before", "delta", "delta_examples"]
FEWEST_EXPECTED = 5.0
"""Examples that every class should lead one to expect for the chi-square approximation (Cochran 1954)."""
DRAWS = 9999
"""Samples of classes drawn anew for an exact p-value."""


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927); (0, 1) where there is no example."""
    if not total:
        return 0.0, 1.0
    low, high = stats.binomtest(correct, total).proportion_ci(method="wilson")
    return float(low), float(high)


def in_examples(delta: float, total: int) -> str:
    """Say how many examples a difference in recall is: a gain of 0.05 on 20 examples is "1 example" (P3.7)."""
    if not math.isfinite(delta) or total < 1:
        return "unknown"
    count = round(delta * total)
    return f"{count} example{'' if abs(count) == 1 else 's'}"


def count_classes(labels: npt.ArrayLike, correct: npt.ArrayLike, *, classes: int) -> list[dict[str, int]]:
    """Return class, total and correct for each class from 0 to `classes - 1`, those without an example included.

    Args:
        labels: class of every example, shape (examples,).
        correct: 1 where the prediction is right, else 0, shape (examples,).
        classes: how many the model tells apart.
    """
    known, right = np.asarray(labels, dtype=np.int64), np.asarray(correct, dtype=np.float64)
    if known.shape != right.shape or known.ndim != 1:
        raise UsageError(f"labels {known.shape} and correct {right.shape} must both be one value per example.")
    if not np.isin(right, (0.0, 1.0)).all():
        raise UsageError("correct must be 0 or 1 for each example: counts need predictions that are right or wrong.")
    inside = (known >= 0) & (known < classes)
    totals = np.bincount(known[inside], minlength=classes)
    rights = np.bincount(known[inside], weights=right[inside], minlength=classes)
    return [{"class": k, "total": int(totals[k]), "correct": int(rights[k])} for k in range(classes)]


def class_counts(
    after: RecordLike | Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """Return one row a class: total, correct, recall with its 95 % interval, and what changed, in examples.

    Args:
        after: rows of `count_classes`, or a study whose facts hold them.
        before: rows of an earlier evaluation on the same examples, or of another model; a study brings its own.

    Returns:
        Columns class, total, correct, recall, low, high, before (its correct predictions), delta (of the recall) and
        delta_examples, in words: "1 example". Without `before` the last three are missing values. Rare classes come first.

    Source: P3.6, P3.7.
    """
    if not isinstance(after, Sequence):
        facts = after.facts.get("evaluation_sample") or {}
        before = facts.get("classes_before") if before is None else before
        after = facts.get("classes") or []
    earlier = {int(row["class"]): row for row in before or ()}
    rows = [_class_row(row, earlier.get(int(row["class"]))) for row in after]
    return pd.DataFrame(rows, columns=COLUMNS).sort_values(["total", "class"], ignore_index=True)


def _class_row(row: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    total, correct = int(row["total"]), int(row["correct"])
    if earlier is not None and int(earlier["total"]) != total:
        raise UsageError(
            f"class {row['class']} has {total} examples in one evaluation and {earlier['total']} in the other: compare "
            "evaluations of the same examples."
        )
    low, high = wilson(correct, total)
    recall = correct / total if total else math.nan
    delta = (correct - int(earlier["correct"])) / total if earlier is not None and total else math.nan
    return {
        "class": int(row["class"]), "total": total, "correct": correct, "recall": recall, "low": low, "high": high,
        "before": None if earlier is None else int(earlier["correct"]), "delta": delta,
        "delta_examples": in_examples(delta, total) if earlier is not None else None,
    }  # fmt: skip


def class_test(mask: npt.NDArray[np.bool_], labels: npt.NDArray[Any]) -> dict[str, Any]:
    """Return whether the classes have the same shares in the sample, where `mask` is true, as in the full set."""
    values, codes = np.unique(labels, return_inverse=True)
    full, counts = (np.bincount(each, minlength=len(values)) for each in (codes, codes[mask]))
    n, size = int(mask.sum()), mask.size
    expected = full * (n / size)
    place = int(np.argmax(np.abs(counts - expected) / np.sqrt(expected)))
    value = values[place].item() if isinstance(values[place], np.generic) else values[place]
    furthest = {"value": value, "count": int(counts[place]), "expected": float(expected[place])}
    known = {"kind": "class", "name": "class", "levels": len(values), "furthest": furthest}
    if n == size or len(values) < 2:
        return known | {"p": 1.0, "test": "none: nothing can differ"}
    own = (((counts - expected) ** 2) / expected).sum()
    if min(expected.min(), (full - expected).min()) >= FEWEST_EXPECTED:
        p = float(stats.chi2.sf(float(own * size / (size - n)), len(values) - 1))
        return known | {"p": p, "test": "chi-square"}
    drawn = np.random.default_rng(0).multivariate_hypergeometric(full, n, size=DRAWS, method="marginals")
    far = (((drawn - expected) ** 2) / expected).sum(1)
    return known | {"p": float((1 + (far >= own * (1 - 1e-12)).sum()) / (1 + DRAWS)), "test": "exact"}
