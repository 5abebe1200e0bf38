"""One run under early stopping: the marks lie where they can be counted to lie."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.simulated_checkpoints import evaluated
from workbench.plots.style import why_not_measured
from workbench.topics.checkpoints.early_stopping import stop_with_patience
from workbench.topics.checkpoints.figures import plot_patience

CURVE = [2.0, 1.5, 1.6, 1.7, 1.0, 1.1, 1.2, 1.3, 1.4, 0.5, 0.6]


def blank() -> Axes:
    return Figure().subplots()


def at(ax: Axes, label: str) -> tuple[float, float]:
    (found,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return float(np.ravel(found.get_xdata())[0]), float(np.ravel(found.get_ydata())[0])


def test_the_stop_the_kept_and_the_best_are_marked() -> None:
    ax = plot_patience(stop_with_patience(evaluated([CURVE]), 2), step=400, ax=blank())
    assert at(ax, "stops at step 300")[0] == 300
    assert at(ax, "kept: 1.5") == (100, 1.5)
    assert at(ax, "best: 0.5") == (900, 0.5)
    assert at(ax, "step 400: 1")[0] == 400


def test_a_run_that_is_not_stopped_has_no_line() -> None:
    ax = plot_patience(stop_with_patience(evaluated([np.linspace(2, 1, 11)]), 3), ax=blank())
    assert not [line for line in ax.lines if "stops" in str(line.get_label())]


def test_a_trial_can_be_chosen() -> None:
    stopped = stop_with_patience(evaluated([CURVE, np.linspace(2, 1, 11)]), 2)
    assert at(plot_patience(stopped, trial=1, ax=blank()), "best")[0] == 1000


@pytest.mark.parametrize("curve", [[np.nan] * 11, [1.0]])
def test_runs_that_cannot_be_judged_say_so(curve: list[float]) -> None:
    assert why_not_measured(plot_patience(stop_with_patience(evaluated([curve]), 2), ax=blank()))
