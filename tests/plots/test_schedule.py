"""The schedule's picture against its closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.config import TrainConfig
from workbench.plots.style import why_not_measured
from workbench.topics.schedule.figures import plot_schedule


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> np.ndarray:
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_data(), dtype=float)


def test_warmup_then_constant_at_the_steps_that_matter() -> None:
    """F3.5, F3.13: 10,000 steps with 1,000 of warmup are 11,000."""
    baseline = TrainConfig(peak_lr=0.1, total_steps=10_000, batch_size=8)
    ax = plot_schedule(baseline.replace(warmup_steps=1000, total_steps=11_000), baseline=baseline, ax=blank())
    x, y = drawn(ax, "peak 0.1, 11,000 steps")
    lr = dict(zip(x.tolist(), y.tolist(), strict=True))
    assert (lr[0], lr[999], lr[1000], lr[10_999]) == pytest.approx((0.0, 0.0999, 0.1, 0.1))
    assert set(drawn(ax, "warmup ends at step 1,000")[0].tolist()) == {1000}
    assert drawn(ax, "baseline, 10,000 steps")[0][[0, -1]].tolist() == [0, 9999]


def test_every_step_of_a_short_cosine_is_drawn() -> None:
    ax = plot_schedule(TrainConfig(peak_lr=2.0, total_steps=50, batch_size=8, schedule="cosine"), ax=blank())
    x, y = drawn(ax, "peak 2")
    assert x.tolist() == list(range(50))
    assert y == pytest.approx([1 + math.cos(math.pi * k / 50) for k in range(50)])


def test_no_warmup_no_mark() -> None:
    ax = plot_schedule(TrainConfig(peak_lr=2.0, total_steps=50, batch_size=8), ax=blank())
    assert len(ax.lines) == 1


def test_a_schedule_without_finite_values_is_not_measured() -> None:
    config = TrainConfig(peak_lr=2.0, total_steps=5, batch_size=8, schedule=lambda progress: math.nan)
    assert why_not_measured(plot_schedule(config, ax=blank()))
