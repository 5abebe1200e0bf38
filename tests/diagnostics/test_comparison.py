"""The three statements of figure 4 as booleans: planted true, false, and beyond what the records can tell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.helpers.simulated_arms import (
    LRS,
    SPREAD,
    WARMUP,
    arm,
    cured,
    diverging,
    falling,
    healthy,
    jumping,
    lost,
    recovering,
)
from tests.helpers.simulated_records import record, trial
from workbench.record.json_values import dumps
from workbench.topics.comparison.diagnose import CODES, diagnose_comparison

LOW, HIGH, CURE = CODES


def holds(*arms, **thresholds):
    diagnosis = diagnose_comparison(*arms, **thresholds)
    return [diagnosis[code].evidence["holds"] for code in CODES]


def reasons(*arms, **thresholds):
    return {f.code: f.evidence.get("reason") for f in diagnose_comparison(*arms, **thresholds)}


def test_a_modification_that_loses_the_high_lrs_and_a_warmup_that_brings_them_back():
    diagnosis = diagnose_comparison(healthy(), lost(), cured())
    assert [f.evidence["holds"] for f in diagnosis] == [True, True, True]
    assert [f.status for f in diagnosis] == ["ok", "warn", "ok"]
    low, high, cure = (diagnosis[code] for code in CODES)
    assert [row["lr"] for row in low.evidence["lrs"]] == [0.01, 0.02, 0.04]
    assert [row["lr"] for row in high.evidence["lrs"]] == [0.16, 0.32]
    assert high.value == pytest.approx(0.64 / 0.16)
    assert high.evidence["when"] == {"mid": 3, "early": 3}
    assert (cure.value, cure.evidence["warmup_steps"]) == (0.32, WARMUP)
    assert "up to 0.32" in high.summary
    assert "stable up to lr 0.32" in cure.summary


def test_the_healthy_twin_loses_nothing():
    """The same workload under other seeds: nothing is lost, and so there is nothing to cure."""
    diagnosis = diagnose_comparison(healthy(), healthy(seeds=(3, 4, 5)), cured())
    assert [f.evidence["holds"] for f in diagnosis] == [True, False, None]
    assert [f.status for f in diagnosis] == ["ok", "ok", "not_measured"]
    assert "no instability" in diagnosis[CURE].evidence["reason"]


@pytest.mark.parametrize("r", [
    (record([]), record([])), (record([]), lost()), (healthy(), record([]), cured()), (healthy(), lost()),
    (healthy(), lost(), cured()), (record([trial(falling(1.0), 0.1)]),) * 3,
    (record([trial(np.full(30, np.nan), 1.0, seed=s) for s in (0, 1)]),) * 3,
    (record([trial(np.full(30, 2.0), lr, seed=s) for s in (0, 1) for lr in LRS]),) * 3,
    (record([trial([2.3, 2.2], lr, seed=s) for s in (0, 1) for lr in LRS]),) * 3,
], ids=["empty", "no baseline", "no modified", "no warmup", "whole", "one trial", "NaN", "constant", "two steps"])  # fmt: skip
def test_every_code_once_valid_json_and_the_reason_where_nothing_is_said(r):
    diagnosis = diagnose_comparison(*r)
    assert tuple(f.code for f in diagnosis) == CODES
    assert all(f.clause.startswith("F1.3") for f in diagnosis)
    for finding in diagnosis:
        unknown = finding.evidence["holds"] is None
        assert unknown == (finding.status == "not_measured") == finding.summary.startswith("Not measured: ")
        assert bool(finding.evidence.get("reason")) == unknown
    json.loads(dumps(diagnosis.to_dict()))


@pytest.mark.parametrize(("shift", "untouched"), [(1.5 * SPREAD, True), (-1.5 * SPREAD, True), (8 * SPREAD, False), (-8 * SPREAD, False)])  # fmt: skip
def test_low_lrs_are_held_against_the_spread_from_seed_to_seed(shift, untouched):
    """The margin is 2 standard deviations, or 1 % of what the baseline learned: 0.021."""
    diagnosis = diagnose_comparison(healthy(), lost(shift=shift))
    assert diagnosis[LOW].evidence["holds"] is untouched
    assert diagnosis[LOW].value == pytest.approx(shift, abs=1e-3)
    assert diagnosis[LOW].threshold == pytest.approx(0.0215, abs=1e-3)
    assert diagnosis[HIGH].evidence["holds"] is True


def test_the_thresholds_are_arguments():
    shifted = lost(shift=8 * SPREAD)
    exact = diagnose_comparison(healthy(), shifted, material_frac=0.0, noise_sds=3.0)[LOW]
    assert exact.threshold == pytest.approx(3 * SPREAD, rel=1e-3)
    assert holds(healthy(), shifted, material_frac=0.1)[0] is True
    assert holds(healthy(), shifted, noise_sds=10.0)[0] is True
    assert holds(healthy(), shifted, low_ratio=20.0)[0] is None
    assert holds(healthy(), lost(), cured(), min_ratio=5.0) == [True, None, None]


def test_one_diverged_seed_at_a_low_lr_touches_it():
    assert holds(healthy(), arm({0.01: (falling, falling, diverging), 0.16: jumping, 0.32: diverging}))[0] is False


def test_worse_without_a_rise_is_slowness_and_no_instability():
    slow = arm({lr: lambda level, total: falling(level + 0.05, total) for lr in (0.16, 0.32)} | {0.64: diverging})
    diagnosis = diagnose_comparison(healthy(), slow, min_low_lrs=1)
    assert diagnosis[HIGH].evidence["holds"] is False
    assert diagnosis[HIGH].evidence["lrs"] == []


def stuck(**more):
    """From 0.16 on the loss falls to 1.5, where lower lrs end at 0.3, and never rises."""
    return arm({lr: lambda level, total: falling(1.5, total) for lr in (0.16, 0.32)} | {0.64: diverging}, **more)


def test_runs_that_get_stuck_without_a_rise_count_where_a_warmup_cures_them():
    diagnosis = diagnose_comparison(healthy(), stuck(), cured())
    assert [f.evidence["holds"] for f in diagnosis] == [True, True, True]
    assert [row["sign"] for row in diagnosis[HIGH].evidence["lrs"]] == ["collapse", "collapse"]
    assert "2 of 2 lrs get stuck" in diagnosis[HIGH].summary


def test_runs_that_get_stuck_with_a_warmup_as_well_leave_the_cause_open():
    for warmed in (stuck(warmup=WARMUP), None):
        diagnosis = diagnose_comparison(healthy(), stuck(), warmed)
        assert [f.evidence["holds"] for f in diagnosis] == [True, None, None]
        assert "no warmup" in diagnosis[HIGH].evidence["reason"]
    assert holds(healthy(), stuck(), stuck(warmup=WARMUP), collapse_frac=0.9)[1] is False


def test_a_little_better_is_no_cure():
    """From 1.5 to 1.4 is more than the seeds differ by, and less than half of the way down to the baseline's 0.25."""
    little = arm(
        {lr: lambda level, total: falling(1.4, total) for lr in (0.16, 0.32)} | {0.64: diverging}, warmup=WARMUP
    )
    assert holds(healthy(), stuck(), little)[1:] == [None, None]
    assert holds(healthy(), stuck(), little, cure_frac=0.05)[1:] == [True, True]
    at_chance = arm(
        {lr: lambda level, total: falling(2.2, total) for lr in (0.16, 0.32)} | {0.64: diverging}, warmup=WARMUP
    )
    finding = diagnose_comparison(healthy(), lost(), at_chance)[CURE]
    assert [row["cured"] for row in finding.evidence["lrs"]] == [False, False], (
        "bounded where it diverged, and untrained"
    )


def test_a_warmup_that_frees_a_part_of_what_was_stuck_trains_up_to_there():
    part = arm({0.32: lambda level, total: falling(1.5, total), 0.64: diverging}, warmup=WARMUP)
    finding = diagnose_comparison(healthy(), stuck(), part)[CURE]
    assert (finding.value, finding.evidence["holds"]) == (0.16, False)


def test_a_rise_that_ends_as_well_as_the_baseline_costs_nothing():
    assert holds(healthy(), arm({0.16: recovering, 0.32: recovering, 0.64: diverging}))[1] is False


def test_a_rise_that_comes_back_to_a_worse_level_counts():
    """F1.10: unstable early, then slow but stable."""
    worse = arm({lr: lambda level, total: recovering(level + 0.5, total) for lr in (0.16, 0.32)} | {0.64: diverging})
    diagnosis = diagnose_comparison(healthy(), worse, cured())
    assert [f.evidence["holds"] for f in diagnosis] == [True, True, True]
    assert diagnosis[HIGH].evidence["when"] == {"early": 6}


def test_the_baseline_has_to_train_where_the_modification_does_not():
    both = lost()
    assert holds(both, lost(seeds=(3, 4, 5)))[1] is False
    one_seed_fails = arm({0.16: (falling, jumping, falling), 0.32: diverging, 0.64: diverging})
    far_worse = arm({0.16: lambda level, total: 10 * jumping(level, total), 0.32: diverging, 0.64: diverging})
    assert holds(one_seed_fails, far_worse)[1] is False, "the baseline is a matter of chance there"


def test_an_island_of_instability_below_does_not_end_the_baseline():
    assert holds(arm({0.04: jumping, 0.64: diverging}), lost(), low_ratio=2.0)[:2] == [True, True]


def test_a_single_step_of_the_grid_is_the_least_and_less_is_chance():
    near = arm({0.32: jumping, 0.64: diverging})
    assert holds(healthy(), near)[1] is True
    finding = diagnose_comparison(healthy(), near, min_ratio=3.0)[HIGH]
    assert (finding.evidence["holds"], finding.status) == (None, "not_measured")
    assert "0.32, but the baseline is unstable at 0.64: too near to tell apart" in finding.evidence["reason"]


def test_without_an_unstable_lr_none_is_known_to_be_low():
    """The same arms as far as 0.08; the twin that reaches 0.64, where both diverge, knows which ones are low."""
    stable = arm(lrs=LRS[:4]), arm(lrs=LRS[:4], seeds=(3, 4, 5))
    finding = diagnose_comparison(*stable)[LOW]
    assert (finding.evidence["holds"], finding.status, finding.evidence["lrs"]) == (None, "not_measured", [])
    assert "no lr up to 0.08 is unstable in either arm, so none is known to be low" in finding.evidence["reason"]
    assert holds(healthy(), healthy(seeds=(3, 4, 5)))[0] is True


@pytest.mark.parametrize(("baseline", "modified", "said"), [
    (arm(lrs=LRS[:4]), arm(lrs=LRS[:4]), "no lr up to 0.08 is unstable"),
    (arm(lrs=LRS[:6]), arm({0.32: jumping}, lrs=LRS[:6]), "too near the end"),
    (healthy(seeds=(0,)), lost(), "under 2 seeds"),
    (healthy(), lost(seeds=(0,)), "under 2 seeds"),
    (healthy(lrs=LRS[:3]), lost(lrs=LRS[3:]), "under 2 seeds"),
    (record([trial(np.full(50, 2.0), lr, seed=s) for s in (0, 1) for lr in LRS]), lost(), "no lr brought"),
    (record([]), record([]), "no sweep"),
], ids=["stable", "at the end", "one seed", "one seed there", "nothing shared", "learns nothing", "empty"])  # fmt: skip
def test_what_cannot_be_told_is_not_measured(baseline, modified, said):
    diagnosis = diagnose_comparison(baseline, modified, cured())
    assert diagnosis[HIGH].evidence["holds"] is None
    assert said in diagnosis[HIGH].evidence["reason"]
    assert diagnosis[CURE].evidence["holds"] is None


def test_one_seed_is_enough_where_that_is_asked():
    one = {"seeds": (0,)}
    assert holds(healthy(**one), lost(**one), cured(**one), min_seeds=1) == [True, True, True]


def test_too_few_low_lrs_say_so():
    said = reasons(healthy(lrs=LRS[2:]), lost(lrs=LRS[2:]))[LOW]
    assert said.startswith("1 of the shared lrs")
    assert "downwards" in said


def test_a_warmup_that_changes_nothing_is_no_cure():
    diagnosis = diagnose_comparison(healthy(), lost(), lost(warmup=WARMUP))
    assert diagnosis[CURE].evidence["holds"] is False
    assert diagnosis[CURE].status == "warn"
    assert diagnosis[CURE].value == 0.08
    assert diagnosis[CURE].advice


def test_a_warmup_that_opens_a_part_is_a_cure_up_to_there():
    part = arm({0.32: diverging, 0.64: diverging}, warmup=WARMUP)
    assert holds(healthy(), lost(), part)[2] is False
    diagnosis = diagnose_comparison(healthy(), lost(), part, up_to_lr=0.16)
    assert (diagnosis[CURE].evidence["holds"], diagnosis[CURE].threshold) == (True, 0.16)
    assert holds(healthy(), lost(), cured(), up_to_lr=0.64)[2] is False, "0.64 stays unstable"
    assert holds(healthy(), lost(), cured(), up_to_lr=0.1)[2] is None, "nothing was lost up to there"


def test_a_warmup_has_to_be_stable_and_better_at_each_lost_lr():
    still = diagnose_comparison(healthy(), lost(), arm({0.32: jumping, 0.64: diverging}, warmup=WARMUP))[CURE]
    assert [row["cured"] for row in still.evidence["lrs"]] == [True, False], "bounded now, and no less unstable"
    slow = {lr: lambda level, total: recovering(level + 0.5, total) for lr in (0.16, 0.32)} | {0.64: diverging}
    no_better = diagnose_comparison(healthy(), arm(slow), arm(slow, warmup=WARMUP))[CURE]
    assert [row["cured"] for row in no_better.evidence["lrs"]] == [False, False], "stable as before, and as slow"


def test_stable_up_to_ends_at_the_first_unstable_lr():
    island = arm({0.04: jumping, 0.64: diverging}, warmup=WARMUP)
    finding = diagnose_comparison(healthy(), lost(), island)[CURE]
    assert (finding.value, finding.evidence["holds"]) == (0.02, False)


def test_a_warmup_that_does_not_reach_the_lost_lrs_is_not_measured():
    assert "lacks lrs" in reasons(healthy(), lost(), cured(lrs=LRS[:5]))[CURE]
    assert "lacks lrs" in reasons(healthy(), lost(), cured(seeds=(0,)))[CURE]
    assert "no sweep with a warmup" in reasons(healthy(), lost())[CURE]
    assert "has no warmup" in reasons(healthy(), lost(), healthy())[CURE]


def test_the_scale_of_the_loss_changes_nothing():
    scaled = [healthy(), lost(shift=8 * SPREAD), cured()]
    plain = holds(*scaled)
    for one in scaled:
        one.steps["loss"] = 1e4 * one.steps["loss"] - 1000
    assert holds(*scaled) == plain == [False, True, True]
