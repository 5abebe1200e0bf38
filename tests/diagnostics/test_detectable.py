"""What n examples can show: closed forms, their inverse, and simulated tests on labels that were flipped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from workbench.errors import ConfigError
from workbench.topics.evaluation.sample_size import detectable_difference, examples_needed

REPEATS = 4000


def mcnemar(n: int, better: float, worse: float, both_wrong: float, *, noise: float, classes: int) -> float:
    """Share of simulated pairs of models that McNemar's test tells apart; labels are flipped one by one.

    The true class is 0. `better`: only the second model is right; `worse`: only the first; `both_wrong`: they are wrong in
    different ways; otherwise they are both right.
    """
    rng = np.random.default_rng(5)
    kind = rng.choice(4, size=(REPEATS, n), p=[better, worse, both_wrong, 1 - better - worse - both_wrong])
    first = np.choose(kind, [1, 0, 1, 0])
    second = np.choose(kind, [0, 1, 2, 0])
    flipped = rng.random((REPEATS, n)) < noise
    labels = np.where(flipped, rng.integers(1, classes, size=(REPEATS, n)), 0)
    won = ((second == labels) & (first != labels)).sum(1)
    lost = ((first == labels) & (second != labels)).sum(1)
    z = (won - lost) / np.sqrt(np.maximum(won + lost, 1))
    return float((np.abs(z) > stats.norm.isf(0.025)).mean())


@pytest.mark.parametrize(("noise", "classes"), [(0.0, 10), (0.1, 10), (0.3, 10), (0.1, 3)])
def test_flipped_labels_are_found_with_the_power_that_is_promised(noise: float, classes: int) -> None:
    n, disagreement, both_wrong = 600, 0.14, 0.05
    seen = disagreement * (1 - noise + noise / (classes - 1)) + both_wrong * 2 * noise / (classes - 1)
    difference = detectable_difference(n, disagreement=seen, label_noise=noise, classes=classes)
    better, worse = (disagreement + difference) / 2, (disagreement - difference) / 2
    assert worse > 0
    assert mcnemar(n, better, worse, both_wrong, noise=noise, classes=classes) == pytest.approx(0.8, abs=0.03)
    equal = mcnemar(n, disagreement / 2, disagreement / 2, both_wrong, noise=noise, classes=classes)
    assert equal == pytest.approx(0.05, abs=0.015)


def test_with_the_noise_left_out_the_power_would_be_overstated() -> None:
    n, noise, classes, seen = 600, 0.3, 10, 0.14 * (0.7 + 0.3 / 9) + 0.05 * 0.6 / 9
    naive = detectable_difference(n, disagreement=seen)
    assert mcnemar(n, (0.14 + naive) / 2, (0.14 - naive) / 2, 0.05, noise=noise, classes=classes) < 0.6


def test_different_examples_for_each_model() -> None:
    n, accuracy = 800, 0.8
    difference = detectable_difference(n, accuracy=accuracy)
    rng = np.random.default_rng(3)
    ones = rng.binomial(n, accuracy - difference / 2, REPEATS) / n
    others = rng.binomial(n, accuracy + difference / 2, REPEATS) / n
    pooled = (ones + others) / 2
    found = np.abs(others - ones) / np.sqrt(2 * pooled * (1 - pooled) / n) > stats.norm.isf(0.025)
    assert found.mean() == pytest.approx(0.8, abs=0.03)


def test_any_metric_by_the_standard_deviation_of_its_difference() -> None:
    n, sd = 200, 0.7
    difference = detectable_difference(n, sd=sd)
    drawn = np.random.default_rng(4).normal(difference, sd, (REPEATS, n))
    assert (stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)


def test_models_that_hardly_disagree_still_have_to_change_some_examples() -> None:
    n = 500
    difference = detectable_difference(n, disagreement=0.0)
    assert 7 <= n * difference <= 8
    fewest = next(k for k in range(1, 20) if stats.binomtest(k, k).pvalue < 0.05)  # all for the better, exact test
    assert stats.binom.sf(fewest - 1, n, difference) == pytest.approx(0.8, abs=0.05)
    assert stats.binom.sf(fewest - 1, n, difference / 2) < 0.3
    assert detectable_difference(n, accuracy=1.0) == pytest.approx(difference)


@pytest.mark.parametrize(
    "how",
    [
        {"disagreement": 0.1}, {"disagreement": 0.0}, {"accuracy": 0.7}, {"accuracy": 1.0}, {"sd": 0.3},
        {"disagreement": 0.05, "label_noise": 0.1, "classes": 10}, {"accuracy": 0.9, "label_noise": 0.2},
    ],
)  # fmt: skip
@pytest.mark.parametrize("n", [20, 269, 10_000])
def test_the_number_of_examples_is_the_inverse(how: dict[str, Any], n: int) -> None:
    assert examples_needed(detectable_difference(n, **how), **how) == n
    assert detectable_difference(2 * n, **how) < detectable_difference(n, **how)


def test_noise_shrinks_a_difference_in_accuracy() -> None:
    clean = detectable_difference(1000, disagreement=0.1)
    assert detectable_difference(1000, disagreement=0.1, label_noise=0.1) == pytest.approx(clean / 0.8)


def test_a_handful_of_examples_shows_nothing() -> None:
    assert detectable_difference(3, disagreement=0.3) == math.inf
    assert detectable_difference(12, disagreement=0.3, label_noise=0.4) == math.inf


@pytest.mark.parametrize(
    ("n", "how", "said"),
    [
        (10, {}, "give one of disagreement, accuracy and sd, not none"),
        (10, {"sd": 1.0, "accuracy": 0.5}, "not accuracy, sd"),
        (10, {"disagreement": 1.1}, "disagreement=1.1 must be finite and at least 0, and at most 1"),
        (10, {"sd": math.nan}, "sd=nan"),
        (0, {"sd": 1.0}, "n=0 examples show no difference"),
        (10, {"accuracy": 0.5, "label_noise": 0.5}, "must be at least 0 and below 0.5"),
        (10, {"accuracy": 0.5, "label_noise": -0.1}, "label_noise=-0.1"),
        (10, {"accuracy": 0.5, "classes": 1}, "classes=1 must be at least 2"),
        (10, {"sd": 0.5, "label_noise": 0.1}, "for a metric of zeros and ones"),
        (10, {"sd": 0.5, "power": 1.0}, "power=1.0"),
    ],
)
def test_bad_input_is_explained(n: int, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        detectable_difference(n, **how)


@pytest.mark.parametrize("difference", [0.0, -0.1, 1.5, math.nan])
def test_a_difference_that_cannot_be_asked_for(difference: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0, and at most 1"):
        examples_needed(difference, disagreement=0.1)
