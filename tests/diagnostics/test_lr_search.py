"""lr* and the edge found on quadratics, where both are known exactly."""

from __future__ import annotations

import numpy as np
import pytest

from tests.diagnostics.test_lr_points import noisy_sweep
from tests.helpers.simulated_curves import EDGE, quadratic
from tests.helpers.simulated_records import record, trial
from workbench.curves.judged import judged
from workbench.curves.lr_search import lr_best, refine_next, unstable_bracket
from workbench.curves.next_lrs import bisect_next, edge_from_growth

TOTAL = 100


class Sweep:
    """A study on one quadratic: runs the lrs it is told to, as a study would."""

    def __init__(self, rule, memory, seed):
        self.rule, self.memory, self.seed, self.trials = rule, memory, seed, []

    def curve(self, lr):
        return quadratic(self.rule, lr, TOTAL, memory=self.memory, seed=self.seed)

    def table(self):
        return judged(record(self.trials, optimizer=self.rule, momentum=self.memory, total_steps=TOTAL)).sweep()

    def run(self, lr):
        self.trials.append(trial(self.curve(lr), lr))

    def until_none(self, ask, limit=40):
        for _ in range(limit):
            lr = ask(self.table())
            if lr is None:
                return
            self.run(lr)
        raise AssertionError("the search does not end")

    def tail(self, lr):
        curve = self.curve(lr)
        return np.mean(curve[-10:]) if curve.size == TOTAL else np.inf


def searched(rule, memory, seed):
    sweep = Sweep(rule, memory, seed)
    for k in range(-5, 3):
        sweep.run(EDGE[rule](memory) * 2.0**k * (0.6 + 0.1 * seed))
    sweep.until_none(refine_next)
    return sweep


@pytest.mark.parametrize("seed", range(4))
def test_lr_star_of_sgd_is_never_above_the_exact_one(seed):
    sweep = searched("sgd", 0.0, seed)
    best = lr_best(sweep.table())
    lrs = np.geomspace(0.5, 2.0, 1500)
    exact = lrs[np.argmin([sweep.tail(lr) for lr in lrs])]
    assert exact / 1.25 <= best.lr <= exact * 1.0005
    assert sweep.tail(best.lr) <= 1.1 * sweep.tail(exact)
    assert best.low <= best.lr <= best.high
    assert not best.needs_refinement


@pytest.mark.parametrize(("rule", "memory"), [("momentum", 0.5), ("nesterov", 0.9)])
def test_loss_at_lr_star_is_within_a_tenth_of_the_best(rule, memory):
    sweep = searched(rule, memory, 1)
    lrs = EDGE[rule](memory) * np.geomspace(0.02, 1.0, 1000)
    assert sweep.tail(lr_best(sweep.table()).lr) <= 1.1 * min(sweep.tail(lr) for lr in lrs)


@pytest.mark.parametrize(("rule", "memory"), [("sgd", 0.0), ("momentum", 0.9), ("nesterov", 0.9)])
@pytest.mark.parametrize("use_hint", [False, True])
def test_edge_is_bracketed_to_a_twentieth(rule, memory, use_hint):
    sweep, edge = Sweep(rule, memory, 2), EDGE[rule](memory)
    for k in range(-5, 3):
        sweep.run(edge * 2.0**k * 0.77)
    start = len(sweep.trials)
    hint = edge_from_growth(sweep.curve(edge * 1.54), lr=edge * 1.54, optimizer=rule, momentum=memory)
    sweep.until_none(lambda table: bisect_next(table, hint=hint if use_hint else None))
    bracket = unstable_bracket(sweep.table())
    assert bracket.ratio <= 1.0500001
    assert bracket.middle == pytest.approx(edge, rel=0.05)
    assert lr_best(sweep.table()).lr < bracket.middle
    assert len(sweep.trials) - start <= (2 if use_hint else 4)


def test_a_coarse_grid_is_said_to_be_coarse():
    sweep = Sweep("sgd", 0.0, 0)
    for lr in (0.25, 0.5, 1.0, 2.0, 4.0):
        sweep.run(lr)
    assert lr_best(sweep.table()).needs_refinement


@pytest.mark.parametrize("levels", [
    {0.01: 0.9, 0.02: 0.5, 0.04: 0.45, 0.08: 0.5, 0.16: 0.9},
    {0.01: 0.9, 0.02: 0.4505, 0.04: 0.45, 0.08: 0.4501, 0.16: 0.9},
])  # fmt: skip
def test_noisy_lr_star_is_the_middle_of_the_ties_and_its_interval_holds_them(levels):
    table = judged(noisy_sweep(levels)).sweep()
    best = lr_best(table)
    flat = levels[0.02] < 0.46
    assert best.lr == 0.04
    assert best.measured_lr in ((0.02, 0.04, 0.08) if flat else (0.04,))
    assert lr_best(table, own=0.02).lr == (0.02 if flat else 0.04), "the person's own, where it is one of them"
    assert lr_best(table, own=0.01).lr == 0.04
    assert best.tied == ((0.02, 0.04, 0.08) if flat else (0.04,))
    assert best.low == pytest.approx(best.tied[0] / np.sqrt(2))
    assert best.high == pytest.approx(best.tied[-1] * np.sqrt(2))


def test_the_interval_ends_where_an_lr_is_not_as_good():
    best = lr_best(
        judged(noisy_sweep({0.01: 0.9, 0.02: 0.4501, 0.04: 0.45, 0.08: 0.6, 0.16: 0.4502, 0.32: 0.9})).sweep()
    )
    assert best.tied == (0.02, 0.04, 0.16)
    assert (best.low, best.lr, best.high) == (pytest.approx(0.02 / np.sqrt(2)), 0.04, pytest.approx(0.04 * np.sqrt(2)))


def blown_up(*, level):
    """A loss that is 0 at most steps and huge in between, as of a net that gets one example wrong; a spike every 20 steps."""
    at = np.arange(400)
    return np.where(at < 40, 2.3, level * (1 + at / 400) * (at % 20 == 0))


def test_the_error_of_a_run_that_blew_up_makes_no_tie_and_lr_star_keeps_away_from_the_edge():
    flat = noisy_sweep({0.05: 0.4502, 0.1: 0.4501, 0.2: 0.45}, seeds=1)
    trials = [
        trial(g["loss"], lr, columns={"loss_se": g["loss_se"]})
        for lr, (_, g) in zip((0.05, 0.1, 0.2), flat.steps.groupby("trial"), strict=True)
    ]
    trials += [trial(blown_up(level=1e6), lr, columns={"loss_se": np.full(400, 3e4)}) for lr in (0.22, 0.3)]
    table = judged(record(trials, total_steps=400, full_batch=False)).sweep()
    last = table.points[-1]
    assert last.above_best <= 2 * last.above_best_se, "within its own noise, for this test to mean anything"
    assert [p.unstable for p in table.points] == [False] * 3 + [True] * 2, "an end above the start is no training"
    best = lr_best(table)
    assert best.tied == (0.05, 0.1, 0.2)
    assert best.lr * 1.5 <= unstable_bracket(table).middle
    assert best.high <= 0.2


def run(lr, level, *, wild=0.0, blown=False):
    """400 minibatch steps from 2.3 to a level; the noise of the batches is that of any other lr but for `wild`."""
    own = np.random.default_rng(int(1e4 * lr)).standard_normal(400)
    loss = level + (2.3 - level) * np.exp(-np.arange(400) / 20) + 0.03 * np.random.default_rng(0).standard_normal(400)
    loss[200:] += np.linspace(2, 60, 200) if blown else wild * own[200:]
    return trial(loss + 0.003 * own, lr, columns={"loss_se": np.full(400, 0.03 + wild)})


@pytest.mark.parametrize("beyond", [0.302, 0.297])
@pytest.mark.parametrize("own", [None, 0.25])
def test_a_run_that_trains_well_beyond_the_edge_is_no_tie(beyond, own):
    """0.25 is as good as the best, or the best itself, and 0.2278 is unstable: luck."""
    levels = {0.0125: 1.2, 0.025: 0.6, 0.05: 0.3, 0.1: 0.3, 0.2181: 0.3, 0.25: beyond}
    trials = [run(lr, level) for lr, level in levels.items()] + [run(lr, 0.3, blown=True) for lr in (0.2278, 0.5)]
    table = judged(record(trials, total_steps=400, full_batch=False, facts={"chance_loss": 2.3})).sweep()
    assert [p.lr for p in table.points if p.unstable] == [0.2278, 0.5]
    assert (table.points[table.best].lr == 0.25) is (beyond < 0.3)
    bracket, best = unstable_bracket(table), lr_best(table, own=own)
    assert (bracket.lower, bracket.upper, bracket.stable_above) == (0.2181, 0.2278, (0.25,))
    assert best.tied == (0.05, 0.1, 0.2181)
    assert best.low < best.lr <= best.high == 0.2181
    assert best.measured_lr < 0.2278


def test_a_large_error_that_blew_nothing_up_makes_no_tie_either():
    """A stable run whose difference to the best is within its own error, as that is larger than anything learned."""
    trials = [run(0.05, 0.6), run(0.1, 0.3), run(0.2, 0.5, wild=1.0)]
    table = judged(record(trials, total_steps=400, full_batch=False, facts={"chance_loss": 2.3})).sweep()
    last = table.points[-1]
    assert not last.unstable
    assert last.above_best <= 2 * last.above_best_se, "within its own noise, for this test to mean anything"
    assert lr_best(table).tied == (0.1,)


def bowl(ratio, *, rise, memory=0.0):
    """Full-batch runs at three lrs, `ratio` apart, whose end losses rise by `rise` on both sides of the middle."""
    steps = np.arange(TOTAL)
    levels = {1 / ratio: 1 + rise, 1.0: 1.0, ratio: 1 + rise}
    trials = [trial(level + 9 * np.exp(-steps / 4), lr) for lr, level in levels.items()]
    rule = "momentum" if memory else "sgd"
    return judged(record(trials, total_steps=TOTAL, optimizer=rule, momentum=memory, peak_lr=1.0)).sweep()


@pytest.mark.parametrize(("ratio", "dense"), [(1.11, True), (1.13, False), (1.3, False)])
def test_a_grid_is_dense_when_two_steps_of_it_make_a_quarter(ratio, dense):
    """Neighbours up to 1.118 apart bracket lr* to a factor of 1.25: only then is the search over."""
    assert (ratio**2 <= 1.25) is dense
    table = bowl(ratio, rise=0.01)  # 1 %: no lr between can be better by 4 %
    following = refine_next(table)
    assert (following is None) is dense
    assert dense or following in (pytest.approx(np.sqrt(ratio)), pytest.approx(1 / np.sqrt(ratio)))
    assert lr_best(table).needs_refinement is not dense


@pytest.mark.parametrize(("ratio", "lr"), [(1.11, 1 / 1.11), (1.13, 1.0), (1.3, 1.0)])
def test_the_lower_neighbour_is_reported_where_the_grid_is_dense(ratio, lr):
    """With one minimum the lower of two neighbours cannot lie above it; it is worth its loss only if it is near."""
    assert lr_best(bowl(ratio, rise=0.2)).lr == pytest.approx(lr)
    assert lr_best(bowl(ratio, rise=0.2, memory=0.9)).lr == 1.0, "with memory there may be several minima"


def test_noisy_refinement_closes_in_on_clearly_worse_neighbours_only():
    assert refine_next(judged(noisy_sweep({0.01: 0.9, 0.04: 0.45, 0.16: 0.9})).sweep()) in (
        pytest.approx(0.02), pytest.approx(0.08))  # fmt: skip
    assert refine_next(judged(noisy_sweep({0.01: 0.45, 0.04: 0.45, 0.16: 0.4501})).sweep()) is None
    assert refine_next(judged(noisy_sweep({0.034: 0.9, 0.04: 0.45, 0.047: 0.9})).sweep()) is None


def test_borders_are_named_and_not_refined():
    low = judged(noisy_sweep({0.01: 0.4, 0.02: 0.6, 0.04: 0.9})).sweep()
    assert lr_best(low).border == "low"
    assert refine_next(low) is None
    assert lr_best(judged(noisy_sweep({0.01: 0.9, 0.02: 0.6, 0.04: 0.4})).sweep()).border == "high"


def test_outcomes_that_are_not_monotone_are_listed():
    falling, blown = np.linspace(2, 1, 50), np.r_[2.0, 9.0, np.inf]
    trials = [trial(falling - 0.5 * (lr == 0.2), lr) for lr in (0.1, 0.2, 0.3, 0.5)]
    trials += [trial(blown, 0.4), trial(blown, 0.6)]
    bracket = unstable_bracket(judged(record(trials, total_steps=50)).sweep())
    assert (bracket.lower, bracket.upper, bracket.stable_above) == (0.3, 0.4, (0.5,))


def test_nothing_unstable_nothing_bracketed():
    table = judged(noisy_sweep({0.01: 0.9, 0.02: 0.5})).sweep()
    assert unstable_bracket(table) is None
    assert bisect_next(table) is None
    empty = judged(record([])).sweep()
    assert lr_best(empty) is None
    assert refine_next(empty) is None
    assert unstable_bracket(empty) is None
