"""`lr.nothing_learns`: whether any learning rate does better than a constant output, and what is said where noise hides that."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from tests.helpers.simulated_records import record, trial
from tests.topics.test_lr_sweep import BLOWN, TOTAL, run

CHANCE = 1.05


def learned(ends, *, start=1.1, sd=0.05, rate=10.0, total=400, chance=CHANCE, scale=0.1, found=True):
    """`lr.nothing_learns` of runs from `start` to one end an lr, with the same noise of minibatches at every lr."""
    trials = []
    for lr, end in zip((0.001, 0.004, 0.016, 0.064, 0.256), ends, strict=False):
        own = np.random.default_rng(int(1e6 * lr)).standard_normal(total)
        noise = sd * (0.9 * np.random.default_rng(0).standard_normal(total) + 0.4 * own)
        loss = end + (start - end) * np.exp(-np.arange(total) / rate) + noise
        trials.append(trial(loss, lr, columns={"loss_se": np.full(total, sd)}))
    facts = {"chance_loss": chance, "initial_critical_lr": scale, "initial_critical_lr_found": found}
    return wb.lr_sweep.diagnose(record(trials, full_batch=False, facts=facts))["lr.nothing_learns"]


@pytest.mark.parametrize("start", [1.05, 5.0])
def test_where_every_lr_ends_at_chance_or_above_nothing_is_learned(start):
    finding = learned([1.06, 1.05, 1.05, 1.051, 1.3], start=start)
    assert (finding.status, bool(finding.advice), finding.evidence["chance"]) == ("fail", True, CHANCE)
    assert finding.evidence["end_loss"] == pytest.approx(1.05, abs=0.03)
    assert finding.evidence["loss_ref"] == pytest.approx(start, abs=0.1)
    assert learned([1.06, 1.05, 0.98, 1.051, 1.3], start=start).status == "ok", "one that comes below is enough"


@pytest.mark.parametrize(("start", "end", "status"), [(1.15, 0.4, "ok"), (1.06, 1.06, "fail"), (0.95, 0.95, "not_measured")])  # fmt: skip
def test_a_first_batch_that_happens_to_cost_little_hides_no_learning(start, end, status):
    """Short runs with losses that vary by 0.2, whose first one lies below chance by chance; the last model begins below it."""
    noise = 0.1 * np.random.default_rng(3).standard_normal((3, 100))
    losses = end + (start - end) * np.exp(-np.arange(100) / 15) + noise
    losses[:, 0] = 0.94
    rows = zip(losses, (0.01, 0.04, 0.16), strict=True)
    trials = [trial(loss, lr, columns={"loss_se": np.full(100, 0.2)}) for loss, lr in rows]
    facts = {"chance_loss": CHANCE, "initial_critical_lr": 0.01, "initial_critical_lr_found": True}
    found = wb.lr_sweep.diagnose(record(trials, full_batch=False, facts=facts))
    assert (found["lr.nothing_learns"].status, found["lr.best"].status == "ok") == (status, status == "ok")
    assert ("four standard errors (0.82)" in found["lr.best"].summary) == (status == "not_measured")


@pytest.mark.parametrize(("chance", "status"), [(0.43, "fail"), (0.9, "not_measured")])
def test_a_loss_that_falls_on_is_no_excuse_where_chance_is_many_runs_away(chance, status):
    finding = learned([0.99, 0.98, 1.02, 1.08, 1.1], rate=150.0, sd=0.005, chance=chance)
    assert finding.status == status
    assert ("permute" in finding.advice[0]) == (status == "fail")


YARDSTICKS = {"z": {"linear": 12.0}, "classes": 2, "score": {"linear": 0.79}, "chance": 0.65}


def at_chance(levels, *, baseline, blown=(), yardsticks=None):
    """`lr.nothing_learns` of full-batch runs to these levels, where a constant output costs 0.65."""
    trials = [trial(run(level), lr) for lr, level in levels.items()] + [trial(BLOWN, lr) for lr in blown]
    facts = {"chance_loss": 0.65, "loop": {"data": {"yardsticks": yardsticks or {}}}}
    return wb.lr_sweep.diagnose(record(trials, total_steps=TOTAL, peak_lr=baseline, facts=facts))["lr.nothing_learns"]


@pytest.mark.parametrize(("level", "status"), [(0.6505, "warn"), (0.6495, "warn"), (0.64, "ok"), (0.1, "ok")])
def test_a_hair_below_a_constant_output_is_nothing_learned_and_small_lrs_alone_are_a_warning(level, status):
    finding = at_chance({0.1: 0.651, 0.2: 0.6508, 0.4: level}, baseline=0.1)
    assert finding.status == status
    assert ("Larger learning rates were not tried" in finding.summary) == (status == "warn")
    assert at_chance({0.1: 0.651, 0.2: 0.6508, 0.4: level}, baseline=0.1, blown=[25.6]).status == status.replace(
        "warn", "fail"
    )


@pytest.mark.parametrize(("own", "status"), [(0.6505, "warn"), (0.6408, "ok")])
def test_a_training_at_chance_is_told_though_an_lr_at_the_edge_learns(own, status):
    """The best larger lr that is far enough from the unstable one learns nothing, either, so that the own one is not called too low."""
    levels = {0.1: own, 1.6: 0.6499, 6.4: 0.6}
    finding = at_chance(levels, baseline=0.1, blown=[9.9], yardsticks=YARDSTICKS)
    assert finding.status == status
    assert ("a linear model reaches accuracy 0.79 on rows left out (0.65 by chance)" in finding.summary) == (
        status == "warn"
    )
    assert at_chance({**levels, 1.6: 0.4}, baseline=0.1, blown=[9.9]).status == "ok", "lr.too_low tells it"


@pytest.mark.parametrize(("sd", "status"), [(0.02, "warn"), (2.0, "not_measured")])
def test_a_loss_that_falls_at_no_lr_is_an_alarm_where_nobody_knows_what_guessing_costs_too(sd, status):
    finding = learned([1.05, 1.05, 1.05, 1.051, 1.3], start=1.05, sd=sd, chance=None)
    assert (finding.status, "falls at no learning rate" in finding.summary) == (status, status == "warn")
    assert learned([1.05, 1.05, 0.9, 1.051, 1.3], start=1.05, chance=None).status == "ok"


@pytest.mark.parametrize(("own", "tried", "status"), [
    (0.016, 5, "warn"), (0.064, 5, "not_measured"), (0.001, 2, "not_measured"), (0.001, 3, "not_measured"),
])  # fmt: skip
def test_a_scripts_own_lr_is_no_scale_of_its_model(own, tried, status):
    """Where no scale was found, lrs have to reach far above the script's own, over a wide range."""
    ends = [1.05, 1.05, 1.05, 1.051, 1.05][:tried]
    finding = learned(ends, start=1.05, sd=0.02, chance=None, scale=own, found=False)
    assert (finding.status, "falls at no learning rate" in finding.summary) == (status, status == "warn")


@pytest.mark.parametrize(("rate", "status"), [(200.0, "not_measured"), (100.0, "fail")])
def test_a_loss_that_has_come_nine_tenths_of_the_way_to_chance_has_arrived(rate, status):
    """At the end 20 % and 7 % of the way are left, and it is still falling in both."""
    finding = learned([4.9, 4.5, 3.5, 1.5, 1.2], start=5.0, rate=rate, sd=0.01)
    assert (finding.status, "too few" in finding.summary) == (status, status == "not_measured")


@pytest.mark.parametrize(("steps", "told"), [(9, False), (12, True)])
def test_runs_of_a_few_minibatches_tell_no_learning_rate(steps, told):
    trials = [trial(2.0 * 0.99 ** (lr * np.arange(steps)), lr) for lr in (0.1, 0.4, 1.6)]
    found = wb.lr_sweep.diagnose(record(trials, full_batch=False))
    assert (found["lr.too_low"].status == "fail") is told
    assert ("9 updates are too short" in found["lr.nothing_learns"].summary) is not told
    assert (found["lr.best"].status == "not_measured") is not told
