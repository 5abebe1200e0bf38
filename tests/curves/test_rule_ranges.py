"""Ranges of learning rates, from curves whose ends are set by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.topics.optimizers.rule_ranges import ends_next, read_ranges, rules_in

TOTAL = 200
BLOWN = np.r_[2.0, 9.0, np.inf]


def falling(level):
    """From 2 to `level`; what the best rule learns is 2."""
    return level + (2.0 - level) * np.exp(-np.arange(TOTAL) / 5)


def adam(loss, lr, **more):
    return trial(loss, lr, **({"stage": "optimizers", "optimizer": "adam"} | more))


OWN = [
    trial(falling(1.0), 0.01),
    trial(falling(0.1), 0.1, stage="baseline"),
    trial(falling(0.0), 1.0),
    trial(BLOWN, 2.0),
]
ADAM = [
    adam(falling(0.5), 0.001),
    adam(falling(0.15), 0.004),
    adam(falling(0.0), 0.01),
    adam(falling(0.19), 0.1),
    adam(falling(0.9), 1.0),
    adam(BLOWN, 10.0),
]


def study(*trials, **more):
    return record([*trials], total_steps=TOTAL, peak_lr=0.1, optimizer="sgd", **more)


def test_each_rule_has_its_own_range():
    sgd, other = read_ranges(study(*OWN, *ADAM)).values()
    assert (sgd.optimizer, other.optimizer) == ("sgd", "adam")
    assert (sgd.best_lr, sgd.fails_below, sgd.trains_from, sgd.trains_to, sgd.fails_above) == (1.0, 0.01, 0.1, 1.0, 2.0)
    assert (sgd.stable, sgd.unstable, sgd.top) == (1.0, 2.0, 2.0)
    assert (sgd.decades, sgd.most_decades) == pytest.approx((1.0, math.log10(200)))
    assert (other.fails_below, other.trains_from, other.trains_to, other.fails_above) == (0.001, 0.004, 0.1, 1.0)
    assert (other.best_lr, other.stable, other.unstable) == (0.01, 1.0, 10.0)
    assert (sgd.trial, other.trial) == (2, 6)


def test_the_baselines_rule_comes_first_and_twins_and_short_runs_do_not_count():
    short = adam(falling(0.0)[:20], 5.0, stage="optimizers_range", total_steps=20)
    twin = adam(falling(0.0), 1.0, stage="optimizers_twin", rules="playbook")
    r = study(*ADAM, *OWN, short, twin)
    assert rules_in(r) == ["sgd", "adam"]
    assert [p.lr for p in read_ranges(r)["adam"].points] == [0.001, 0.004, 0.01, 0.1, 1.0, 10.0]
    assert rules_in(study(*OWN, adam(falling(0.0), 1.0, stage="optimizers_twin"))) == ["sgd"]
    assert rules_in(study()) == []


def test_the_best_checkpoint_is_looked_for_where_the_rule_trains_under_the_first_seed():
    numbers = {lr: 4 + k for k, lr in enumerate((0.001, 0.004, 0.01, 0.1, 1.0, 10.0))}
    rows = evaluations(numbers[1.0], [0, 100], [2.0, 0.01], split="validation")  # does not train
    rows += evaluations(numbers[0.01], [0, 100], [2.0, 0.3], split="validation")
    rows += evaluations(numbers[0.1], [0, 100, 200], [2.5, 0.2, 0.4], split="validation")
    rows += evaluations(10, [0, 100], [2.0, 0.1], split="validation")  # another seed
    r = study(*OWN, *ADAM, adam(falling(0.0), 0.01, seed=1), evals=rows)
    found = read_ranges(r)["adam"]
    assert (found.selected_lr, found.selected) == (0.1, 0.2)
    accuracy = read_ranges(study(*OWN, *ADAM, evals=rows, select_mode="max"))["adam"]
    assert (accuracy.selected_lr, accuracy.selected) == (0.1, 2.5)
    assert read_ranges(study(*OWN, *ADAM))["adam"].selected is None


def test_the_ends_are_looked_for_outwards_and_then_halved():
    wide = read_ranges(study(*OWN, *ADAM))["adam"]
    assert ends_next(wide) == pytest.approx((math.sqrt(0.004 * 0.001), math.sqrt(0.1 * 1.0)))
    assert ends_next(wide, ratio=4.0) == pytest.approx((math.sqrt(0.1 * 1.0),))
    assert ends_next(wide, ratio=10.0) == ()
    open_ended = read_ranges(study(*OWN, *ADAM[1:4]))["adam"]
    assert ends_next(open_ended) == pytest.approx((0.001, 0.4))
    assert ends_next(open_ended, lowest=0.002, highest=0.3) == ()
