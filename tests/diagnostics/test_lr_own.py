"""`lr.too_high` and `lr.too_low`: the person's lr against what the sweep trained, by validation first."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.diagnostics.lr_own import settled_by_proof
from workbench.diagnostics.lr_sweep import diagnose_lr_sweep

TOTAL, AT = 200, range(0, 201, 20)
BLOWN = np.r_[2.3, 50.0, np.inf]


def decay(level, rate=20.0, start=2.3):
    return level + (start - level) * np.exp(-np.arange(TOTAL + 1) / rate)


def sweep(levels, *, baseline, blown=(12.8,), validation=None, wobble=0.0, chance=None, mode="min"):
    """Full batches; `validation` gives the level of the selected metric at an lr, None leaves evaluations out."""
    trials = [trial(decay(level)[:-1], lr) for lr, level in levels.items()]
    rows = []
    for number, (lr, level) in enumerate(levels.items() if validation is not None else ()):
        noise = wobble * np.random.default_rng(number).standard_normal(len(AT))
        rows += evaluations(number, AT, decay(validation.get(lr, level))[AT] + noise, split="validation")
    trials += [trial(BLOWN, lr) for lr in blown]
    facts = {} if chance is None else {"chance_loss": chance}
    return record(trials, evals=rows, total_steps=TOTAL, peak_lr=baseline, facts=facts, select_mode=mode)


BOWL = {0.01: 2.25, 0.1: 1.5, 0.4: 0.6, 0.79: 0.4, 1.6: 0.5, 3.2: 0.9, 6.4: 1.6}


@pytest.mark.parametrize("validation", [None, {}])
@pytest.mark.parametrize(("baseline", "low", "high"), [
    (0.01, "fail", "ok"), (0.1, "fail", "ok"), (0.4, "ok", "ok"), (0.79, "ok", "ok"), (1.6, "ok", "ok"),
    (3.2, "ok", "warn"), (6.4, "ok", "fail"), (12.8, "ok", "fail"),
])  # fmt: skip
def test_too_low_and_too_high_along_a_bowl(baseline, low, high, validation):
    found = diagnose_lr_sweep(sweep(BOWL, baseline=baseline, validation=validation))
    assert (found["lr.too_low"].status, found["lr.too_high"].status) == (low, high)
    assert found["lr.too_low"].value == pytest.approx(0.79 / baseline)
    said = [line for code in ("lr.too_low", "lr.too_high") for line in found[code].advice]
    wanted = {"fail": 1, "warn": 1}.get(max(low, high, key=["ok", "warn", "fail"].index), 0)
    assert len(said) == wanted
    if high != "ok":
        assert (found["lr.too_high"].value, said) == (0.79, ["Lower peak_lr to 0.79."])
    elif wanted:
        assert said == ["Raise peak_lr to 0.79."]


def test_what_validation_does_not_gain_is_no_alarm_and_what_it_loses_is():
    """The training loss still falls with a larger lr; the selected checkpoints are as good, or are not."""
    levels = {0.1: 0.5, 0.4: 0.1, 0.8: 0.05}
    same = sweep(levels, baseline=0.1, validation={0.1: 0.6, 0.4: 0.58, 0.8: 0.62})
    assert diagnose_lr_sweep(same)["lr.too_low"].status == "ok"
    assert diagnose_lr_sweep(sweep(levels, baseline=0.1))["lr.too_low"].status == "warn", (
        "what training alone would say"
    )
    worse = {0.1: 0.6, 0.4: 0.58, 0.8: 1.5}
    found = diagnose_lr_sweep(sweep(levels, baseline=0.8, validation=worse))
    assert found["lr.too_high"].status == "ok"
    assert "overfits earlier" in found["lr.too_high"].summary, "it fits the training data better than lr 0.4"
    found = diagnose_lr_sweep(sweep(levels | {0.8: 0.11}, baseline=0.8, validation=worse))
    assert (found["lr.too_high"].status, found["lr.too_high"].value) == ("fail", 0.4)
    assert found["lr.too_low"].status == "ok"


def test_a_gain_within_the_noise_of_the_evaluations_is_none():
    levels = {0.1: 0.9, 0.4: 0.6, 0.8: 0.62}
    quiet = sweep(levels, baseline=0.1, validation={})
    assert diagnose_lr_sweep(quiet)["lr.too_low"].status == "warn"
    noisy = sweep(levels, baseline=0.1, validation={}, wobble=0.5)
    assert diagnose_lr_sweep(noisy)["lr.too_low"].status == "ok"


def test_what_is_learned_counts_from_chance():
    """From 180 down to 2.4 takes no learning: what is left below 2.3 decides."""
    trials = [trial(decay(end, start=180.0, rate=4.0)[:-1], lr) for lr, end in {0.001: 2.2, 0.1: 0.2, 0.2: 0.3}.items()]
    found = record(trials, total_steps=TOTAL, peak_lr=0.001, facts={"chance_loss": 2.3})
    assert diagnose_lr_sweep(found)["lr.too_low"].status == "fail"
    assert diagnose_lr_sweep(record(trials, total_steps=TOTAL, peak_lr=0.001))["lr.too_low"].status == "ok"


def test_the_lr_to_use_keeps_a_margin_to_the_edge():
    found = diagnose_lr_sweep(sweep({0.1: 0.5, 0.4: 0.42, 0.7: 0.4}, baseline=0.9, blown=(0.8, 0.9)))["lr.too_high"]
    assert (found.status, found.value) == ("fail", 0.4)


def test_a_flat_bowl_a_baseline_that_was_not_trained_and_none_at_all():
    flat = {0.05: 1.4, 0.1: 0.4, 0.2: 0.4, 0.4: 0.3999, 0.8: 0.7}
    found = diagnose_lr_sweep(sweep(flat, baseline=0.1))
    assert (found["lr.too_low"].status, found["lr.too_high"].status) == ("ok", "ok")
    for baseline, low, high in ((1e-4, "warn", "ok"), (0.35, "ok", "ok"), (20.0, "ok", "warn")):
        found = diagnose_lr_sweep(sweep(flat, baseline=baseline))
        assert (found["lr.too_low"].status, found["lr.too_high"].status) == (low, high)
    bare = sweep(flat, baseline=0.1)
    bare.config = {}
    found = diagnose_lr_sweep(bare)
    assert (found["lr.too_low"].status, found["lr.too_high"].status) == ("not_measured", "not_measured")


def proved(lr, *, wins, given):
    (trial_number,) = given.trials["trial"][given.trials["peak_lr"] == lr]
    return {"proof": {"wins": wins, "seeds": [1, 2, 3]}, "recommended": {"trials": [trial_number]}}


@pytest.mark.parametrize(("wins", "lr", "status"), [(False, 0.4, "ok"), (True, 0.4, "warn"), (False, 0.8, "warn")])
def test_a_warning_that_fresh_seeds_do_not_bear_out_is_none(wins, lr, status):
    given = sweep({0.1: 0.9, 0.4: 0.6, 0.8: 0.62}, baseline=0.1, validation={})
    found = diagnose_lr_sweep(given)
    assert found["lr.too_low"].evidence["better_lr"] == 0.4
    settled = settled_by_proof(given, found, proved(lr, wins=wins, given=given))["lr.too_low"]
    assert (settled.status, bool(settled.advice)) == (status, status == "warn")
    assert settled_by_proof(given, found, {"proof": None}) == found


def test_a_failure_stays_whatever_the_proof_says():
    given = sweep(BOWL, baseline=0.1, validation={})
    found = diagnose_lr_sweep(given)
    named = found["lr.too_low"].evidence["better_lr"]
    assert settled_by_proof(given, found, proved(named, wins=False, given=given)) == found
