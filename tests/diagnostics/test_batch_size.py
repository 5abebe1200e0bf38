"""Batch sizes with planted optima: what a sweep of the batch size alone says, and what is left of it after tuning."""

from __future__ import annotations

import json
import math
import re

import pytest

from tests.helpers.simulated_batches import CHOOSING, LRS, OWN_LR, STEPS, batches, level
from tests.helpers.simulated_records import record, trial
from workbench.config import TrainConfig
from workbench.curves.trials import memory_field
from workbench.record.json_values import dumps
from workbench.topics.batch_size.arms import next_points, read_arms
from workbench.topics.batch_size.diagnose import CODES, diagnose_batch_size
from workbench.topics.batch_size.diagnose_noise_scale import diagnose_noise_scale

TUNED, RETUNE, EQUAL, NOISE, REGULARISE = CODES


def test_a_difference_that_tuning_takes_away():
    """F6.2, F6.3: with all else fixed the small batch looks worse; each at its own lr, they are equal."""
    found = diagnose_batch_size(batches({16: 0.0125, 64: 0.1, 256: 0.4}))
    assert found[TUNED].status == "ok"
    (steps,) = found[TUNED].evidence["factors"]
    assert (steps["equal"], steps["fixed"]) == ("steps", pytest.approx(level(0.1, 0.0125) / 0.2, rel=0.05))
    assert steps["tuned"] == pytest.approx(1.0, abs=0.05)
    assert found[RETUNE].status == "warn"
    assert {r["batch_size"]: r["lr_shift"] for r in found[RETUNE].evidence["rows"]} == pytest.approx(
        {16: 1 / 8, 256: 4.0}
    )
    assert found[RETUNE].value == pytest.approx(level(0.1, 0.0125) / 0.2, rel=0.05)
    assert "peak_lr=0.0125" in found[RETUNE].advice[1]
    assert found[EQUAL].status == "ok"
    assert {r["batch_size"]: r["verdict"] for r in found[EQUAL].evidence["rows"]} == {
        16: "equivalent",
        256: "equivalent",
    }


def test_a_longer_run_is_no_better_batch_size():
    """F6.3, F6.7: the metric falls with the number of updates alone, so at equal steps the batch sizes are equal."""
    lengths = {16: {160: 0.5, 40: 1.0}, 64: {40: 1.0}, 256: {40: 1.0, 10: 2.0}}
    found = diagnose_batch_size(batches({16: 0.1, 64: 0.1, 256: 0.1}, lengths=lengths))
    steps, examples = found[TUNED].evidence["factors"]
    for kind in ("fixed", "tuned"):
        assert steps[kind] == pytest.approx(1.0, abs=0.05)
        assert examples[kind] == pytest.approx(4.0, rel=0.05)
    assert re.search(
        r"tuned, by (1|1\.0\d*) at equal steps and (3\.9\d*|4|4\.0\d*) at equal examples", found[TUNED].summary
    )
    assert found[EQUAL].status == "ok"
    assert "16 at equal steps, 256 at equal steps" in found[EQUAL].summary
    assert re.search(
        r"at equal examples, 0\.(5\d*|49\d*) at 16 .* better\), (1\.9\d*|2|2\.0\d*) at 256", found[EQUAL].summary
    )


def test_better_at_equal_steps_and_worse_at_equal_examples_is_neither():
    """It saw more examples, then fewer updates; a batch size that is worse by either length is worse."""
    sizes, lengths = {64: 0.1, 256: 0.1}, {256: {40: 0.7, 10: 1.4}}
    assert diagnose_batch_size(batches(sizes, lengths=lengths))[EQUAL].status == "not_measured"
    worse = diagnose_batch_size(batches(sizes, lengths={256: {40: 1.3, 10: 1.4}}))[EQUAL]
    assert worse.status == "warn"
    assert worse.summary.count("worse)") == 2


def test_the_advice_is_a_config_with_the_momentum_that_was_tuned_and_its_length():
    """F6.4: lr 0.4 was best at momentum 0.5; with the baseline's 0.9 it is another, eight times longer, step."""
    r = batches({64: 0.1, 256: 0.4}, memory={256: 0.5}, warmup={256: 7}, optimizer="momentum")
    found = diagnose_batch_size(r)[RETUNE]
    assert "256 (40 steps): lr 0.4, momentum 0.5" in found.summary
    assert "64 is best at lr 0.1, momentum 0.9" in found.summary
    begin = found.advice[1]
    source = begin[begin.index("config.replace") : begin.rindex(".")]
    pasted = eval(source, {"config": TrainConfig.from_dict(r.config)})
    assert (pasted.batch_size, pasted.total_steps, pasted.peak_lr) == (256, STEPS, 0.4)
    assert (pasted.momentum, pasted.warmup_steps) == (0.5, 7)
    assert "for 40 steps" in begin


def test_momentum_that_nobody_moved_is_not_spoken_of():
    assert "momentum" not in diagnose_batch_size(batches({16: 0.0125, 64: 0.1}, optimizer="momentum"))[RETUNE].summary


def test_a_difference_that_stays():
    found = diagnose_batch_size(batches({16: 0.05, 64: 0.1, 256: 0.2}, extra={256: 1.5}))
    assert "(lower is better)" in found[EQUAL].summary
    assert re.search(r"1\.[45]\d* at 256 \(1\.\d* to 1\.\d*, worse\)", found[EQUAL].summary)
    assert found[EQUAL].status == "warn"
    row = next(r for r in found[EQUAL].evidence["rows"] if r["batch_size"] == 256)
    assert row["verdict"] == "different"
    assert row["low"] < 1.5 < row["high"]
    assert found[EQUAL].advice


def test_the_healthy_twin_whose_optimum_does_not_move():
    found = diagnose_batch_size(batches({16: 0.1, 64: 0.1, 256: 0.1}))
    assert [found[code].status for code in (TUNED, RETUNE, EQUAL)] == ["ok", "ok", "ok"]
    assert all(row["lr_shift"] == pytest.approx(1) for row in found[RETUNE].evidence["rows"])


def test_noisy_seeds_leave_it_undecided():
    found = diagnose_batch_size(batches({16: 0.1, 64: 0.1}, spread=0.3))[EQUAL]
    assert found.status == "not_measured"
    assert "More seeds" in found.advice[0]


def test_a_sweep_of_the_batch_size_alone_is_told_what_it_is_worth():
    """F6.1: nothing else was tuned."""
    found = diagnose_batch_size(batches({16: 0.0125, 64: 0.1}, lrs=[OWN_LR]))
    assert found[TUNED].status == "warn"
    assert found[TUNED].clause == "F6.1"
    assert "not which one is better" in found[TUNED].summary
    assert found[RETUNE].status == "not_measured"


def test_the_seeds_that_choose_play_no_part_in_the_comparison():
    r = batches({16: 0.05, 64: 0.1})
    for arm in read_arms(r):
        assert sorted(arm.tuned) == list(range(CHOOSING, CHOOSING + 5))
        assert arm.best.seeds == CHOOSING


def test_trials_that_changed_something_else_are_no_arm():
    r = batches({16: 0.05, 64: 0.1}, decays=(1e-3,))
    sizes = {arm.batch_size: len(arm.points) for arm in read_arms(r)}
    assert sizes == {16: len(LRS), 64: len(LRS)}


def test_a_decay_that_helps_the_large_batch_only():
    """F6.6, and the gap that F6.5 speaks of."""
    r = batches({16: 0.1, 64: 0.1, 256: 0.1}, decays=(1e-4, 1e-3), decayed={(256, 1e-3): 0.7})
    found = diagnose_batch_size(r)[REGULARISE]
    assert found.status == "warn"
    tried = {row["batch_size"]: row for row in found.evidence["tried"]}
    assert (tried[256]["helps"], tried[256]["weight_decay"]) == (True, 1e-3)
    assert tried[256]["gain"] == pytest.approx(0.3 * 0.2, rel=0.1)
    assert {row["batch_size"]: row["gap"] for row in found.evidence["gaps"]} == pytest.approx(
        {16: 0.016, 64: 0.064, 256: 0.256}
    )
    assert "weight_decay=0.001" in found.advice[0]


def test_a_decay_that_does_nothing_is_called_chance():
    """One decay does nothing, the other one hurts: neither is advised."""
    found = diagnose_batch_size(batches({16: 0.1, 256: 0.1, 64: 0.1}, decays=(1e-4, 1e-3), decayed={(256, 1e-3): 1.2}))
    assert found[REGULARISE].status == "ok"
    assert not found[REGULARISE].advice


EMPTY = record([])
DIVERGED = record(
    [trial([2.3, math.nan], 0.1, seed=s, batch_size=b) for s in range(8) for b in (16, 64)], batch_size=64, total_steps=2, full_batch=False
)  # fmt: skip
ONE = batches({64: 0.1})


@pytest.mark.parametrize("r", [EMPTY, DIVERGED, ONE], ids=["empty", "diverged", "one size"])
def test_every_code_once_valid_json_and_nothing_claimed(r):
    found = diagnose_batch_size(r)
    assert tuple(f.code for f in found) == CODES
    assert found[EQUAL].status == found[REGULARISE].status == found[NOISE].status == "not_measured"
    assert all(f.clause for f in found)
    json.loads(dumps(found.to_dict()), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_batch_size_whose_evaluations_are_nan_is_held_to_its_initial_model():
    found = diagnose_batch_size(batches({16: 0.1, 64: 0.1}, extra={16: math.nan}))[EQUAL]
    assert found.status == "warn"
    assert found.evidence["rows"][0]["ratio"] == pytest.approx(2.3 / 0.2, rel=0.05)


def moment(step, value, low=1.0, high=1e9):
    return {"step": step, "value": value, "low": low, "high": high, "examples": 1024, "micro_batch": 16}


@pytest.mark.parametrize(("rows", "value", "word"), [
    ([moment(0, 500.0), moment(10, 700.0), moment(20, 900.0)], 700.0, "larger than 64"),
    ([moment(0, 4.0)], 4.0, "smaller than 64"),
    ([moment(0, 60.0), moment(9, 70.0)], 65.0, "near where"),
    ([moment(0, 60.0), moment(9, math.inf, low=900.0)], 480.0, "at least 900"),
])  # fmt: skip
def test_the_noise_scale_as_a_prediction(rows, value, word):
    found = diagnose_noise_scale(record([], facts={"noise_scale": rows}, batch_size=64, total_steps=10))[NOISE]
    assert (found.status, found.value, found.unit) == ("ok", pytest.approx(value), "examples")
    assert word in found.summary


def test_a_gradient_that_drowns_is_a_lower_bound_and_no_number():
    rows = json.loads(dumps([moment(0, math.inf, low=900.0, high=math.inf)]))  # as the record holds it
    found = diagnose_noise_scale(record([], facts={"noise_scale": rows}))[NOISE]
    assert found.status == "ok", "a bound was measured"
    assert found.value is None
    assert "at least 900" in found.summary


def test_why_there_is_no_noise_scale_is_told():
    reason = "the sums would take 9 GiB, more than the limit of 4 GiB"
    facts = {"noise_scale": None, "not_collected": {"noise_scale": reason}}
    found = diagnose_noise_scale(record([], facts=facts))[NOISE]
    assert (found.status, found.summary) == ("not_measured", f"Not measured: {reason}.")


@pytest.mark.parametrize("best", [0.1, 0.1 / 16, 0.1 * 32])
def test_the_search_ends_with_a_worse_neighbour_on_both_sides(best):
    tried = {}
    for _ in range(20):
        asked = next_points(tried, 0.1, ratio=2.0, reach=8)
        if not asked:
            break
        tried |= {lr: level(lr, best) for lr in asked}
    assert min(tried, key=tried.get) == pytest.approx(best)
    assert min(tried) < best < max(tried)
    assert len(tried) <= 3 + 8


def test_the_search_goes_down_where_nothing_trains_and_ends_at_its_reach():
    tried = {}
    while asked := next_points(tried, 0.1, ratio=2.0, reach=4):
        assert not set(asked) & set(tried)
        tried |= dict.fromkeys(asked, math.inf)
    assert min(tried) == pytest.approx(0.1 / 16)
    assert max(tried) == pytest.approx(0.2)
    falling = {}
    while asked := next_points(falling, 0.1, ratio=2.0, reach=4):
        falling |= {lr: 1 / lr for lr in asked}
    assert max(falling) == pytest.approx(1.6)


def test_larger_is_better_where_the_metric_says_so():
    tried = {lr: 1 - level(lr, 0.1) for lr in (0.05, 0.1, 0.2)}
    assert next_points(tried, 0.1, ratio=2.0, reach=4, sign=-1.0) == []
    assert next_points({0.05: 0.3, 0.1: 0.2, 0.2: 0.1}, 0.1, ratio=2.0, reach=4, sign=-1.0) == [pytest.approx(0.025)]


def test_the_memory_of_each_rule():
    assert [memory_field(name) for name in ("sgd", "momentum", "adam", "adamw", "mine.py:rule", None)] == [
        None, "momentum", "beta1", "beta1", None, None,
    ]  # fmt: skip
