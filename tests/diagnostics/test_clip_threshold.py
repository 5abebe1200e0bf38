"""The threshold is a percentile of what is typical: early norms, instabilities and rounding are left out, NaN is counted."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from workbench.curves.clip_threshold import arrival, choose_threshold, steady_stretch


def heavy_tailed(steps: int = 1000, seed: int = 0) -> np.ndarray:
    """Stationary norms with a Pareto tail of index 2: their variance is infinite."""
    return 1.0 + np.random.default_rng(seed).pareto(2.0, size=steps)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0])
def test_it_is_the_empirical_percentile_behind_the_start(seed: int, percentile: float) -> None:
    norms = heavy_tailed(seed=seed)
    found = choose_threshold(norms, percentile=percentile)
    assert found.threshold == pytest.approx(np.percentile(norms[100:], percentile), rel=1e-12)
    assert found.all_steps == pytest.approx(np.percentile(norms, percentile), rel=1e-12)
    assert found.median == pytest.approx(np.median(norms[100:]))
    assert found.low == pytest.approx(np.percentile(norms[100:], 25))
    assert found.high == pytest.approx(np.percentile(norms[100:], 75))
    assert found.threshold is not None
    assert found.median is not None
    assert found.ratio == pytest.approx(found.threshold / found.median)
    assert found.clip_frac == pytest.approx(1 - percentile / 100, abs=0.04)


def test_a_pareto_tail_has_the_percentile_that_its_formula_says() -> None:
    """P(norm > x) = x^-2, so that the 90th percentile is sqrt(10)."""
    found = choose_threshold(heavy_tailed(200_000))
    assert found.threshold == pytest.approx(math.sqrt(10), rel=0.02)
    assert found.ratio == pytest.approx(math.sqrt(5), rel=0.02)


@pytest.mark.parametrize("start_frac", [0.05, 0.12, 0.15])
def test_large_norms_at_the_start_lift_the_percentile_over_all_steps_only(start_frac: float) -> None:
    norms = heavy_tailed()
    usual = choose_threshold(norms)
    norms[: round(1000 * start_frac)] *= 1000.0
    found = choose_threshold(norms)
    assert found.threshold is not None
    assert usual.threshold is not None
    assert found.threshold < 2 * usual.threshold
    assert found.all_steps is not None
    assert (found.all_steps > 100) is (start_frac > 0.1), "the trap must be one for this test to mean anything"
    assert found.windows[0] > 100 > max(found.windows[2:])


def test_nan_and_inf_are_counted_and_change_nothing_else() -> None:
    norms = heavy_tailed(400)
    spoiled = np.insert(norms, [60, 150, 150, 300], [math.nan, math.inf, -math.inf, math.nan])
    found = choose_threshold(spoiled, first=50)
    assert found.nonfinite == 4
    assert found.steps == 404
    assert found.threshold == pytest.approx(np.percentile(norms[50:], 90), rel=1e-12)
    assert found.clip_frac == pytest.approx((norms > found.threshold).mean())


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e4, 1e200])
def test_the_scale_of_the_loss_scales_the_threshold(factor: float) -> None:
    norms = heavy_tailed(300)
    one, scaled = choose_threshold(norms), choose_threshold(norms * factor)
    assert one.threshold is not None
    assert scaled.threshold == pytest.approx(factor * one.threshold)
    assert (scaled.ratio, scaled.clip_frac) == (pytest.approx(one.ratio), one.clip_frac)


def test_drift_is_how_far_the_windows_lie_apart() -> None:
    assert choose_threshold(heavy_tailed(20_000)).drift == pytest.approx(1.0, abs=0.2)
    halving = 2.0 ** -(np.arange(1000) / 100)
    assert choose_threshold(halving, first=0).drift == pytest.approx(2.0**9, rel=1e-6), (
        "ten windows, each half the last"
    )


@pytest.mark.parametrize(
    ("norms", "why"),
    [
        ([], "no gradient norm was recorded"),
        ([math.nan] * 50, "none of the 50 gradient norms is finite"),
        ([math.inf] * 30 + [math.nan] * 30, "none of the 60 gradient norms is finite"),
        ([0.0] * 100, "all gradient norms are 0: no gradient reaches the parameters"),
        ([0.7] * 100, r"all gradient norms are equal \(0.7\): a threshold would clip every step or none"),
        ([0.7] * 50 + [math.nan] + [0.7 * (1 + 1e-8)] * 50, "all gradient norms are equal"),
        ([1.0, 2.0] * 10, "the steady stretch has 18 finite gradient norms, and 20 are needed"),
        ([1.0, 2.0] * 10 + [math.nan] * 80, "the steady stretch has 10 finite gradient norms, and 20 are needed"),
        ([0.0] * 96 + [1.0] * 4, "96% of the gradient norms are 0, and so is their 90th percentile"),
    ],
)
def test_norms_that_choose_nothing_say_why(norms: list[float], why: str) -> None:
    found = choose_threshold(norms, first=0 if 0.0 in norms[:1] else None)
    assert found.threshold is None
    assert found.ratio is None
    assert re.search(why, found.reason)


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.5, math.nan])
def test_a_percentile_that_is_none_is_refused(percentile: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 100"):
        choose_threshold([1.0, 2.0], percentile=percentile)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (10, 100)),
        ({"skip_frac": 0.0}, (0, 100)),
        ({"warmup_steps": 30}, (30, 100)),
        ({"warmup_steps": 5}, (10, 100)),
        ({"warmup_steps": 500}, (100, 100)),
        ({"rises": [(60, None)]}, (10, 61)),
        ({"rises": [(20, 40)]}, (40, 100)),
        ({"rises": [(70, 90)]}, (10, 71)),
        ({"rises": [(30, 35), (90, None)]}, (35, 91)),
        ({"rises": [(0, None)]}, (10, 10)),
        ({"rises": [(0, 20)]}, (20, 100)),
    ],
)
def test_the_steady_stretch_lies_behind_the_start_and_between_the_rises(
    settings: dict[str, object], expected: tuple[int, int]
) -> None:
    assert steady_stretch(100, **settings) == expected  # type: ignore[arg-type]


def test_a_run_has_arrived_where_its_norms_are_rounding() -> None:
    """Norms 0.5^k with rounding noise at 1e-17: a millionth of the median of the first tenth is reached by arithmetic."""
    k = np.arange(200)
    norms = 0.5**k + 1e-17
    limit = 1e-6 * np.median(norms[:20])
    expected = math.floor(math.log(limit) / math.log(0.5)) + 1
    assert arrival(norms) == expected
    assert 20 < expected < 60
    found = choose_threshold(norms)
    assert (found.first_step, found.last_step) == (math.ceil(expected / 10), expected - 1)


def test_a_run_that_goes_on_learning_has_not_arrived() -> None:
    assert arrival(heavy_tailed(500)) == 500
    outlier = heavy_tailed(500)
    outlier[3] = 1e9
    assert arrival(outlier) == 500, "one huge batch does not make the others small"
    assert arrival([0.0] * 30) == 30
    assert arrival([math.nan] * 30) == 30
    assert arrival([]) == 0
