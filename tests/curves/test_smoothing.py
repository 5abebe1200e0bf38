from __future__ import annotations

import numpy as np
import pytest

from workbench.curves.smoothing import noise_per_step, smooth


def test_noise_is_the_recorded_one_and_the_gaps_take_its_median():
    se = np.array([0.2, np.nan, 0.4, 0.3])
    mean_squares = np.cumsum(np.square([0.2, 0.3, 0.4, 0.3])) / np.arange(1, 5)
    assert noise_per_step(np.ones(4), se, full_batch=False) == pytest.approx(np.sqrt(mean_squares))


@pytest.mark.parametrize("sd", [0.01, 0.3])
def test_unknown_noise_is_estimated_from_second_differences(sd):
    t = np.linspace(0, 1, 4000)
    loss = 3 * np.exp(-2 * t) + sd * np.random.default_rng(1).standard_normal(t.size)
    assert noise_per_step(loss, None, full_batch=False)[0] == pytest.approx(sd, rel=0.06)


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
