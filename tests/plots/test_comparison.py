"""Figure 4: every arm's means, seeds and infeasible learning rates stand where the records say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.simulated_arms import LEVEL, LRS, SPREAD, arm, cured, falling, healthy, jumping, lost
from tests.helpers.simulated_records import record
from workbench.plots.style import why_not_measured
from workbench.topics.comparison.diagnose import diagnose_comparison
from workbench.topics.comparison.figures import plot_comparison


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> np.ndarray:
    """Points of the one line with this label, shape (points, 2)."""
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return np.array(line.get_data(), dtype=float).T


def end(level: float, total: int = 400) -> float:
    return float(np.mean(falling(level, total)[-total // 10 :]))


@pytest.mark.parametrize("told", [True, False])
def test_each_arm_is_drawn_at_its_means(told: bool) -> None:
    arms = (healthy(), lost(), cured())
    ax = plot_comparison(*arms, diagnose_comparison(*arms) if told else None, ax=blank())
    assert drawn(ax, "baseline") == pytest.approx(np.array([(lr, end(LEVEL[lr])) for lr in LRS[:6]]))
    assert drawn(ax, "modified, with warmup") == pytest.approx(np.array([(lr, end(LEVEL[lr], 440)) for lr in LRS[:6]]))
    assert drawn(ax, "modified")[:4] == pytest.approx(np.array([(lr, end(LEVEL[lr])) for lr in LRS[:4]]))


def test_what_is_unstable_is_hollow_and_what_diverged_is_at_the_top() -> None:
    ax = plot_comparison(healthy(), lost(), cured(), ax=blank())
    assert drawn(ax, "modified: unstable (1)") == pytest.approx(np.array([(0.16, 3.0)]))
    assert drawn(ax, "modified: a seed diverged (2)") == pytest.approx(np.array([(0.32, 0.93), (0.64, 0.93)]))
    assert drawn(ax, "baseline: a seed diverged (1)") == pytest.approx(np.array([(0.64, 0.97)]))
    (hollow,) = [line for line in ax.lines if line.get_label() == "modified: unstable (1)"]
    assert hollow.get_markerfacecolor() != hollow.get_markeredgecolor()


def test_the_bar_of_a_mean_reaches_from_the_lowest_seed_to_the_highest() -> None:
    ax = plot_comparison(healthy(), healthy(), ax=blank())
    segments = ax.containers[0].lines[2][0].get_segments()
    assert segments[0][:, 1] == pytest.approx([end(LEVEL[0.01] - SPREAD), end(LEVEL[0.01] + SPREAD)])


def test_the_lines_mark_what_was_lost_and_what_came_back() -> None:
    ax = plot_comparison(healthy(), lost(), cured(), ax=blank())
    assert set(drawn(ax, "the modification is lost from 0.16")[:, 0]) == {0.16}
    assert set(drawn(ax, "warmup over 40 steps: stable up to 0.32")[:, 0]) == {0.32}


def test_no_line_where_nothing_was_lost() -> None:
    ax = plot_comparison(healthy(), healthy(seeds=(3, 4)), ax=blank())
    assert not [line for line in ax.lines if "lost" in str(line.get_label()) or "warmup" in str(line.get_label())]


def test_lrs_that_one_arm_lacks_are_drawn_all_the_same() -> None:
    ax = plot_comparison(arm(lrs=LRS[:3]), arm({0.16: jumping}, lrs=LRS[2:5]), ax=blank())
    assert drawn(ax, "baseline")[:, 0] == pytest.approx(LRS[:3])
    assert drawn(ax, "modified")[:, 0] == pytest.approx(LRS[2:5])


def test_nothing_trained_is_not_measured() -> None:
    assert why_not_measured(plot_comparison(record([]), record([]), ax=blank()))
