"""`lr.nothing_learns`: held against the best constant output, not against the start."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep

TOTAL, CHANCE = 400, 1.05
LRS = (0.001, 0.004, 0.016, 0.064, 0.256)


def sweep(ends, *, start=1.1, sd=0.05, rate=10.0, total=TOTAL, facts=None, **config):
    """Runs from `start` to one end an lr, with the noise of minibatches, the same batches at every lr."""
    trials = []
    for lr, end in zip(LRS, ends, strict=False):
        own = np.random.default_rng(int(1e6 * lr)).standard_normal(total)
        noise = sd * (0.9 * np.random.default_rng(0).standard_normal(total) + 0.4 * own)
        trials.append(
            trial(
                end + (start - end) * np.exp(-np.arange(total) / rate) + noise,
                lr,
                columns={"loss_se": np.full(total, sd)},
            )
        )
    known = {"chance_loss": CHANCE, "initial_critical_lr": 0.1} if facts is None else facts
    return record(trials, total_steps=total, full_batch=False, facts=known, **config)


def found(*args, **kwargs):
    return diagnose_lr_sweep(sweep(*args, **kwargs))["lr.nothing_learns"]


@pytest.mark.parametrize("start", [1.05, 1.1, 5.0])
def test_where_every_lr_ends_at_chance_or_above_nothing_is_learned(start):
    finding = found([1.06, 1.05, 1.05, 1.051, 1.3], start=start)
    assert finding.status == "fail"
    assert finding.advice
    assert finding.evidence["chance"] == CHANCE
    assert finding.evidence["end_loss"] == pytest.approx(1.05, abs=0.03)
    assert finding.evidence["loss_ref"] == pytest.approx(start, abs=0.1)


@pytest.mark.parametrize("ends", [[1.06, 1.05, 0.98, 1.051, 1.3], [1.05, 1.05, 1.05, 0.3, 9.0]])
def test_one_lr_that_comes_below_chance_is_enough(ends):
    assert found(ends).status == "ok"
    assert found(ends, start=5.0).status == "ok"


def test_a_loss_that_still_falls_towards_chance_had_too_few_steps():
    finding = found([4.9, 4.5, 3.5, 1.5, 1.2], start=5.0, rate=300.0)
    assert (finding.status, "too few" in finding.summary) == ("not_measured", True)


@pytest.mark.parametrize(("rate", "status"), [(200.0, "not_measured"), (100.0, "fail")])
def test_a_loss_that_has_come_nine_tenths_of_the_way_to_chance_has_arrived(rate, status):
    """At the end 20 % and 7 % of the way are left, and it is still falling in both."""
    finding = found([4.9, 4.5, 3.5, 1.5, 1.2], start=5.0, rate=rate, sd=0.01)
    assert (finding.status, "too few" in finding.summary) == (status, status == "not_measured")


@pytest.mark.parametrize(("sd", "status"), [(1.5, "not_measured"), (0.5, "fail")])
def test_a_noise_of_a_twentieth_of_chance_is_too_much(sd, status):
    """The second half is known to 10 % and to 3 % of chance."""
    finding = found([1.05] * 5, sd=sd)
    assert (finding.status, "too noisy" in finding.summary) == (status, status == "not_measured")
    assert finding.evidence["second_half_se"] / CHANCE == pytest.approx(sd / 15, rel=0.3)


def test_noise_as_large_as_chance_and_small_lrs_alone_tell_nothing():
    assert found([1.05] * 5, sd=1.5, total=60).status == "not_measured"
    small = found([1.09, 1.08], start=1.1, facts={"chance_loss": CHANCE, "initial_critical_lr": 10.0})
    assert (small.status, "only small" in small.summary) == ("not_measured", True)


def test_without_chance_or_where_the_model_begins_below_it_nothing_is_said():
    assert found([1.1] * 5, facts={}).status == "not_measured"
    assert found([0.5] * 5, start=0.5).status == "not_measured", "a model that was trained before"


def test_full_batches_at_chance_to_rounding():
    steps = np.arange(TOTAL)
    trials = [trial(CHANCE + 0.3 * np.exp(-steps * lr) - 1e-8, lr) for lr in LRS]
    facts = {"chance_loss": CHANCE, "initial_critical_lr": 0.1}
    assert diagnose_lr_sweep(record(trials, total_steps=TOTAL, facts=facts))["lr.nothing_learns"].status == "fail"


@pytest.mark.parametrize("trials", [[], [trial(np.full(TOTAL, 2.0), 0.1)], [trial([2.0, np.nan], lr) for lr in LRS]])
def test_nothing_trained_one_lr_and_nothing_finite(trials):
    got = diagnose_lr_sweep(record(trials, total_steps=TOTAL, facts={"chance_loss": CHANCE}))["lr.nothing_learns"]
    assert got.status == "not_measured"


def test_runs_that_end_at_the_frequencies_are_not_stable():
    """Adam far above its lr* comes down from log(V) to the entropy of single tokens, and no further."""
    ends = [2.2, 1.9, 2.91, 2.97, 2.98]
    diagnosis = diagnose_lr_sweep(sweep(ends, start=4.2, facts={"chance_loss": 2.97}))
    assert 0.004 < diagnosis["lr.unstable"].value < 0.016
    blind = diagnose_lr_sweep(sweep(ends, start=4.2, facts={}))
    assert blind["lr.unstable"].value is None, "what the level is for"


def test_a_low_loss_that_noise_can_explain_is_not_said_to_be_none():
    """The lowest end lies far below chance, with an error of the same size."""
    given = diagnose_lr_sweep(sweep([1.05, 1.05, 0.75, 1.05, 1.05], sd=1.5, total=60))["lr.best"]
    assert given.status == "not_measured"
    lowest = min(point["loss"] for point in given.evidence["points"])
    assert lowest < CHANCE - 0.1, "for this test to mean anything"
    assert f"the lowest loss, {lowest:.4g} at lr" in given.summary
    assert "lies below that of the best constant output, 1.05, but no further than its noise" in given.summary
    flat = diagnose_lr_sweep(sweep([1.2] * 5, sd=0.01))["lr.best"]
    assert "no learning rate brought the loss below that of the best constant output" in flat.summary
