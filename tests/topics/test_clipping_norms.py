"""Whose norms a clipping threshold comes from, which it is, and what clipping did to a run: against NumPy and arithmetic."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.helpers.clipped_records import BLOWN, FALLING, LIMIT, STEPS, clipped, descended, descent, plain
from tests.helpers.simulated_records import record, trial
from workbench.curves.clipping import (  # fmt: skip
    alternation,
    choose_threshold,
    clipped_runs,
    fixed_step,
    reference_norms,
    steady_stretch,
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0])
def test_it_is_the_empirical_percentile_behind_the_start(seed: int, percentile: float) -> None:
    """Stationary norms with a Pareto tail of index 2, whose variance is infinite; what is not finite is only counted."""
    norms = 1.0 + np.random.default_rng(seed).pareto(2.0, size=1000)
    found = choose_threshold(np.insert(norms, [50, 50, 300], [math.nan, math.inf, -math.inf]), percentile=percentile, first=102)  # fmt: skip
    assert (found.nonfinite, found.steps, found.first_step) == (3, 1003, 102)
    assert choose_threshold(norms, percentile=percentile).threshold == found.threshold, "a tenth is its start"
    assert found.threshold == pytest.approx(np.percentile(norms[100:], percentile), rel=1e-12)
    assert found.all_steps == pytest.approx(np.percentile(norms, percentile), rel=1e-12)
    assert [found.low, found.median, found.high] == pytest.approx(np.percentile(norms[100:], [25, 50, 75]))
    assert found.threshold is not None
    assert found.ratio == pytest.approx(found.threshold / np.median(norms[100:]))
    assert found.clip_frac == pytest.approx((norms > found.threshold).mean())


@pytest.mark.parametrize(("norms", "why"), [
    ([], "no gradient norm was recorded"), ([math.inf] * 30 + [math.nan] * 30, "none of the 60 gradient norms is finite"),
    ([0.0] * 100, "all gradient norms are 0: no gradient reaches the parameters"),
    ([0.7] * 50 + [math.nan] + [0.7 * (1 + 1e-8)] * 50, r"all gradient norms are equal \(0.7\): a threshold would clip every"),
    ([1.0, 2.0] * 10 + [math.nan] * 80, "the steady stretch has 10 finite gradient norms, and 20 are needed"),
    ([0.0] * 96 + [1.0] * 4, "96% of the gradient norms are 0, and so is their 90th percentile"),
])  # fmt: skip
def test_norms_that_choose_nothing_say_why(norms: list[float], why: str) -> None:
    found = choose_threshold(norms, first=0 if 0.0 in norms[:1] else None)
    assert (found.threshold, found.ratio) == (None, None)
    assert re.search(why, found.reason)


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, (10, 100)), ({"warmup_steps": 30}, (30, 100)), ({"warmup_steps": 500}, (100, 100)),
    ({"rises": [(60, None)]}, (10, 61)), ({"rises": [(20, 40)]}, (40, 100)), ({"rises": [(70, 90)]}, (10, 71)),
    ({"rises": [(30, 35), (90, None)]}, (35, 91)), ({"rises": [(0, None)]}, (10, 10)),
])  # fmt: skip
def test_the_steady_stretch_lies_behind_the_start_and_between_the_rises(settings: Any, expected: Any) -> None:
    assert steady_stretch(100, **settings) == expected


LATE = np.concatenate([FALLING[:120], np.full(80, 9.0)])


def run(loss: Any = FALLING, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    return trial(loss, lr, columns={"grad_norm": 1 + np.random.default_rng(0).pareto(3.0, size=len(loss))}, **more)


def chosen(trials: Any, **more: Any) -> int | None:
    found = reference_norms(record(trials, **more))
    return None if found is None else found.item.curve.trial


def test_stable_comes_before_the_wanted_lr_and_unclipped_before_clipped() -> None:
    assert chosen([run(LATE, lr=0.1), run(lr=0.05)], peak_lr=0.1) == 1
    limited = run(lr=0.1, max_grad_norm=1.0, stage="clipping")
    assert chosen([limited, run(lr=0.05)], peak_lr=0.1) == 1
    assert chosen([limited], peak_lr=0.1, max_grad_norm=1.0) == 0
    found = reference_norms(record([limited]))
    assert found is not None
    assert found.clipped


def test_of_a_run_that_blows_up_only_the_steps_before_count() -> None:
    trials = [run(LATE, lr=0.1)]
    trials[0]["columns"]["grad_norm"][120:] = 1e6
    found = reference_norms(record(trials))
    assert found is not None
    assert found.first == 20
    assert 115 <= found.end <= 121
    threshold = found.threshold(90.0).threshold
    assert threshold == pytest.approx(np.percentile(found.norms[20 : found.end], 90))


def test_clipped_descent_above_the_edge_settles_in_the_2_cycle() -> None:
    """lr 2.5, curvature 1, threshold 0.5: theta steps by lr * threshold = 1.25 to and fro."""
    theta = descended(0.675, 100, limit=LIMIT)
    assert sorted(set(theta.round(9))) == [-0.575, 0.675]
    same = descent(descended(0.675, 100))
    (row,) = clipped_runs(record([descent(theta, limit=LIMIT), same], optimizer="sgd"))
    assert row["clip_frac"] == row["late_clip_frac"] == 1.0
    assert row["alternation"] == pytest.approx(-1.0)
    assert (row["parked"], row["lasting"], row["twin_lasting"]) == (True, False, True)
    assert row["effective_lr"] == pytest.approx(2.5 * (0.5 / 0.575 + 0.5 / 0.675) / 2)


def test_the_control_is_the_same_run_but_for_clipping() -> None:
    start = descended(0.675, 60)
    runs = [
        descent(descended(0.675, 60, limit=LIMIT), limit=LIMIT), descent(descended(0.675, 60, lr=0.5), lr=0.5),
        {**descent(start), "seed": 1}, {**descent(start), "config": {"max_grad_norm": None, "momentum": 0.5}},
    ]  # fmt: skip
    assert clipped_runs(record(runs))[0]["twin"] is None
    (row,) = clipped_runs(record([*runs, descent(start)]))
    assert (row["twin"], row["twin_outcome"]) == (4, "divergent")
    assert row["twin_loss"] > 1e6


@pytest.mark.parametrize("seed", range(2))
def test_alternation_of_noise_is_minus_one_half(seed: int) -> None:
    """Differences of independent draws are correlated by -1/2 from one to the next."""
    assert alternation(np.random.default_rng(seed).normal(size=20_000)) == pytest.approx(-0.5, abs=0.02)


@pytest.mark.parametrize(("above", "twin", "optimizer", "fixed"), [
    (STEPS, FALLING, "sgd", True), (int(0.8 * STEPS), FALLING, "sgd", False), (STEPS, BLOWN, "sgd", False),
    (STEPS, None, "sgd", False), (STEPS, FALLING, "adam", False),
], ids=["all", "some", "needed", "nobody knows", "adaptive"])  # fmt: skip
def test_where_the_clip_fixes_every_step_nothing_is_said_of_the_lr(above: int, twin: Any, optimizer: str, fixed: bool) -> None:  # fmt: skip
    """Whatever larger lrs were trained: they make up for the threshold. Where training needs it, the lr is too high instead."""
    slow = 2.3 - 1e-3 * np.arange(STEPS)
    trials = [clipped(above, slow, stage="baseline"), clipped(STEPS, FALLING, lr=100.0, stage="lr_sweep")]
    trials += [] if twin is None else [plain(twin, max_grad_norm=None)]
    made = record(trials, peak_lr=0.1, max_grad_norm=1.0, total_steps=STEPS, optimizer=optimizer)
    assert fixed_step(made) is fixed
    found = wb.lr_sweep.diagnose(made)
    assert (found["lr.best"].value is None) is fixed
    assert ("raise max_grad_norm first" in found["lr.too_low"].summary) is fixed
