"""What is drawn is what the diagnosis counted."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.simulated_checkpoints import evaluated, overfitted
from workbench.plots.style import why_not_measured
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints
from workbench.topics.checkpoints.figures import plot_checkpoints, plot_early_stopping

CURVES = [overfitted(seed=k) for k in range(4)]
TEST = [overfitted(seed=10 + k, rise=0.3) for k in range(4)]


def blank() -> Axes:
    return Figure().subplots()


def drawn(ax: Axes, label: str) -> list[tuple[float, float]]:
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


@pytest.mark.parametrize("told", [True, False])
def test_one_circle_and_one_triangle_a_run(told: bool) -> None:
    r = evaluated(CURVES, TEST)
    said = diagnose_checkpoints(r)
    runs = said["checkpoints.best_not_last"].evidence["runs"]
    ax = plot_checkpoints(r, said if told else None, ax=blank())
    assert drawn(ax, "where it was chosen") == [(row["best_frac"], row["gain"]) for row in runs]
    assert drawn(ax, "on the test split") == [(row["best_frac"], row["test_gain"]) for row in runs]


def test_without_a_test_split_there_are_no_triangles() -> None:
    ax = plot_checkpoints(evaluated(CURVES), ax=blank())
    assert not [line for line in ax.lines if "test" in str(line.get_label())]
    assert len(drawn(ax, "where it was chosen")) == 4


def test_one_bar_a_rule_with_what_it_saves() -> None:
    r = evaluated(CURVES)
    rules = diagnose_checkpoints(r)["checkpoints.best_not_last"].evidence["early_stopping"]
    ax = plot_early_stopping(r, ax=blank())
    assert [bar.get_width() for bar in ax.patches] == [row["lost_frac"] for row in rules]
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == [f"{row['rule']}\nsaves {row['steps_saved']:.0%} of the steps" for row in rules]


def test_runs_that_are_too_short_are_not_measured() -> None:
    r = evaluated([[1.0, 0.5]])
    assert why_not_measured(plot_checkpoints(r, ax=blank()))
    assert why_not_measured(plot_early_stopping(r, ax=blank()))


def test_where_no_rule_loses_anything_the_axis_is_not_made_of_roundings() -> None:
    ax = plot_early_stopping(evaluated([[2.0, 1.8, 1.6, 1.4, 1.2, 1.0]]), ax=blank())
    assert all(bar.get_width() == 0 for bar in ax.patches)
    assert ax.get_xlim()[1] >= 0.01
