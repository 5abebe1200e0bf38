"""The expected maximum of k draws against closed forms and simulation; noise that a trend does not touch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workbench.curves.selection import FEWEST_TO_SEE_NOISE, expected_maximum, wobble

PI = math.pi


@pytest.mark.parametrize(
    ("draws", "exact"),
    [
        (1, 0.0),
        (2, 1 / math.sqrt(PI)),
        (3, 1.5 / math.sqrt(PI)),
        (4, 3 / math.sqrt(PI) * (0.5 + math.asin(1 / 3) / PI)),
    ],
)
def test_closed_forms(draws: int, exact: float) -> None:
    assert expected_maximum(draws) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("draws", [10, 40])
def test_simulation(draws: int) -> None:
    best = np.random.default_rng(0).standard_normal((40_000, draws)).max(1)
    assert expected_maximum(draws) == pytest.approx(best.mean(), abs=4 * best.std() / 200)


def test_noise_is_that_of_the_draws_whatever_the_trend() -> None:
    k = np.arange(4000)
    noise = 0.3 * np.random.default_rng(1).standard_normal(k.size)
    for trend in (0 * k, 2 - 0.01 * k, 1e-6 * (k - 2000.0) ** 2):
        assert wobble(trend + noise) == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0], [2.0] * 9, [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_no_noise_where_there_is_none_or_too_little_to_see(values: list[float]) -> None:
    assert wobble(np.array(values)) == pytest.approx(0.0, abs=1e-12)
    assert FEWEST_TO_SEE_NOISE == 4
