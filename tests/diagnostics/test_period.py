"""The period finder against simulated curves: its false-alarm rate, its power, the name of the period, poor input."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.benchmarks.periodicity import CLEAN, by_steps_or_time, clean_alarms, planted, planted_found
from workbench.topics.periodicity.line_spectrum import line_spectrum
from workbench.topics.periodicity.period import MIN_POINTS, find_period

STEPS = 4.0 * np.arange(150)
RNG = np.random.default_rng(0)


def wave(period: float, *, noise: float = 0.3, steps: np.ndarray = STEPS, seed: int = 0) -> np.ndarray:
    return np.sin(2 * np.pi * steps / period) + noise * np.random.default_rng(seed).standard_normal(len(steps))


def test_at_most_one_in_a_hundred_clean_curves_fires() -> None:
    hits = [hit for hits in clean_alarms(700).values() for hit in hits]
    assert len(hits) == 700
    assert sum(hits) / len(hits) <= 0.01


def test_a_permutation_would_have_fired_on_these() -> None:
    """The curves are hard: shuffled, their largest periodogram ordinate is beaten in more than half of all AR(1) .9."""
    rng, fired = np.random.default_rng(0), 0
    for _ in range(20):
        curve = CLEAN["AR(1) 0.9"](100, rng)
        shuffled = [np.abs(np.fft.rfft(rng.permutation(curve - curve.mean()))).max() for _ in range(100)]
        fired += np.abs(np.fft.rfft(curve - curve.mean())).max() > np.quantile(shuffled, 0.99)
    assert fired > 10


def test_nineteen_of_twenty_planted_patterns_are_found_and_named() -> None:
    pairs = [pair for pairs in planted_found(200, 2.0).values() for pair in pairs]
    found, named = (sum(pair[k] for pair in pairs) for k in (0, 1))
    assert binomtest(found, len(pairs), 0.95, alternative="less").pvalue > 0.05
    assert named >= found - 4


def test_without_a_pattern_the_planting_leaves_the_curve_alone() -> None:
    curve, period = planted("white noise", "sine", 0.0, np.random.default_rng(3))
    rng = np.random.default_rng(3)
    points = int(rng.choice([100, 200, 400]))
    rng.uniform(8, min(40, points / 4))
    assert np.array_equal(curve, CLEAN["white noise"](points, rng))
    assert 4 <= period <= points / 8


def test_the_p_of_one_frequency_is_exact_for_white_noise() -> None:
    chances = [line_spectrum(RNG.standard_normal(128)).p_at(0.2) for _ in range(400)]
    for level in (0.5, 0.1):
        assert binomtest(sum(p < level for p in chances), 400, level).pvalue > 0.001


def test_fixed_steps_show_what_fixed_times_blur() -> None:
    found = {way: np.mean(hits) for way, hits in by_steps_or_time(60, 1.0, 3.0).items()}
    assert found["steps"] > 0.9
    assert found["time, by number"] < 0.1
    assert found["steps"] >= found["time, by step"]


@pytest.mark.parametrize("period", [19.0, 23.7, 60.0])
def test_the_period_is_named_with_and_without_an_epoch(period: float) -> None:
    values = wave(period)
    for epoch in (period, None, 2.5 * period):
        found = find_period(STEPS, values, epoch=epoch)
        assert found.period == pytest.approx(period, rel=0.02)
        assert found.p < 1e-4
        assert found.harmonic == (1 if epoch == period else None)
        assert found.size == pytest.approx(1 / np.sqrt(2), rel=0.15)


def test_an_epoch_shorter_than_two_evaluations_is_seen_where_it_appears() -> None:
    """Every 19 steps, looked at every 50: it appears as a wave of 380 steps, and belongs to the epoch all the same."""
    steps = 50.0 * np.arange(150)
    values = wave(19.0, steps=steps)
    assert find_period(steps, values, epoch=19.0).period == pytest.approx(19.0, rel=0.001)
    alone = find_period(steps, values).period
    assert alone is not None
    assert abs(1 / alone - abs(1 / 19 - 3 / 50)) * 7500 < 1


def test_evaluations_once_an_epoch_cannot_see_it() -> None:
    found = find_period(19.0 * np.arange(150), RNG.standard_normal(150), epoch=19.0)
    assert found.reason is None
    assert not found.epoch_seen
    assert find_period(20.0 * np.arange(150), RNG.standard_normal(150), epoch=190.0).epoch_seen


def test_the_early_last_evaluation_of_a_run_is_no_pause() -> None:
    steps = np.append(STEPS, STEPS[-1] + 1)
    assert find_period(steps, wave(19.0, steps=steps), epoch=19.0).period == pytest.approx(19.0, rel=0.01)


def test_a_trend_a_jump_and_the_edge_of_stability_are_no_period() -> None:
    k = np.arange(150)
    for values in (
        np.exp(-k / 30.0), np.where(k > 70, 1.0, 2.0), 1.0 + 0.1 * (-1.0) ** k + 0.01 * RNG.standard_normal(150), k**2.0,
    ):  # fmt: skip
        assert find_period(STEPS, values, epoch=19.0).period is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.full(150, 0.5), "constant"),
        (np.zeros(150), "constant"),
        (np.full(150, np.nan), "0 finite values"),
        (np.arange(MIN_POINTS - 1.0), f"{MIN_POINTS - 1} finite values"),
        (np.empty(0), "0 finite values"),
        (np.where(np.arange(150) % 20 == 0, np.inf, 1.0), "19 finite values"),
    ],
)
def test_poor_series_are_not_measured(values: np.ndarray, said: str) -> None:
    found = find_period(4.0 * np.arange(len(values)), values, epoch=19.0)
    assert found.period is None
    assert said in str(found.reason)


def test_a_series_is_judged_by_its_longest_finite_stretch() -> None:
    values = wave(19.0)
    values[[3, 40]] = np.nan
    assert find_period(STEPS, values, epoch=19.0).period == pytest.approx(19.0, rel=0.02)


def test_long_curves_are_averaged_not_refused() -> None:
    steps = np.arange(50_000.0)
    assert find_period(steps, wave(500.0, steps=steps), epoch=500.0).period == pytest.approx(500.0, rel=0.001)


def test_huge_and_tiny_values() -> None:
    for factor in (1e-200, 1e200):
        assert find_period(STEPS, factor * wave(19.0), epoch=19.0).period == pytest.approx(19.0, rel=0.02)
