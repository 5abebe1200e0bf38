"""Counts behind recalls: Wilson's interval against SciPy's and a bootstrap, and differences in examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from workbench.curves.class_counts import class_counts, count_classes, in_examples, wilson
from workbench.errors import ConfigError, UsageError


@pytest.mark.parametrize(("correct", "total"), [(0, 5), (5, 5), (17, 20), (31, 32), (900, 1000)])
def test_wilson_is_that_of_scipy(correct: int, total: int) -> None:
    truth = stats.binomtest(correct, total).proportion_ci(0.95, method="wilson")
    assert wilson(correct, total) == pytest.approx((truth.low, truth.high), abs=1e-12)


def test_without_an_example_nothing_is_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    for wrong in ((3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)):
        with pytest.raises(ConfigError, match="confidence="):
            wilson(*wrong[:2], confidence=wrong[2])


@pytest.mark.parametrize("total", [10, 20, 100, 1000])
def test_the_interval_of_a_rare_class_is_as_wide_as_a_bootstrap_says(total: int) -> None:
    correct = round(0.8 * total)
    drawn = np.random.default_rng(0).choice(np.arange(total) < correct, (4000, total)).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    ours = wilson(correct, total)
    assert ours[1] - ours[0] == pytest.approx(high - low, rel=0.15)
    assert ours[1] - ours[0] == pytest.approx(2 * 1.96 * math.sqrt(0.16 / total), rel=0.15)


def test_a_gain_of_five_points_on_twenty_examples_is_one_example() -> None:
    before = [{"class": 0, "total": 20, "correct": 15}, {"class": 1, "total": 400, "correct": 380}]
    after = [{"class": 0, "total": 20, "correct": 16}, {"class": 1, "total": 400, "correct": 378}]
    table = class_counts(after, before)
    rare = table.iloc[0]
    assert (rare["class"], rare["total"], rare["correct"], rare["before"]) == (0, 20, 16, 15)
    assert rare["delta"] == pytest.approx(0.05)
    assert list(table["delta_examples"]) == ["1 example", "-2 examples"]


@pytest.mark.parametrize(
    ("delta", "total", "words"),
    [(0.05, 20, "1 example"), (0.15, 20, "3 examples"), (-0.05, 20, "-1 example"), (0.0, 20, "0 examples"), (math.nan, 20, "unknown"), (0.5, 0, "unknown")],
)  # fmt: skip
def test_differences_in_words(delta: float, total: int, words: str) -> None:
    assert in_examples(delta, total) == words


def test_counts_of_every_class_the_empty_ones_included() -> None:
    rows = count_classes([2, 0, 2, 2], [1, 0, 1, 0], classes=4)
    assert [(r["class"], r["total"], r["correct"]) for r in rows] == [(0, 1, 0), (1, 0, 0), (2, 3, 2), (3, 0, 0)]
    table = class_counts(rows)
    assert list(table["class"]) == [1, 3, 0, 2], "rare classes first"
    assert table["recall"].isna().tolist() == [True, True, False, False]
    assert table["delta_examples"].isna().all()
    assert len(class_counts([])) == 0


def test_what_cannot_be_counted_is_explained() -> None:
    with pytest.raises(UsageError, match=r"correct must be 0 or 1"):
        count_classes([0, 1], [0.5, 1.0], classes=2)
    with pytest.raises(UsageError, match=r"labels \(2,\) and correct \(3,\)"):
        count_classes([0, 1], [0, 1, 1], classes=2)
    with pytest.raises(UsageError, match="evaluations of the same examples"):
        class_counts([{"class": 0, "total": 4, "correct": 2}], [{"class": 0, "total": 5, "correct": 2}])
