"""`lr.too_high` and `lr.too_low`: the person's lr against what the sweep trained, by validation first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.findings.diagnosis import Finding
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.own_lr import settled_by_proof
from workbench.topics.recommendation.diagnose import recommend

TOTAL, AT = 200, range(0, 201, 20)
BLOWN = np.r_[2.3, 50.0, np.inf]


def decay(level, rate=20.0, start=2.3):
    return level + (start - level) * np.exp(-np.arange(TOTAL + 1) / rate)


def sweep(levels, *, baseline, blown=(12.8,), validation=None, wobble=0.0, chance=None, mode="min"):
    """Full batches; `validation` gives the level of the selected metric at an lr, None leaves evaluations out.

    `wobble` is the standard deviation of the evaluations, at every lr or at some.
    """
    wobble = wobble if isinstance(wobble, dict) else dict.fromkeys(levels, wobble)
    trials = [trial(decay(level)[:-1], lr) for lr, level in levels.items()]
    rows = []
    for number, (lr, level) in enumerate(levels.items() if validation is not None else ()):
        noise = wobble.get(lr, 0.0) * np.random.default_rng(number).standard_normal(len(AT))
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


def test_a_lucky_evaluation_of_another_lr_is_no_gain():
    """One evaluation of lr 0.4 is better by more than a tenth of what is learned, but not by twice its noise."""
    levels = {0.1: 0.9, 0.4: 0.6, 0.8: 0.65}
    found = diagnose_lr_sweep(sweep(levels, baseline=0.1, validation={0.4: 1.0, 0.8: 1.8}, wobble={0.4: 0.3}))
    seen = found["lr.too_low"].evidence
    assert (seen["better_lr"], found["lr.too_low"].status) == (0.4, "ok")
    assert 0 < seen["own"] - seen["better"] <= 2 * seen["noise"], "within its noise, for this test to mean anything"
    assert min(seen["share"], seen["lost_frac"]) > 0.1


def test_the_noise_of_an_lr_counts_against_it_in_the_choice():
    levels = {0.1: 1.5, 0.4: 0.6, 0.8: 0.6}
    given = sweep(levels, baseline=0.1, validation={0.8: 0.55}, wobble={0.8: 0.2})
    values = given.evals[given.evals["trial"] == 2]["value"]
    assert values.min() < 0.5, "the lowest of all, for this test to mean anything"
    found = diagnose_lr_sweep(given)["lr.too_low"]
    assert (found.status, found.evidence["better_lr"]) == ("fail", 0.4)


def test_a_better_metric_at_the_same_training_loss_does_not_make_an_lr_too_low():
    """What validation gains where training gains nothing is no want of steps: another kind of fault."""
    levels, better = {0.1: 0.43, 0.4: 0.4, 0.8: 0.6}, {0.1: 1.0, 0.4: 0.5, 0.8: 1.0}
    found = diagnose_lr_sweep(sweep(levels, baseline=0.1, validation=better))["lr.too_low"]
    assert (found.status, found.value) == ("ok", pytest.approx(4.0))
    assert found.evidence["share"] > 0.1
    found = diagnose_lr_sweep(sweep(levels | {0.1: 0.9}, baseline=0.1, validation=better))["lr.too_low"]
    assert found.status == "warn"


def test_what_is_learned_counts_from_chance():
    """From 180 down to 2.4 takes no learning: what is left below 2.3 decides."""
    trials = [trial(decay(end, start=180.0, rate=4.0)[:-1], lr) for lr, end in {0.001: 2.2, 0.1: 0.2, 0.2: 0.3}.items()]
    found = record(trials, total_steps=TOTAL, peak_lr=0.001, facts={"chance_loss": 2.3})
    assert diagnose_lr_sweep(found)["lr.too_low"].status == "fail"
    assert diagnose_lr_sweep(record(trials, total_steps=TOTAL, peak_lr=0.001))["lr.too_low"].status == "ok"


def test_the_lr_to_use_keeps_a_margin_to_the_edge():
    found = diagnose_lr_sweep(sweep({0.1: 0.5, 0.4: 0.42, 0.7: 0.4}, baseline=0.9, blown=(0.8, 0.9)))["lr.too_high"]
    assert (found.status, found.value) == ("fail", 0.4)


@pytest.mark.parametrize(
    ("baseline", "code", "blown"), [(0.1, "lr.too_low", (0.8, 1.8)), (1.8, "lr.too_high", (0.8, 1.8))]
)
def test_the_best_lr_is_not_named_where_it_lies_at_the_edge(baseline, code, blown):
    """0.7 is the best by training and by validation, and 0.8 is unstable."""
    for validation in (None, {}):
        given = sweep({0.1: 1.5, 0.4: 0.42, 0.7: 0.3}, baseline=baseline, blown=blown, validation=validation)
        found = diagnose_lr_sweep(given)[code]
        assert (found.status, found.evidence["better_lr"]) == ("fail", 0.4)


def test_an_lr_other_than_lr_star_is_named_with_its_reason():
    """0.8 is the best by training loss; by validation it is 0.4, or 1.6 beyond lr*."""
    levels = {0.01: 2.2, 0.4: 0.6, 0.8: 0.4, 1.6: 0.6}
    for named, words in ((0.4, True), (0.8, False), (1.6, True)):
        found = diagnose_lr_sweep(sweep(levels, baseline=0.01, validation={named: 0.3}))["lr.too_low"]
        assert (found.status, found.evidence["better_lr"], found.evidence["lr_star"]) == ("fail", named, 0.8)
        assert f": use {named}" in found.summary
        assert ("the best by validation/loss that keeps away from the edge" in found.summary) is words


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


def proved(levels, *, baseline, named, fresh, accuracies=(0.9, 0.9), faults=(), validation=None):
    """A sweep, and a proof under three more seeds: (baseline, candidate) levels of `fresh`, accuracies of the two everywhere."""
    trials, rows = [], []

    def add(lr, level, seed, stage):
        curve = BLOWN if level is None else decay(level)
        seen = decay((validation or {}).get(lr, 2.3 if level is None else level))
        right = accuracies[lr == named] * (1 - np.exp(-np.array(AT) / 20.0))
        rows.extend(evaluations(len(trials), AT, seen[AT], split="validation"))
        rows.extend(evaluations(len(trials), AT, right, split="validation", metric="accuracy"))
        trials.append(trial(curve[:TOTAL], lr, seed=seed, stage=stage))

    for lr, level in levels.items():
        add(lr, level, 0, "baseline" if lr == baseline else "lr_sweep")
    for seed, (ours, theirs) in enumerate(fresh, start=1):
        add(baseline, ours, seed, "baseline")
        add(named, theirs, seed, "proof")
    given = record(trials, evals=rows, total_steps=TOTAL, peak_lr=baseline)
    found = diagnose_lr_sweep(given)
    found = replace(found, findings=(*found.findings, *faults))
    recommendation = recommend(given, found)
    return found, recommendation, settled_by_proof(given, found, recommendation)


LOW = {0.1: 1.5, 0.2: 1.2, 0.4: 0.5, 0.8: 0.6}
HIGH = {0.1: 0.6, 0.2: 0.5, 0.4: 1.2, 0.8: 1.5}
WINS = [(1.5, 0.5), (1.51, 0.5), (1.52, 0.5)]
LOSES = [(1.5, 1.8), (1.5, 1.3), (1.5, 1.6)]


@pytest.mark.parametrize(("levels", "baseline", "named", "code"), [
    (LOW, 0.1, 0.4, "lr.too_low"), (HIGH, 0.8, 0.2, "lr.too_high"),
])  # fmt: skip
@pytest.mark.parametrize(("fresh", "accuracies", "why"), [
    (WINS, (0.9, 0.9), ""), (LOSES, (0.9, 0.9), "p = 0.6"), (WINS, (0.9, 0.8), "validation/accuracy is worse: 0.8 against 0.9"),
])  # fmt: skip
def test_an_alarm_is_settled_where_the_lr_it_names_is_not_adopted(
    levels, baseline, named, code, fresh, accuracies, why
):
    """A failure too: one list never holds "use 0.4" beside "Not adopted"."""
    found, recommendation, after = proved(levels, baseline=baseline, named=named, fresh=fresh, accuracies=accuracies)
    assert (found[code].status, found[code].evidence["better_lr"]) == ("fail", named)
    assert recommendation["adopted"] is not bool(why)
    if not why:
        assert after == found
        return
    assert (after[code].status, after[code].advice) == ("ok", ())
    assert why in recommendation["reason"]
    assert f"lr {named:.4g} looks better under one seed" in after[code].summary
    assert f"but is not adopted: {why}" in after[code].summary
    assert "use" not in after[code].summary
    assert settled_by_proof(None, found, {"adopted": True}) == found


def test_what_diverges_stays_too_high_whatever_becomes_of_the_smaller_lr():
    found, recommendation, after = proved(
        {0.1: 1.5, 0.2: 0.5, 0.8: None}, baseline=0.8, named=0.2, fresh=[(None, 0.5)] * 3, accuracies=(0.9, 0.8),
        validation={0.8: 2.0},
    )  # fmt: skip
    assert (found["lr.too_high"].status, found["lr.too_high"].evidence["own_unstable"]) == ("fail", True)
    assert recommendation["refuted"]
    assert after == found


def test_a_reason_that_is_not_about_the_lr_settles_nothing():
    fault = Finding(code="data.labels", status="fail", summary="planted")
    found, recommendation, after = proved(LOW, baseline=0.1, named=0.4, fresh=LOSES, faults=(fault,))
    assert "mend data.labels first" in recommendation["reason"]
    assert after == found
    other = {"refuted": "planted", "recommended": {"trials": [1]}}  # the trial of lr 0.2, which nothing names
    given = record([trial(decay(level)[:-1], lr) for lr, level in LOW.items()], total_steps=TOTAL, peak_lr=0.1)
    found = diagnose_lr_sweep(given)
    assert settled_by_proof(given, found, other) == found
    other["recommended"] = {"trials": [2]}
    assert settled_by_proof(given, found, other)["lr.too_low"].status == "ok"
