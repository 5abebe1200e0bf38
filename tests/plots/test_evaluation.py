"""The figures of evaluation: what they mark is what the numbers say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.evaluations import evaluated, paused
from workbench.findings.timed import timed_steps, trial_seconds
from workbench.plots.style import why_not_measured
from workbench.topics.evaluation.figures import plot_evaluation, plot_timed_evaluations


def blank() -> Axes:
    return Figure().subplots()


def xs(ax: Axes, label: str) -> list[list[float]]:
    return [list(line.get_xdata()) for line in ax.lines if str(line.get_label()).startswith(label)]


def test_best_and_picked_checkpoints_are_marked() -> None:
    periodic, offline = np.linspace(1, 0.1, 12), np.linspace(1, 0.1, 12)
    offline[6], periodic[9] = 0.05, 0.01
    ax = plot_evaluation(evaluated(periodic, offline), ax=blank())
    (picked,), (best,) = xs(ax, "picked by the proxy: step 90"), xs(ax, "best offline: step 60")
    assert picked == [0.01]
    assert best == [periodic[6]]
    assert "Rank correlation 0." in ax.get_title(loc="left")


def test_a_metric_to_be_maximised_is_picked_at_its_largest() -> None:
    values = np.array([0.1, 0.5, 0.9, 0.7] * 3)
    ax = plot_evaluation(evaluated(values, values, select_mode="max"), ax=blank())
    assert xs(ax, "picked by the proxy: step 20") == [[0.9]]


def test_without_offline_rows_there_is_nothing_to_draw() -> None:
    assert "both periodically and offline" in str(why_not_measured(plot_evaluation(evaluated([1.0] * 9), ax=blank())))


def test_by_steps_nothing_moves_and_by_seconds_the_rest_does() -> None:
    """100 steps of 10 ms; at 0.1 s intervals the marks are steps 9, 19, ..., until a pause of 0.25 s at step 31."""
    made = paused()
    ax = plot_timed_evaluations(made, ax=blank())
    rows = {line.get_ydata()[0]: [int(x) for x in line.get_xdata()] for line in ax.lines}
    assert rows[3.0] == rows[2.0] == list(range(10, 101, 10))
    assert rows[1.0][:3] == rows[0.0][:3]
    assert set(rows[0.0][3:]).isdisjoint(rows[1.0][3:])


def test_timed_steps_are_the_first_after_each_interval() -> None:
    frame = paused(step_s=0.125, pause_s=1.0, at=20).steps
    calm, held_up = (frame[frame["trial"] == n] for n in (0, 1))
    assert trial_seconds(calm) == pytest.approx(12.5)
    assert timed_steps(calm, 1.0)[:3] == [7, 15, 23]
    assert timed_steps(held_up, 1.0)[:4] == [7, 15, 20, 23]
    assert timed_steps(held_up, 0.0) == []
    assert timed_steps(calm.drop(columns="step_time_s"), 1.0) == []


def test_a_record_without_a_pause_says_so() -> None:
    assert "pause" in str(why_not_measured(plot_timed_evaluations(evaluated([1.0, 2.0]), ax=blank())))
