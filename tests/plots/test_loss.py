"""The y axis of losses: readable with zeros, with negative values and beside runs that blow up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.records import MemoryRecord, one_trial
from workbench.plots.style import log_scale, short
from workbench.topics.lr_sweep.figures import plot_loss_curves

FALLING = 2.0 * np.exp(-np.arange(60) / 8)


def curves(*losses: Sequence[float] | np.ndarray) -> Axes:
    """Draw trials with these losses, at learning rates 0.1, 0.2, ..."""
    parts = [one_trial(np.asarray(y, dtype=float), peak_lr=0.1 * (i + 1)) for i, y in enumerate(losses)]
    for number, part in enumerate(parts):
        part.trials["trial"] = part.steps["trial"] = number
    record = MemoryRecord(
        pd.concat([p.trials for p in parts]), pd.concat([p.steps for p in parts]), parts[0].evals, parts[0].config
    )
    return rendered(plot_loss_curves(record, trials=range(len(parts)), ax=Figure().subplots()))


def rendered(ax: Axes) -> Axes:
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.canvas.draw()
    return ax


def ydata(ax: Axes, line: int) -> np.ndarray:
    return np.asarray(ax.lines[line].get_ydata(), dtype=float)


def test_a_loss_of_zero_lies_at_the_lower_edge_of_a_logarithmic_axis() -> None:
    losses = FALLING.copy()
    losses[[20, 30]] = 0.0
    ax = curves(losses)
    assert ax.get_yscale() == "log"
    floor = FALLING.min()
    assert ydata(ax, 0)[[20, 30]] == pytest.approx([floor, floor])
    assert np.delete(ydata(ax, 0), [20, 30]) == pytest.approx(np.delete(losses, [20, 30]))
    assert 0.2 * floor < ax.get_ylim()[0] < floor
    assert ax.get_ylim()[1] > 2.0
    assert f"lower edge: {short(floor)} or less" in ax.get_ylabel()


@pytest.mark.parametrize("peak", [1e6, 2.5e36, 1e308])
def test_a_run_that_blows_up_leaves_the_others_readable(peak: float) -> None:
    ax = curves(FALLING, [2.0, 50.0, peak, 3.0, np.nan])
    assert ax.get_ylim()[1] == pytest.approx(20)
    low, high = np.log(ax.get_ylim())
    assert np.ptp(np.log(FALLING)) > 0.4 * (high - low)
    (mark,) = [line for line in ax.lines if line.get_marker() == "^"]
    assert [float(v[0]) for v in mark.get_data()] == pytest.approx([1, 20])
    labels = ax.get_legend_handles_labels()[1]
    said = short(peak) if peak < 1e100 else "> 1e100"
    assert any(label == f"lr 0.2, off scale at ▲ (max {said})" for label in labels)
    assert not any("off scale" in label for label in labels if label.startswith("lr 0.1"))


def test_what_a_label_calls_the_maximum_is_that_of_the_losses_and_not_of_their_median() -> None:
    blown = np.geomspace(2.0, 0.5, 400)
    blown[2:12] = np.r_[40.0, 300.0, np.full(8, 60.0)]
    assert (
        "lr 0.2, off scale at ▲ (max 300)" in curves(np.geomspace(2.0, 0.5, 400), blown).get_legend_handles_labels()[1]
    )


def test_negative_losses_beside_a_blow_up_can_be_read() -> None:
    ax = curves(np.linspace(3, -4, 60), [3.0, 1e20, 5.0])
    assert ax.get_yscale() == "symlog"
    assert ax.get_ylim()[1] == pytest.approx(30)
    assert ydata(ax, 0) == pytest.approx(np.linspace(3, -4, 60))
    heights = ax.transAxes.inverted().transform(ax.transData.transform([(0, 3), (0, -4)]))[:, 1]
    assert heights[0] - heights[1] > 0.15


@pytest.mark.parametrize(
    ("high", "expected"), [(60.0, ["2", "5", "10", "20", "50"]), (5e4, ["10", "100", "1000", "10000"])]
)
def test_two_and_five_are_labelled_on_short_logarithmic_axes(high: float, expected: list[str]) -> None:
    ax = Figure().subplots()
    ax.plot([1.5, high], [1, 1])
    log_scale(ax, "x")
    ax.set_xlim(1.5, high)
    rendered(ax)
    low, high = ax.get_xlim()
    ticks = [t for t in ax.get_xticklabels(which="both") if t.get_text() and low <= t.get_position()[0] <= high]
    assert sorted((t.get_text() for t in ticks), key=float) == expected


@pytest.mark.parametrize("lr", [0.01, 1.0, 3e-7])
def test_a_single_value_has_a_logarithmic_axis_around_it(lr: float) -> None:
    ax = Figure().subplots()
    ax.plot([lr], [lr], "o")
    log_scale(ax, "x", "y")
    rendered(ax)
    for low, high in (ax.get_xlim(), ax.get_ylim()):
        assert low < lr < high < 10 * lr
