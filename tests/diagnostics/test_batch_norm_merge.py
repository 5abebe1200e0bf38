"""Merged statistics against those of the examples themselves, and what an average of moving averages is."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.errors import UsageError
from workbench.train.distributed.merge_statistics import merge_statistics


def test_the_spread_of_the_means_is_part_of_the_variance() -> None:
    found = merge_statistics([-3, -1, 1, 3], [1, 1, 1, 1])
    assert (found.mean, found.variance, found.average_variance, found.spread) == (0.0, 6.0, 1.0, 5.0)


@pytest.mark.parametrize("sizes", [(5, 5), (1, 9, 4), (7,), (0, 3, 4)])
def test_groups_of_any_size_give_the_statistics_of_all_their_examples(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(3 * i, 1 + i, size=(n, 4)) for i, n in enumerate(sizes)]
    means, variances = (np.array([f(g) if len(g) else np.full(4, np.nan) for g in groups]) for f in (_mean, _var))
    found, whole = merge_statistics(means, variances, sizes), np.concatenate(groups)
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, whole.var(0), rtol=1e-12)
    np.testing.assert_allclose(found.average_variance + found.spread, found.variance, rtol=1e-12)


def _mean(group: np.ndarray) -> np.ndarray:
    return group.mean(0)


def _var(group: np.ndarray) -> np.ndarray:
    return group.var(0)


def test_averaging_moving_averages_is_the_moving_average_of_the_average() -> None:
    rng = np.random.default_rng(1)
    means = rng.normal(size=(50, 4)) + np.array([-3, -1, 1, 3])  # of each step and device
    each, of_average = np.zeros(4), 0.0
    for row in means:
        each, of_average = 0.9 * each + 0.1 * row, 0.9 * of_average + 0.1 * row.mean()
    assert merge_statistics(each, np.ones(4)).mean == pytest.approx(of_average, rel=1e-12)


def test_nan_stays_nan() -> None:
    assert np.isnan(merge_statistics([1.0, np.nan], [1.0, 1.0]).variance)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "at least one group"),
        (([1.0, 2.0], [1.0]), r"means \(2,\), variances \(1,\)"),
        ((1.0, 1.0), "at least one group"),
        (([1.0], [1.0], [1, 2]), r"counts \(2,\)"),
        (([1.0, 2.0], [1.0, 1.0], [0, 0]), "not all 0"),
        (([1.0, 2.0], [1.0, 1.0], [-1, 2]), "at least 0"),
    ],
)
def test_shapes_and_counts_are_checked(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        merge_statistics(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 7, 60])
def test_merging_in_place_and_going_on_forgets_part_of_the_spread(steps: int) -> None:
    """A share q + (1 - q)^2 of it is left after each merge, q being what the moving averages keep in between: 0.75 at worst."""
    means, kept = np.array([-3.0, -1.0, 1.0, 3.0]), 0.9**steps
    held, variances = means.copy(), np.full(4, 6.0)
    for _ in range(3):
        held, variances = np.full(4, held.mean()), np.full(4, variances.mean())
        before = variances[0]
        for _ in range(steps):
            held, variances = 0.9 * held + 0.1 * means, 0.9 * variances + 0.1
        merged = merge_statistics(held, variances)
        variances[:] = merged.variance
    expected = 1 + kept * (before - 1) + (1 - kept) ** 2 * 5
    assert merged.variance == pytest.approx(expected, rel=1e-12)
    assert merged.variance < 6 - (0.1 if steps < 60 else 0)
