"""Rounds of learning rates: what each one asks for, and that few of them find the edge."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.diagnostics.test_lr_points import noisy_sweep
from tests.diagnostics.test_lr_search import Sweep
from tests.helpers.simulated_curves import EDGE
from tests.helpers.simulated_records import record, trial
from workbench.curves.judged import judged
from workbench.curves.lr_search import refine_round, unstable_bracket
from workbench.curves.next_lrs import (
    around,
    climb_round,
    edge_round,
    fill_round,
    on_lattice,
    raise_round,
    spread,
)

FALLING, BLOWN = np.linspace(2, 1, 50), np.r_[2.0, 9.0, np.inf]


def edge_table(stable, unstable):
    """Full-batch runs: the first of the stable lrs is the best one, the others end a little higher."""
    trials = [trial(FALLING + 0.1 * (k > 0), lr) for k, lr in enumerate(stable)]
    return judged(record(trials + [trial(BLOWN, lr) for lr in unstable], total_steps=50)).sweep()


def rounds_to_close(low, high, *, tolerance, lanes, edge):
    """Play the search on a threshold that is known: (rounds, lrs) it takes."""
    rounds = count = 0
    while asked := spread(low, high, tolerance=tolerance, lanes=lanes):
        assert len(asked) <= lanes
        assert list(asked) == sorted(asked)
        assert low < asked[0]
        assert asked[-1] < high
        low = max([low, *(lr for lr in asked if lr < edge)])
        high = min([high, *(lr for lr in asked if lr >= edge)])
        rounds, count = rounds + 1, count + len(asked)
    assert high / low <= (1 + tolerance) * (1 + 1e-6)
    assert low < edge <= high
    return rounds, count


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("ratio", [1.06, 1.5, 2.0, 4.0, 1000.0])
@pytest.mark.parametrize("place", [0.01, 0.37, 0.99])
def test_a_gap_closes_in_the_fewest_rounds(lanes, ratio, place):
    gaps = math.ceil(math.log(ratio) / math.log(1.05))
    rounds, count = rounds_to_close(1.0, ratio, tolerance=0.05, lanes=lanes, edge=ratio**place)
    assert rounds <= math.ceil(math.log(gaps) / math.log(lanes + 1) - 1e-9)
    assert count <= rounds * lanes


def test_one_lane_is_bisection_and_more_lanes_are_not_filled_for_nothing():
    assert spread(1.0, 4.0, tolerance=0.05, lanes=1) == pytest.approx((2.0,))
    assert len(spread(1.0, 2.0, tolerance=0.05, lanes=4)) == 3, "15 gaps: two rounds of 3 do what two rounds of 4 do"
    assert len(spread(1.0, 2.0, tolerance=0.05, lanes=32)) == 14
    assert spread(1.0, 1.05, tolerance=0.05, lanes=4) == ()


@pytest.mark.parametrize(("rule", "memory"), [("sgd", 0.0), ("momentum", 0.9), ("nesterov", 0.9)])
@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_the_edge_of_a_quadratic_is_bracketed_in_few_rounds(rule, memory, lanes):
    sweep, edge = Sweep(rule, memory, 2), EDGE[rule](memory)
    for k in range(-5, 3):
        sweep.run(edge * 2.0**k * 0.77)
    for _ in range({2: 3, 4: 2, 8: 2}[lanes]):
        for lr in edge_round(sweep.table(), lanes=lanes):
            sweep.run(lr)
    bracket = unstable_bracket(sweep.table())
    assert bracket.ratio <= 1.0500001
    assert bracket.middle == pytest.approx(edge, rel=0.05)
    assert edge_round(sweep.table(), lanes=lanes) == ()


def test_what_short_runs_found_is_tried_first_and_as_it_is():
    table = edge_table([0.1, 0.2], [0.4])
    assert edge_round(table, lanes=4, near=(0.28, 0.29)) == (0.28, 0.29)
    assert edge_round(table, lanes=4, near=(0.2, 0.21)) == (0.21,), "the one that was run already is not asked for"
    assert edge_round(edge_table([0.1, 0.28], [0.29]), lanes=4, near=(0.28, 0.29)) == ()


def test_beside_a_hint_that_was_wrong_the_search_goes_on_by_factors_of_2():
    below = edge_round(edge_table([0.001], [0.28, 0.29]), lanes=2, near=(0.28, 0.29))
    assert below == pytest.approx((0.28 / 2**0.5, 0.14))
    above = edge_round(edge_table([0.001, 0.28, 0.29], [100.0]), lanes=2, near=(0.28, 0.29))
    assert above == pytest.approx((0.29 * 2**0.5, 0.58))
    close = edge_round(edge_table([0.2], [0.28, 0.29]), lanes=2, near=(0.28, 0.29))
    assert close == spread(0.2, 0.28, tolerance=0.05, lanes=2), "a narrow bracket is cut evenly"


def test_without_an_unstable_lr_the_sweep_goes_up_to_its_limit():
    table = edge_table([0.1, 0.2], [])
    assert edge_round(table, lanes=4) == ()
    assert raise_round(table, highest=10.0) == pytest.approx((0.4, 1.6))
    assert raise_round(table, highest=1.0) == pytest.approx((0.4,))
    assert raise_round(table, highest=0.3) == ()
    assert raise_round(table, highest=10.0, near=(0.15, 0.3)) == (0.3,), "what short runs found comes first"
    beyond = raise_round(table, highest=10.0, near=(0.15, 0.16))
    assert beyond == pytest.approx((0.2 * 2**0.5, 0.2 * 8**0.5)), "and was not far off"
    assert raise_round(edge_table([0.1], [0.2]), highest=10.0) == ()


def test_below_the_grid_it_goes_only_where_the_best_is_at_that_border():
    low = judged(noisy_sweep({0.01: 0.4, 0.02: 0.6, 0.04: 0.9})).sweep()
    assert climb_round(low, lowest=1e-9, highest=1.0, lanes=2) == pytest.approx((0.01 / 4, 0.01 / 16))
    assert climb_round(low, lowest=1e-3, highest=1.0, lanes=2) == pytest.approx((0.01 / 4,))
    inside = judged(noisy_sweep({0.01: 0.6, 0.02: 0.4, 0.04: 0.9})).sweep()
    assert climb_round(inside, lowest=1e-9, highest=1.0, lanes=2) == ()


def test_where_nothing_was_learned_lower_lrs_come_first_and_then_higher_ones():
    nothing = judged(record([trial(np.full(50, 2.0), lr) for lr in (0.1, 0.2)], total_steps=50)).sweep()
    assert nothing.best is None
    rates = {"lowest": 0.001, "highest": 10.0, "lanes": 1, "blind_lanes": 2}
    assert climb_round(nothing, **rates) == pytest.approx((0.1 / 4, 0.1 / 16))
    assert climb_round(nothing, **rates | {"lowest": 0.05}) == pytest.approx((0.8, 3.2))
    assert climb_round(nothing, **rates | {"lowest": 0.05, "highest": 0.5}) == ()
    assert raise_round(nothing, highest=10.0) == ()
    assert fill_round(nothing, base=0.1) == ()


@pytest.mark.parametrize("base", [1e-6, 1.6e-5, 0.3, 1e6])
@pytest.mark.parametrize("window", [3e-6, 1e-3, 0.1, 30.0, 2e4])
def test_a_window_where_it_learns_is_found_wherever_the_baseline_lies(base, window):
    """The first grid lies from 1 to 64; a baseline far from it leaves a gap, and the answer may lie in there."""
    tried = {base, 1.0, 4.0, 16.0, 64.0}
    while not any(window <= lr <= 5 * window for lr in tried):
        table = judged(record([trial(np.full(50, 2.0), lr) for lr in sorted(tried)], total_steps=50)).sweep()
        asked = climb_round(table, lowest=1e-6, highest=1e6, lanes=1, blind_lanes=4)
        assert 0 < len(asked) <= 4
        assert not set(asked) & tried
        tried |= set(asked)
    assert len(tried) < 30


@pytest.mark.parametrize(("levels", "asked"), [
    ({0.01: 0.9, 0.04: 0.45, 0.16: 0.9}, (0.02, 0.08)),
    ({0.01: 0.453, 0.04: 0.45, 0.16: 0.9}, (0.08,)),
    ({0.02: 0.9, 0.04: 0.45, 0.16: 0.9}, (0.08,)),
    ({0.02: 0.9, 0.04: 0.45, 0.08: 0.9}, ()),
    ({0.001: 0.9, 0.04: 0.45, 0.08: 0.9}, (0.02,)),
])  # fmt: skip
def test_gaps_beside_the_best_are_filled_where_they_are_wide_and_the_bowl_is_not_flat(levels, asked):
    assert fill_round(judged(noisy_sweep(levels)).sweep(), base=0.01) == pytest.approx(asked)


def test_what_is_filled_lies_between_its_neighbours_whatever_the_lattice():
    for gap, shift in itertools.product(np.geomspace(2.83, 300, 6), np.geomspace(0.5, 2, 8)):
        best = 0.04 * shift
        (lr,) = fill_round(judged(noisy_sweep({best / gap: 0.9, best: 0.45, best * 1.5: 0.9})).sweep(), base=0.01)
        assert best / gap < lr / 1.01
        assert lr < best / 1.4
        assert math.log2(lr / 0.01) == pytest.approx(round(math.log2(lr / 0.01)))


def test_an_unstable_neighbour_is_left_to_the_search_for_the_edge():
    assert fill_round(edge_table([0.1], [0.4]), base=0.1) == ()


def test_a_hint_becomes_two_lrs_and_the_lattice_holds_the_baseline():
    low, high = around(2.0, 0.05)
    assert high / low == pytest.approx(1.05)
    assert low * high == pytest.approx(4.0)
    assert around(None, 0.05) == ()
    assert on_lattice(0.27, 0.05, 2.0) == pytest.approx(0.2)
    assert on_lattice(0.05, 0.05, 4.0) == 0.05


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7])
def test_a_round_of_refinement_cuts_both_gaps(lanes):
    asked = refine_round(edge_bowl(), lanes=lanes)
    assert len(asked) == lanes
    assert len(set(asked)) == lanes
    points = sorted([0.5, 1.0, 2.5, *asked])
    assert (points[0], points[-1]) == (0.5, 2.5)
    assert sum(lr > 1.0 for lr in asked) == (lanes + 1) // 2, "the wider gap gets what is left over"
    for low, high in ((0.5, 1.0), (1.0, 2.5)):
        inside = [lr for lr in points if low <= lr <= high]
        steps = np.diff(np.log(inside))
        assert steps == pytest.approx(steps[0]), "in equal factors"


def edge_bowl():
    steps = np.arange(100)
    trials = [trial(level + 9 * np.exp(-steps / 4), lr) for lr, level in {0.5: 1.5, 1.0: 1.0, 2.5: 1.5}.items()]
    return judged(record(trials, total_steps=100, optimizer="sgd", peak_lr=1.0)).sweep()


def test_on_minibatches_both_sides_that_are_worse_are_refined_at_once():
    table = judged(noisy_sweep({0.01: 0.9, 0.04: 0.45, 0.16: 0.9})).sweep()
    assert sorted(refine_round(table, lanes=2)) == pytest.approx([0.02, 0.08])
    assert len(refine_round(table, lanes=1)) == 1
