"""Fitting a validation set by choosing on it: simulated example by example, against closed forms (P3.5)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workbench.errors import ConfigError
from workbench.topics.evaluation.sample_size import (
    climbing_gap,
    selection_gap,
    selection_gaps,
    simulate_climbing,
    simulate_selection,
)


@pytest.mark.parametrize(("n", "trials", "spread"), [(100, 10, 0.0), (300, 100, 0.0), (1000, 30, 0.0), (300, 30, 0.02)])
def test_the_best_of_many_flatters_itself_by_the_closed_form(n: int, trials: int, spread: float) -> None:
    gaps = simulate_selection(n, trials, spread=spread, repeats=300, held_out=500, seed=1)
    expected = selection_gap(n, trials, sd=math.sqrt(0.05 / 2), spread=spread)
    assert gaps.mean() == pytest.approx(expected, abs=4 * gaps.std() / math.sqrt(300) + 0.05 * expected)
    assert gaps.mean() > 2 * gaps.std() / math.sqrt(300)


def test_a_single_model_does_not_flatter_itself() -> None:
    gaps = simulate_selection(100, 1, repeats=400)
    assert abs(gaps.mean()) < 4 * gaps.std() / 20
    assert selection_gap(100, 1, sd=0.2) == pytest.approx(0, abs=1e-9)


def test_the_gap_falls_with_the_root_of_the_size_and_grows_slowly_with_the_trials() -> None:
    assert selection_gap(400, 50, sd=0.2) == pytest.approx(selection_gap(100, 50, sd=0.2) / 2)
    assert selection_gap(100, 1000, sd=0.2) < 1.5 * selection_gap(100, 50, sd=0.2)
    assert selection_gap(100, 50, sd=0.2, spread=0.1) < selection_gap(100, 50, sd=0.2)


@pytest.mark.parametrize("n", [200, 1000])
def test_rounds_that_build_on_each_other_add_up(n: int) -> None:
    rounds, repeats = 60, 60
    gaps = simulate_climbing(n, rounds, repeats=repeats, held_out=500, seed=2)
    expected = climbing_gap(n, rounds)
    se = gaps.std(0) / math.sqrt(repeats)
    for k in (10, 30, 60):
        assert gaps[:, k].mean() == pytest.approx(expected[k], abs=4 * se[k] + 0.1 * expected[k])
    assert gaps[:, -1].mean() > 1.5 * selection_gap(n, rounds, sd=math.sqrt(0.05 / 2))
    assert (np.diff(expected) >= 0).all()
    assert expected.max() <= 0.1


def test_the_table_holds_simulation_and_closed_form_side_by_side() -> None:
    table = selection_gaps((40, 80), rounds=(3, 6), repeats=8)
    assert list(table.columns) == ["how", "rounds", "examples", "gap", "se", "expected"]
    assert len(table) == 8
    assert table.notna().all(axis=None)
    assert selection_gaps((40,), rounds=(3,), repeats=8, seed=1).equals(
        selection_gaps((40,), rounds=(3,), repeats=8, seed=1)
    )


def test_bad_input_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"draws=0 must be an integer of at least 1"):
        selection_gap(10, 0, sd=0.1)
    with pytest.raises(ConfigError, match=r"n=0 must be above 0"):
        selection_gap(0, 5, sd=0.1)
    with pytest.raises(ConfigError, match=r"disagreement=0.5 must be above 0 and at most 0.18"):
        simulate_selection(10, 5, accuracy=0.9, disagreement=0.5)
