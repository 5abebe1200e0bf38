"""Skew between a sample and its full set: planted ones are found, drawn ones pass at the stated rate (P3.2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_breast_cancer
from workbench.workloads.evaluation_sample import draw_sample

from workbench.errors import DataError, UsageError
from workbench.topics.evaluation.skew import class_test, skew_tests, worst_skew

BUNCH = load_breast_cancer()
ROWS, LABELS = BUNCH.data[:, :6], BUNCH.target
SIZE = len(LABELS)
LOSSES = np.random.default_rng(0).exponential(size=SIZE) ** 3


def taken(indices: Any, size: int = SIZE) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[indices] = True
    return mask


def smallest(mask: np.ndarray, **more: Any) -> float:
    known = {"labels": LABELS, "features": ROWS, "metrics": {"loss": LOSSES}} | more
    return float(worst_skew(skew_tests(mask, **known))[0]["p_adjusted"])


@pytest.mark.parametrize("how", ["random", "stratified"])
def test_drawn_samples_pass_at_the_stated_rate(how: Any) -> None:
    draws, level = 120, 0.05
    found = [smallest(taken(draw_sample(ROWS, 150, how=how, labels=LABELS, seed=s).indices)) for s in range(draws)]
    alarms = sum(p < level for p in found)
    assert alarms <= stats.binom.ppf(0.999, draws, level), f"{alarms} of {draws} at {level}"
    assert min(found) < 0.5, "the test is alive"


def test_each_kind_alone_keeps_its_rate() -> None:
    rng, draws = np.random.default_rng(1), 300
    masks = [taken(rng.choice(SIZE, 200, replace=False)) for _ in range(draws)]
    coin = (rng.random(SIZE) < 0.9) * 1.0
    for test in (
        lambda m: class_test(m, LABELS),
        lambda m: skew_tests(m, metrics={"accuracy": coin})[0],
        lambda m: skew_tests(m, features=ROWS[:, :1])[0],
    ):
        alarms = sum(test(mask)["p"] < 0.1 for mask in masks)
        assert stats.binom.ppf(0.0005, draws, 0.02) <= alarms <= stats.binom.ppf(0.9995, draws, 0.1)


def test_a_sample_that_prefers_a_class_fails() -> None:
    mask = taken(np.argsort(LABELS, kind="stable")[:150])
    assert smallest(mask, features=None, metrics=None) < 1e-4
    assert smallest(mask) < 0.01


def test_a_sample_that_prefers_a_range_of_a_feature_fails_and_names_it() -> None:
    worst = worst_skew(skew_tests(taken(np.argsort(ROWS[:, 4])[:150]), features=ROWS, feature_names=list("abcdef")))[0]
    assert worst["p_adjusted"] < 1e-6
    assert (worst["kind"], worst["name"]) == ("feature", "e")


def test_a_sample_of_easy_examples_fails_on_the_metric() -> None:
    worst = worst_skew(
        skew_tests(taken(np.argsort(LOSSES)[:400]), labels=LABELS, features=ROWS, metrics={"loss": LOSSES})
    )[0]
    assert (worst["kind"], worst["p_adjusted"] < 0.01) == ("metric", True)
    assert worst["difference"] < 0
    assert worst["high"] < 0


def test_two_classes_exactly_as_the_hypergeometric_distribution_says() -> None:
    labels = np.arange(40) < 6
    mask = taken([0, 1, 2, 3, 4, 30, 31, 32, 33, 34], 40)
    found = class_test(mask, labels)
    law = stats.hypergeom(40, 6, 10)
    far = [k for k in range(7) if abs(k - 1.5) >= abs(5 - 1.5) - 1e-9]
    assert found["test"] == "exact"
    assert found["p"] == pytest.approx(law.pmf(far).sum(), abs=2e-3)


def test_chi_square_is_that_of_sample_against_rest() -> None:
    mask = taken(np.random.default_rng(3).choice(SIZE, 200, replace=False))
    table = [np.bincount(LABELS[mask]), np.bincount(LABELS[~mask])]
    assert class_test(mask, LABELS)["p"] == pytest.approx(stats.chi2_contingency(table, correction=False).pvalue)


def test_the_interval_of_the_metric_covers_and_knows_that_the_set_is_finite() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=60)
    half = [skew_tests(taken(rng.choice(60, 45, replace=False), 60), metrics={"m": values})[0] for _ in range(400)]
    truth = values.std(ddof=1) / math.sqrt(45) * math.sqrt(1 - 45 / 60)
    assert half[0]["se"] == pytest.approx(truth)
    assert np.std([t["difference"] for t in half]) == pytest.approx(truth, rel=0.12)
    assert np.mean([t["low"] <= 0 <= t["high"] for t in half]) == pytest.approx(0.95, abs=0.035)
    p = [t["p"] for t in half]
    assert np.mean(np.array(p) < 0.2) == pytest.approx(0.2, abs=0.07)


def test_large_sets_use_the_normal_law_and_agree_with_the_exact_one() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=20_000)
    mask = taken(rng.choice(20_000, 500, replace=False), 20_000)
    found = skew_tests(mask, metrics={"m": values})[0]
    assert found["test"] == "normal"
    assert found["p"] == pytest.approx(stats.ttest_1samp(values[mask], values.mean()).pvalue, abs=0.03)


def test_the_full_set_one_class_and_constant_columns_cannot_differ() -> None:
    everything = np.ones(SIZE, dtype=bool)
    assert smallest(everything) == 1.0
    half = np.arange(SIZE) < 200
    assert class_test(half, np.zeros(SIZE))["p"] == 1.0
    assert skew_tests(half, features=np.ones((SIZE, 3))) == []
    assert skew_tests(half, metrics={"m": np.ones(SIZE)})[0]["p"] == 1.0


def test_missing_values_are_a_value_of_their_own() -> None:
    rows = ROWS[:, :2].copy()
    half = np.arange(SIZE) % 2 == 0
    rows[::4, 0] = np.nan  # only where the sample is
    worst = worst_skew(skew_tests(half, features=rows))[0]
    assert (worst["name"], worst["test"], worst["p_adjusted"] < 1e-6) == ("0", "missing values", True)
    rows[:, 0] = np.nan
    assert [test["name"] for test in skew_tests(half, features=rows)] == ["1"]


def test_a_column_of_few_values_is_a_category() -> None:
    half = np.arange(SIZE) < 300
    (found,) = skew_tests(half, features=(np.arange(SIZE) % 3)[:, None].astype(float))
    assert found["test"] == "chi-square"
    assert found["p"] > 0.5
    (found,) = skew_tests(half, features=np.where(half, 0.0, 1.0)[:, None])
    assert found["p"] < 1e-9


def test_a_metric_that_is_not_finite_is_not_tested() -> None:
    values = LOSSES.copy()
    values[7] = math.nan
    found = skew_tests(np.arange(SIZE) < 100, metrics={"loss": values})[0]
    assert found["p"] is None
    assert found["reason"] == "1 values of loss are not finite"
    assert worst_skew([found]) == []


def test_holm_within_a_kind_and_bonferroni_over_kinds() -> None:
    tests = [{"kind": "feature", "name": str(i), "p": p} for i, p in enumerate((0.5, 0.01, 0.03))]
    found = worst_skew([*tests, {"kind": "metric", "name": "m", "p": 0.02}])
    assert [(t["name"], round(t["p_adjusted"], 6)) for t in found] == [
        ("m", 0.04),
        ("1", 0.06),
        ("2", 0.12),
        ("0", 1.0),
    ]


def test_bad_input_is_explained() -> None:
    with pytest.raises(UsageError, match="the sample has 0 examples"):
        skew_tests(np.zeros(5, dtype=bool))
    with pytest.raises(DataError, match=r"labels has 4 rows for 5 examples"):
        skew_tests(np.ones(5, dtype=bool), labels=[0, 1, 0, 1])
    with pytest.raises(DataError, match=r"must be \(examples, features\)"):
        skew_tests(np.ones(5, dtype=bool), features=np.zeros((5, 2, 2)))
