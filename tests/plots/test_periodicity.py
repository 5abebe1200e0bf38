"""What `plot_periodicity` draws: the planted period above the line, a clean run below it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench as wb
from tests.diagnostics.test_periodicity import EPOCH, bump, decay, noise, record
from tests.helpers.records import empty
from workbench.errors import UsageError
from workbench.plots.style import why_not_measured
from workbench.topics.periodicity.figures import plot_periodicity


def drawn(made: Any, **options: Any) -> Axes:
    ax = plot_periodicity(made, wb.diagnose_periodicity(made), ax=Figure().subplots(), **options)
    ax.get_figure(root=True).savefig(io.BytesIO())
    return ax


def named(ax: Axes, start: str) -> Any:
    return next(line for line in ax.lines if str(line.get_label()).startswith(start))


def test_a_planted_period_crosses_the_line_at_the_epoch() -> None:
    ax = drawn(record(decay() + bump() + noise()))
    curve, bound = named(ax, "validation/loss"), named(ax, "above it").get_ydata()[0]
    assert f"every {EPOCH} steps" in curve.get_label()
    periods, chances = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
    assert chances.min() < bound
    assert any(abs(k * periods[chances.argmin()] / EPOCH - 1) < 0.05 for k in (1, 2, 3))
    assert named(ax, "an epoch").get_xdata()[0] == EPOCH
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "unlikely is up"


def test_a_clean_run_stays_below() -> None:
    ax = drawn(record())
    bound = named(ax, "above it").get_ydata()[0]
    assert min(np.min(line.get_ydata()) for line in ax.lines if "/loss" in str(line.get_label())) > bound


def test_the_curve_with_its_period_marked() -> None:
    sick = drawn(record(decay() + bump() + noise()), view="curve")
    assert "repeats" in sick.get_title(loc="left")
    marks = [line.get_xdata()[0] for line in sick.lines[1:]]
    assert np.diff(marks) == pytest.approx(np.full(len(marks) - 1, EPOCH), rel=0.02)
    clean = drawn(record(), view="curve")
    assert "does not repeat" in clean.get_title(loc="left")
    assert any("no period found" in str(line.get_label()) for line in clean.lines)


@pytest.mark.parametrize("view", ["spectrum", "curve"])
def test_nothing_to_show(view: Any) -> None:
    assert why_not_measured(drawn(empty(), view=view))
    assert why_not_measured(drawn(record(np.full(600, np.nan), np.full(600, np.nan)), view=view))


def test_an_unknown_view() -> None:
    with pytest.raises(UsageError, match="view='wave' is not known"):
        plot_periodicity(record(), view="wave")  # type: ignore[arg-type]
