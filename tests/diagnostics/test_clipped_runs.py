"""What clipping did to a run, against arithmetic: shares, factors, and the swing of a 2-cycle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.helpers.clipped_records import BLOWN, FALLING, LIMIT, LR, STEPS, clipped, descended, descent, plain
from tests.helpers.simulated_records import record, trial
from workbench.curves.clipped_runs import alternation, clipped_runs, fixed_step, step_scale
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep


def test_clipped_descent_above_the_edge_settles_in_the_2_cycle() -> None:
    """lr 2.5, curvature 1, threshold 0.5: theta steps by lr * threshold = 1.25 to and fro."""
    theta = descended(0.675, 100, limit=LIMIT)
    assert sorted(set(theta.round(9))) == [-0.575, 0.675]
    twin = descent(descended(0.675, 100))
    (row,) = clipped_runs(record([descent(theta, limit=LIMIT), twin], optimizer="sgd"))
    assert row["clip_frac"] == row["late_clip_frac"] == 1.0
    assert row["parked"]
    assert row["alternation"] == pytest.approx(-1.0)
    assert not row["lasting"]
    assert row["twin_lasting"]
    assert row["effective_lr"] == pytest.approx(2.5 * (0.5 / 0.575 + 0.5 / 0.675) / 2)


def test_the_twin_is_the_same_run_but_for_clipping() -> None:
    start = descended(0.675, 60)
    runs = [
        descent(descended(0.675, 60, limit=LIMIT), limit=LIMIT),
        descent(descended(0.675, 60, lr=0.5), lr=0.5),
        {**descent(start), "seed": 1},
        {**descent(start), "config": {"max_grad_norm": None, "momentum": 0.5}},
    ]
    assert clipped_runs(record(runs))[0]["twin"] is None
    (row,) = clipped_runs(record([*runs, descent(start)]))
    assert row["twin"] == 4
    assert row["twin_outcome"] == "divergent"
    assert row["twin_loss"] > 1e6


def test_only_steps_near_the_peak_lr_are_its_end() -> None:
    """At the foot of a decaying schedule the norm comes down whatever the lr was."""
    theta = np.concatenate([descended(0.675, 80, limit=LIMIT), np.full(20, 0.1)])
    lr = np.concatenate([np.full(80, LR), np.linspace(LR / 2, 0, 20)])
    (row,) = clipped_runs(record([descent(theta, limit=LIMIT, columns={"lr": lr})]))
    assert row["late_clip_frac"] == 1.0
    assert row["clip_frac"] == 0.8
    assert clipped_runs(record([descent(theta, limit=LIMIT)]))[0]["late_clip_frac"] == 0.0


def test_nonfinite_norms_are_counted_and_not_averaged() -> None:
    norms = np.where(np.arange(100) % 4 == 0, 2.0, 0.1)
    norms[[1, 2, 3]] = math.nan, math.inf, math.nan
    falling = trial(
        np.exp(-np.arange(100) / 20), 0.1, stage="clipping", max_grad_norm=1.0, columns={"grad_norm": norms}
    )
    (row,) = clipped_runs(record([falling]))
    assert row["nonfinite"] == 3
    assert row["clip_frac"] == pytest.approx(25 / 97)
    assert row["effective_lr"] == pytest.approx(0.1 * (72 + 25 * 0.5) / 97)


def test_adaptive_rules_have_no_effective_lr() -> None:
    theta = descended(0.675, 60, limit=LIMIT)
    assert clipped_runs(record([descent(theta, limit=LIMIT)], optimizer="adam"))[0]["effective_lr"] is None


def test_runs_without_clipping_or_end_are_left_out() -> None:
    theta = descended(0.675, 60, limit=LIMIT)
    half = {**descent(theta[:30], limit=LIMIT), "config": {"max_grad_norm": LIMIT, "total_steps": 60}}
    probe = {**descent(theta, limit=LIMIT), "stage": "probe"}
    assert clipped_runs(record([descent(theta), half, probe])) == []
    assert clipped_runs(record([])) == []


def test_the_step_is_shortened_as_the_rule_says() -> None:
    assert step_scale([0.0, 0.5, 1.0, 2.0, 8.0, math.nan, math.inf], 1.0) == pytest.approx([1, 1, 1, 0.5, 0.125])


@pytest.mark.parametrize("seed", range(5))
def test_alternation_of_noise_is_minus_one_half(seed: int) -> None:
    """Differences of independent draws are correlated by -1/2 from one to the next."""
    assert alternation(np.random.default_rng(seed).normal(size=20_000)) == pytest.approx(-0.5, abs=0.02)


def test_alternation_of_what_falls_stands_or_is_short() -> None:
    assert alternation(np.exp(-np.arange(50) / 9)) > 0.9
    assert alternation([1.0, 2.0] * 20) == pytest.approx(-1.0)
    for nothing in ([1.0] * 20, [1.0, 2.0, 1.0], [], [1.0, math.nan, 1.0, 2.0, 1.0], [0.0] * 9):
        assert math.isnan(alternation(nothing))


@pytest.mark.parametrize(
    ("above", "twin", "optimizer", "fixed"),
    [
        (STEPS, FALLING, "sgd", True),
        (int(0.8 * STEPS), FALLING, "sgd", False),
        (STEPS, BLOWN, "sgd", False),
        (STEPS, None, "sgd", False),
        (STEPS, FALLING, "adam", False),
    ],
    ids=["all", "some", "needed", "nobody knows", "adaptive"],
)
def test_where_the_clip_fixes_every_step_nothing_is_said_of_the_lr(above: int, twin: Any, optimizer: str, fixed: bool) -> None:  # fmt: skip
    """Whatever larger lrs were trained: they make up for the threshold. Where training needs it, the lr is too high instead."""
    slow = 2.3 - 1e-3 * np.arange(STEPS)
    trials = [clipped(above, slow, stage="baseline"), clipped(STEPS, FALLING, lr=100.0, stage="lr_sweep")]
    trials += [] if twin is None else [plain(twin, max_grad_norm=None)]
    made = record(trials, peak_lr=0.1, max_grad_norm=1.0, total_steps=STEPS, optimizer=optimizer)
    assert fixed_step(made) is fixed
    found = diagnose_lr_sweep(made)
    assert (found["lr.best"].value is None) is fixed
    assert ("loosen the clip first" in found["lr.too_low"].summary) is fixed
