from __future__ import annotations

import numpy as np
import pytest

from workbench.curves.smoothing import fill_gaps, noise_per_step, running_median, smooth


def test_median_equals_the_median_of_each_window():
    values = np.random.default_rng(0).standard_normal(40)
    out = running_median(values, 5)
    for k in range(40):
        half = min(2, k, 39 - k)
        assert out[k] == np.median(values[k - half : k + half + 1])


def test_noise_is_the_recorded_one_and_the_gaps_take_its_median():
    se = np.array([0.2, np.nan, 0.4, 0.3])
    mean_squares = np.cumsum(np.square([0.2, 0.3, 0.4, 0.3])) / np.arange(1, 5)
    assert noise_per_step(np.ones(4), se, full_batch=False) == pytest.approx(np.sqrt(mean_squares))


@pytest.mark.parametrize("sd", [0.01, 0.3])
def test_unknown_noise_is_estimated_from_second_differences(sd):
    t = np.linspace(0, 1, 4000)
    loss = 3 * np.exp(-2 * t) + sd * np.random.default_rng(1).standard_normal(t.size)
    assert noise_per_step(loss, None, full_batch=False)[0] == pytest.approx(sd, rel=0.06)


def test_a_full_batch_has_no_noise_beyond_float32():
    assert noise_per_step(np.full(9, 2.0), np.full(9, 0.5), full_batch=True).max() < 1e-6


@pytest.mark.parametrize(("sd", "width"), [(0.005, 3), (0.15, 17), (50.0, 65)])
def test_the_window_widens_with_the_noise_and_not_further(sd, width):
    t = np.arange(1000) / 1000
    loss = 2 * np.exp(-5 * t)
    noise = np.full(1000, sd)
    smoothed, left, got = smooth(loss, noise, loss_ref=2.0, total_steps=1000, progress=2.0, full_batch=False)
    assert got == width
    assert smoothed.shape == left.shape == (1000,)
    assert left[500] == pytest.approx(1.2533 * sd / np.sqrt(width))
    assert left[0] == sd  # one value: nothing to average over


def test_the_window_is_at_most_a_tenth_of_the_run():
    loss, noise = np.linspace(2, 1, 60), np.full(60, 9.0)
    assert smooth(loss, noise, loss_ref=2.0, total_steps=60, progress=1.0, full_batch=False)[2] == 5


def test_single_skipped_steps_are_bridged_and_a_non_finite_end_is_cut_off():
    finite, ended = fill_gaps(np.array([4.0, np.nan, 2.0, 1.0]))
    assert finite.tolist() == [4.0, 3.0, 2.0, 1.0]
    assert not ended
    finite, ended = fill_gaps(np.array([4.0, 8.0, np.inf]))
    assert finite.tolist() == [4.0, 8.0]
    assert ended
