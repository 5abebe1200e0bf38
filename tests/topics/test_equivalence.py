"""Two one-sided tests: against SciPy's Welch test, against simulation, and where they have to stay silent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from workbench.errors import UsageError
from workbench.topics.batch_size.diagnose import equivalence

RNG = np.random.default_rng(0)


def lognormal(mean, sd, count, rng=RNG):
    return np.exp(rng.normal(mean, sd, count))


def test_the_p_value_is_the_larger_of_two_welch_tests_by_scipy():
    ours, theirs = lognormal(0.0, 0.1, 6), lognormal(0.03, 0.2, 9)
    found = equivalence(ours, theirs, margin=0.2)
    bound = math.log(1.2)
    upper = stats.ttest_ind(np.log(ours) - bound, np.log(theirs), equal_var=False, alternative="less").pvalue
    lower = stats.ttest_ind(np.log(ours) + bound, np.log(theirs), equal_var=False, alternative="greater").pvalue
    assert found.chance == pytest.approx(max(upper, lower), rel=1e-9)
    interval = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(interval)), rel=1e-9)
    assert found.ratio == pytest.approx(math.exp(np.log(ours).mean() - np.log(theirs).mean()))


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.0, "equivalent"), (math.log(2), "different"), (-math.log(2), "different")]
)
def test_what_is_planted_is_found(shift, verdict):
    rng = np.random.default_rng(1)
    assert equivalence(lognormal(shift, 0.02, 6, rng), lognormal(0.0, 0.02, 6, rng)).verdict == verdict


def test_little_data_is_neither_the_same_nor_different():
    rng = np.random.default_rng(2)
    assert equivalence(lognormal(0, 0.3, 3, rng), lognormal(0, 0.3, 3, rng)).verdict == "undecided"


def test_groups_that_differ_by_the_margin_are_called_equivalent_in_one_of_twenty_cases():
    rng, called = np.random.default_rng(3), 0
    for _ in range(2000):
        found = equivalence(lognormal(math.log(1.1), 0.03, 5, rng), lognormal(0.0, 0.03, 5, rng))
        called += found.verdict == "equivalent"
    assert stats.binomtest(called, 2000, 0.05, alternative="greater").pvalue > 1e-3
    assert called > 50, "and not never: the test keeps its level, and uses it"


@pytest.mark.parametrize("values", [[1.0], [], [1.0, math.nan], [1.0, math.inf], [1.0, 0.0], [1.0, -1.0]])
def test_what_has_no_spread_or_no_logarithm_gives_no_answer(values):
    assert equivalence(values, [1.0, 1.1]) is None
    assert equivalence([1.0, 1.1], values) is None


@pytest.mark.parametrize(("ours", "verdict"), [([1.05, 1.05], "equivalent"), ([1.2, 1.2], "different")])
def test_seeds_that_all_agree(ours, verdict):
    found = equivalence(ours, [1.0, 1.0])
    assert found.verdict == verdict
    assert found.low == found.high == pytest.approx(ours[0])


@pytest.mark.parametrize("wrong", [{"margin": 0.0}, {"margin": math.inf}, {"alpha": 0.0}, {"alpha": 0.5}])
def test_arguments_out_of_range(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        equivalence([1.0, 1.1], [1.0, 1.1], **wrong)
