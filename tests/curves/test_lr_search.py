"""Points of a sweep, lr* among them, the edge, and which lrs to try next: against closed forms and planted bowls."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_curves import EDGE, quadratic, spectrum
from tests.helpers.simulated_records import noisy_sweep, record, trial
from workbench.curves.judged import judged
from workbench.curves.lr_search import (
    around,
    climb_round,
    edge_round,
    fill_round,
    lr_best,
    raise_round,
    refine_round,
    spread,
    unstable_bracket,
)
from workbench.curves.spikes import edge_from_growth
from workbench.curves.sweep import paired_difference


def test_standard_error_of_correlated_noise_is_honest():
    """The spread over 200 simulated runs is the truth that the standard error of one run is held against."""
    means, errors = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        noise = np.convolve(rng.standard_normal(2100), np.ones(8) / 8, mode="same")[:2000]
        a, b = judged(record([trial(noise, 0.1), trial(np.zeros(2000), 0.2)], full_batch=False)).curves
        mean, se = paired_difference(a, b)
        means.append(mean)
        errors.append(se)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.2)


TOTAL = 100


class Sweep:
    """A study on one quadratic: runs the lrs it is told to, as a study would."""

    def __init__(self, rule, memory, seed, lrs):
        self.rule, self.memory, self.seed, self.trials = rule, memory, seed, []
        for lr in lrs:
            self.run(lr)

    def curve(self, lr):
        return quadratic(self.rule, lr, TOTAL, memory=self.memory, seed=self.seed)

    def table(self):
        return judged(record(self.trials, optimizer=self.rule, momentum=self.memory, total_steps=TOTAL)).sweep()

    def run(self, lr):
        self.trials.append(trial(self.curve(lr), lr))

    def until_none(self, ask):
        while lrs := ask(self.table()):
            assert len(self.trials) < 50, "the search does not end"
            self.run(lrs[0])

    def tail(self, lr):
        curve = self.curve(lr)
        return np.mean(curve[-10:]) if curve.size == TOTAL else np.inf


def tails(lrs, seed):
    """The last tenth of gradient descent in closed form: 1/2 sum lambda theta^2 (1 - lr lambda)^2k."""
    curvature, steps = spectrum(), np.arange(TOTAL - TOTAL // 10, TOTAL)
    start = curvature * np.random.default_rng(seed).standard_normal(curvature.size) ** 2
    shrunk = (1 - lrs[:, None] * curvature)[:, None] ** (2 * steps[:, None])
    return 0.5 * (shrunk @ start).mean(1)


@pytest.mark.parametrize("seed", range(4))
def test_lr_star_of_sgd_is_never_above_the_exact_one(seed):
    sweep = Sweep("sgd", 0.0, seed, [EDGE["sgd"](0.0) * 2.0**k * (0.6 + 0.1 * seed) for k in range(-5, 3)])
    sweep.until_none(lambda table: refine_round(table, lanes=1))
    best = lr_best(sweep.table())
    lrs = np.geomspace(0.5, 2.0, 1500)
    exact = lrs[np.argmin(tails(lrs, seed))]
    assert tails(np.array([exact]), seed)[0] == pytest.approx(sweep.tail(exact))
    assert exact / 1.25 <= best.lr <= exact * 1.0005
    assert sweep.tail(best.lr) <= 1.1 * sweep.tail(exact)
    assert best.low <= best.lr <= best.high
    assert not best.needs_refinement


@pytest.mark.parametrize(("rule", "memory"), [("sgd", 0.0), ("momentum", 0.9), ("nesterov", 0.9)])
@pytest.mark.parametrize("use_hint", [False, True])
def test_edge_is_bracketed_to_a_twentieth(rule, memory, use_hint):
    edge = EDGE[rule](memory)
    sweep = Sweep(rule, memory, 2, [edge * 2.0**k * 0.77 for k in range(-5, 3)])
    start = len(sweep.trials)
    hint = edge_from_growth(sweep.curve(edge * 1.54), lr=edge * 1.54, optimizer=rule, momentum=memory)
    near = around(hint, 0.05) if use_hint else ()
    sweep.until_none(lambda table: edge_round(table, lanes=1, near=near))
    bracket = unstable_bracket(sweep.table())
    assert bracket.ratio <= 1.0500001
    assert bracket.middle == pytest.approx(edge, rel=0.05)
    assert lr_best(sweep.table()).lr < bracket.middle
    assert len(sweep.trials) - start <= (2 if use_hint else 4)


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


FALLING, BLOWN = np.linspace(2, 1, 50), np.r_[2.0, 9.0, np.inf]


def edge_table(stable, unstable):
    """Full-batch runs: the first of the stable lrs is the best one, the others end a little higher."""
    trials = [trial(FALLING + 0.1 * (k > 0), lr) for k, lr in enumerate(stable)]
    return judged(record(trials + [trial(BLOWN, lr) for lr in unstable], total_steps=50)).sweep()


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


def test_where_nothing_was_learned_lower_lrs_come_first_and_then_higher_ones():
    nothing = judged(record([trial(np.full(50, 2.0), lr) for lr in (0.1, 0.2)], total_steps=50)).sweep()
    assert nothing.best is None
    rates = {"lowest": 0.001, "highest": 10.0, "lanes": 1, "blind_lanes": 2}
    assert climb_round(nothing, **rates) == pytest.approx((0.1 / 4, 0.1 / 16))
    assert climb_round(nothing, **rates | {"lowest": 0.05}) == pytest.approx((0.8, 3.2))
    assert climb_round(nothing, **rates | {"lowest": 0.05, "highest": 0.5}) == ()
    assert raise_round(nothing, highest=10.0) == ()
    assert fill_round(nothing, base=0.1) == ()


@pytest.mark.parametrize(("levels", "asked"), [
    ({0.01: 0.9, 0.04: 0.45, 0.16: 0.9}, (0.02, 0.08)), ({0.01: 0.453, 0.04: 0.45, 0.16: 0.9}, (0.08,)),
    ({0.02: 0.9, 0.04: 0.45, 0.16: 0.9}, (0.08,)), ({0.02: 0.9, 0.04: 0.45, 0.08: 0.9}, ()),
    ({0.001: 0.9, 0.04: 0.45, 0.08: 0.9}, (0.02,)),
])  # fmt: skip
def test_gaps_beside_the_best_are_filled_where_they_are_wide_and_the_bowl_is_not_flat(levels, asked):
    assert fill_round(judged(noisy_sweep(levels)).sweep(), base=0.01) == pytest.approx(asked)


@pytest.mark.parametrize(("rule", "memory"), [("sgd", 0.0), ("momentum", 0.5), ("momentum", 0.9), ("nesterov", 0.9), ("adam", 0.9)])  # fmt: skip
@pytest.mark.parametrize("frac", [1.05, 1.3, 3.0])
def test_edge_of_a_quadratic_from_one_unstable_run(rule, memory, frac):
    edge = EDGE[rule](memory)
    loss = quadratic(rule, frac * edge, 300, memory=memory)
    found = edge_from_growth(loss, lr=frac * edge, optimizer=rule, momentum=memory, beta1=memory)
    assert found == pytest.approx(edge, rel=0.01)
