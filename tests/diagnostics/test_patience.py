"""Patience replayed on curves that can be followed by hand, and held against the table of rules."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_checkpoints import evaluated, overfitted
from workbench.curves.selected_runs import read_runs
from workbench.topics.checkpoints.early_stopping import early_stopping, stop_with_patience

CURVE = [2.0, 1.5, 1.6, 1.7, 1.0, 1.1, 1.2, 1.3, 1.4, 0.5, 0.6]


def test_it_stops_after_so_many_evaluations_without_a_new_best() -> None:
    (run,) = stop_with_patience(evaluated([CURVE]), 2).runs
    assert (run.stop_step, run.kept_step, run.kept) == (300, 100, 1.5)
    assert (run.best_step, run.best) == (900, 0.5)
    assert run.saved_frac == pytest.approx(0.7)
    assert run.lost_frac == pytest.approx((1.5 - 0.5) / (2.0 - 0.5))


def test_a_falling_curve_is_never_stopped_and_loses_nothing() -> None:
    (run,) = stop_with_patience(evaluated([np.linspace(2, 1, 11)]), 1).runs
    assert (run.stop_step, run.kept_step, run.saved_frac, run.lost_frac) == (None, 1000, 0.0, 0.0)


@pytest.mark.parametrize("evaluations", [1, 3, 10])
def test_its_row_is_that_of_the_table(evaluations: int) -> None:
    made = evaluated([overfitted(seed=k, noise=0.1) for k in range(3)])
    row = stop_with_patience(made, evaluations).row
    table = early_stopping(made).set_index("rule").loc[f"patience {evaluations}"]
    assert row is not None
    assert {key: row[key] for key in ("steps_saved", "lost_frac", "worst_lost_frac", "stopped")} == {
        key: table[key] for key in ("steps_saved", "lost_frac", "worst_lost_frac", "stopped")
    }


def test_runs_that_were_read_before_give_the_same() -> None:
    made = evaluated([CURVE])
    one, other = stop_with_patience(made, 3).runs[0], stop_with_patience(made, 3, runs=read_runs(made)).runs[0]
    assert one.words == other.words


def test_larger_is_better_where_the_metric_says_so() -> None:
    made = evaluated([[-v for v in CURVE]], metric="accuracy", select="validation/accuracy", select_mode="max")
    (run,) = stop_with_patience(made, 2).runs
    assert (run.kept, run.best) == (-1.5, -0.5)
    assert run.values.tolist() == [-v for v in CURVE]


@pytest.mark.parametrize("curve", [[np.nan] * 11, [1.0]])
def test_runs_that_cannot_be_judged_are_left_out(curve: list[float]) -> None:
    found = stop_with_patience(evaluated([curve]), 2)
    assert list(found.runs) == []
    assert found.row is None


def test_a_run_that_is_stopped_before_anything_finite_keeps_nothing() -> None:
    (run,) = stop_with_patience(evaluated([[np.nan, np.nan, np.nan, np.nan, 2.0, 1.0, 0.5, 0.4]]), 2).runs
    assert run.kept_step is None
    assert "nothing finite to keep" in run.words
