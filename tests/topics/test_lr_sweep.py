"""What a learning-rate sweep says: lr*, the edge, the person's own lr, and whether anything learns; and its figures."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.helpers import panels
from tests.helpers.simulated_records import evaluations, noisy_sweep, record, trial
from workbench.findings.answers import answers
from workbench.topics.lr_sweep.own_lr import settled_by_proof
from workbench.topics.recommendation.diagnose import recommend

TOTAL = 200
BLOWN = np.r_[2.3, 50.0, np.inf]


def run(level):
    return level + (2.3 - level) * np.exp(-np.arange(TOTAL) / 20)


def sweep(*extra, baseline=0.4, levels=None, blown=(12.8,)):
    levels = levels or {0.1: 1.5, 0.2: 1.0, 0.4: 0.6, 0.8: 0.4, 1.6: 0.5, 3.2: 0.9, 6.4: 1.4}
    trials = [trial(run(level), lr) for lr, level in levels.items()] + [trial(BLOWN, lr) for lr in blown]
    return record([*trials, *extra], total_steps=TOTAL, peak_lr=baseline, optimizer="momentum")


def statuses(diagnosis):
    return {f.code: f.status for f in diagnosis}


def test_an_interior_best_far_from_the_edge():
    diagnosis = wb.lr_sweep.diagnose(sweep())
    assert diagnosis["lr.best"].value == 0.8
    assert diagnosis["lr.unstable"].value == pytest.approx(np.sqrt(6.4 * 12.8))
    assert diagnosis["lr.unstable"].evidence["lower"] == 6.4
    assert statuses(diagnosis) == {
        "lr.best": "ok", "lr.grid_edge": "ok", "lr.unstable": "ok", "lr.too_high": "ok", "lr.too_low": "ok", "lr.at_edge": "ok",
        "lr.probabilistic": "ok", "lr.nothing_learns": "ok",
    }  # fmt: skip
    assert "one seed" in diagnosis["lr.probabilistic"].summary
    proved = [trial(curve, 0.8, seed=seed, stage="proof") for seed, curve in ((1, run(0.4)), (2, BLOWN))]
    found = wb.lr_sweep.diagnose(sweep(*proved))["lr.probabilistic"]
    assert found.summary.startswith("At lr 0.8 1 of 3 seeds are unstable"), "the seeds of a proof count too"
    assert "11.3 times 0.8" in diagnosis["lr.at_edge"].summary
    assert diagnosis["lr.grid_edge"].summary.startswith("The lowest loss, at lr 0.8, lies inside the lrs tried (")


@pytest.mark.parametrize(("levels", "word"), [
    ({0.1: 0.3, 0.2: 0.4, 0.4: 0.6}, "smaller"), ({0.1: 0.9, 0.2: 0.8, 0.4: 0.6}, "larger"),
])  # fmt: skip
def test_best_at_the_border_of_the_grid(levels, word):
    given = sweep(levels=levels, blown=())
    finding = wb.lr_sweep.diagnose(given)["lr.grid_edge"]
    assert finding.status == "warn"
    assert word in finding.advice[0]
    given.facts["initial_critical_lr"] = 1.0
    assert wb.lr_sweep.diagnose(given)["lr.grid_edge"].status == "ok", (
        "a sweep that finds its own range ends where it has to"
    )


def test_unstable_lr_never_found_is_not_measured_unless_it_was_looked_for_far_away():
    diagnosis = wb.lr_sweep.diagnose(sweep(blown=()))
    assert (diagnosis["lr.unstable"].status, diagnosis["lr.at_edge"].status) == ("not_measured", "ok"), "up to 8 lr*"
    near = wb.lr_sweep.diagnose(sweep(blown=(), levels={0.4: 0.6, 0.8: 0.4, 1.2: 0.5}))
    assert near["lr.at_edge"].status == "not_measured"
    far = wb.lr_sweep.diagnose(sweep(blown=(), levels={0.4: 0.6, 0.8: 0.4, 26.0: 0.9}))
    assert (far["lr.unstable"].status, far["lr.unstable"].value) == ("ok", None)


@pytest.mark.parametrize(("fix", "status", "harmful"), [(None, "warn", None), (0.2, "warn", True), (0.4, "ok", False)])
def test_best_at_the_edge_is_at_most_a_warning_and_a_fix_run_decides(fix, status, harmful):
    extra = [] if fix is None else [trial(run(fix), 2.1, stage="fix", max_grad_norm=1.0)]
    finding = wb.lr_sweep.diagnose(sweep(*extra, levels={0.2: 1.0, 0.4: 0.6, 0.8: 0.4}, blown=(1.2,)))["lr.at_edge"]
    assert (finding.status, finding.evidence["harmful"]) == (status, harmful)
    assert finding.evidence["at_edge"]
    assert "next to the unstable ones, which begin between 0.8 and 1.2" in finding.summary
    if status == "warn":
        words = ("warmup", "clip", "optimizer", "architecture", "last resort")
        assert all(word in line.lower() for word, line in zip(words, finding.advice, strict=True))


@pytest.mark.parametrize(("lr", "status"), [(1.5, "warn"), (6.4, "ok")])
def test_seeds_that_disagree(lr, status):
    extra = [trial(run(0.4), 0.8, seed=s) for s in (1, 2)]
    extra += [trial(BLOWN, lr, seed=1), trial(run(0.8), lr, seed=2), trial(run(0.8), lr, seed=0)]
    finding = wb.lr_sweep.diagnose(sweep(*extra, levels={0.4: 0.6, 0.8: 0.4, 1.2: 0.45}))["lr.probabilistic"]
    assert finding.status == status
    assert (finding.value, finding.evidence["disputed"][0]["lasting"]) == (lr, 1)
    agreed = wb.lr_sweep.diagnose(noisy_sweep({0.1: 0.9, 0.2: 0.5, 0.4: 0.6}))
    assert agreed["lr.probabilistic"].status == "ok"


OWN_TOTAL, AT = 200, range(0, 201, 20)


def decay(level, rate=20.0, start=2.3):
    return level + (start - level) * np.exp(-np.arange(OWN_TOTAL + 1) / rate)


def own_sweep(levels, *, baseline, blown=(12.8,), validation=None, wobble=0.0, chance=None, mode="min"):
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
    return record(trials, evals=rows, total_steps=OWN_TOTAL, peak_lr=baseline, facts=facts, select_mode=mode)


TRY = "Try peak_lr=0.79: one run speaks for it."
BOWL = {0.01: 2.25, 0.1: 1.5, 0.4: 0.6, 0.79: 0.4, 1.6: 0.5, 3.2: 0.9, 6.4: 1.6}


@pytest.mark.parametrize("validation", [None, {}])
@pytest.mark.parametrize(("baseline", "low", "high"), [
    (0.01, "fail", "ok"), (0.1, "fail", "ok"), (0.4, "ok", "ok"), (0.79, "ok", "ok"), (1.6, "ok", "ok"),
    (3.2, "ok", "warn"), (6.4, "ok", "fail"), (12.8, "ok", "fail"),
])  # fmt: skip
def test_too_low_and_too_high_along_a_bowl(baseline, low, high, validation):
    found = wb.lr_sweep.diagnose(own_sweep(BOWL, baseline=baseline, validation=validation))
    assert (found["lr.too_low"].status, found["lr.too_high"].status) == (low, high)
    assert found["lr.too_low"].value == pytest.approx(0.79 / baseline)
    said = [line for code in ("lr.too_low", "lr.too_high") for line in found[code].advice]
    wanted = {"fail": 1, "warn": 1}.get(max(low, high, key=["ok", "warn", "fail"].index), 0)
    assert len(said) == wanted
    if high != "ok":
        assert (found["lr.too_high"].value, said) == (0.79, [TRY])
    elif wanted:
        assert said == [TRY]


@pytest.mark.parametrize("apart", [False, True])
def test_lrs_alike_by_training_loss_are_told_apart_by_validation(apart):
    levels = {0.1: 0.5, 0.2: 0.5045, 0.4: 0.5}
    given = own_sweep(levels, baseline=0.2, validation={0.1: 0.5, 0.2: 0.52, 0.4: 1.1 if apart else 0.51})
    said = wb.lr_sweep.diagnose(given)["lr.best"].summary  # 0.0045 of 2.3 - 0.5
    assert said.startswith("By training loss, 0.1 to 0.4 train equally well (within 0.25 % of what training gains); yours (0.2) is one of them")  # fmt: skip
    assert ("0.4 is the worst of them, 1.1; 0.1 has 0.5001, yours 0.5201" in said) == apart
    assert ("worst" in said) == apart
    again = own_sweep(levels | {0.8: 0.7}, baseline=0.2, validation={0.1: 0.5, 0.2: 0.52, 0.4: 1.1 if apart else 0.51})
    again.trials = pd.concat([again.trials, again.trials[again.trials["peak_lr"] == 0.2].assign(trial=99, seed=1)])
    steps, evals = (frame[frame["trial"] == 1].assign(trial=99) for frame in (again.steps, again.evals))
    again.steps, again.evals = pd.concat([again.steps, steps]), pd.concat([again.evals, evals])
    said = wb.lr_sweep.diagnose(again)["lr.best"].summary
    assert ("0.1 has 0.5001 (one seed), yours 0.5201 (mean of 2 seeds)" in said) == apart


def test_what_validation_does_not_gain_is_no_alarm_and_what_it_loses_is():
    """The training loss still falls with a larger lr; the selected checkpoints are as good, or are not."""
    levels = {0.1: 0.5, 0.4: 0.1, 0.8: 0.05}
    same = own_sweep(levels, baseline=0.1, validation={0.1: 0.6, 0.4: 0.58, 0.8: 0.62})
    assert wb.lr_sweep.diagnose(same)["lr.too_low"].status == "ok"
    assert wb.lr_sweep.diagnose(own_sweep(levels, baseline=0.1))["lr.too_low"].status == "warn", (
        "what training alone would say"
    )
    worse = {0.1: 0.6, 0.4: 0.58, 0.8: 1.5}
    found = wb.lr_sweep.diagnose(own_sweep(levels, baseline=0.8, validation=worse))
    assert found["lr.too_high"].status == "ok"
    assert "overfits earlier" in found["lr.too_high"].summary, "it fits the training data better than lr 0.4"
    found = wb.lr_sweep.diagnose(own_sweep(levels | {0.8: 0.11}, baseline=0.8, validation=worse))
    assert (found["lr.too_high"].status, found["lr.too_high"].value) == ("fail", 0.4)
    assert found["lr.too_low"].status == "ok"


@pytest.mark.parametrize(("constant", "share", "status"), [(2.3, 0.1 / 1.8, "ok"), (None, 0.1 / 0.2, "warn")])
def test_what_a_script_has_learned_before_its_first_evaluation_counts(constant, share, status):
    """The first evaluation, 0.7, comes after half of the steps; a larger lr ends at 0.5 instead of 0.6."""
    trials = [trial(decay(end)[:-1], lr) for lr, end in {0.1: 0.6, 0.8: 0.3}.items()]
    rows = [
        *evaluations(0, (120, 200), (0.7, 0.6), split="validation"),
        *evaluations(1, (120, 200), (0.7, 0.5), split="validation"),
    ]
    one_pass = {"optimizers": {"0": {"windows": {"1 1 1 1": 200}}}}
    data = {"trained": {"constant": constant, "alone": True}}
    facts = {"chance_loss": None, "loop": {"data": data, "order": one_pass}}  # the trials of a script measure none
    given = record(trials, evals=rows, total_steps=OWN_TOTAL, peak_lr=0.1, facts=facts)
    found = wb.lr_sweep.diagnose(given)["lr.too_low"]
    assert (found.status, found.evidence["share"]) == (status, pytest.approx(share))


def test_a_lucky_evaluation_of_another_lr_is_no_gain():
    """One evaluation of lr 0.4 is better by more than a tenth of what is learned, but not by twice its noise."""
    levels = {0.1: 0.9, 0.4: 0.6, 0.8: 0.65}
    found = wb.lr_sweep.diagnose(own_sweep(levels, baseline=0.1, validation={0.4: 1.0, 0.8: 1.8}, wobble={0.4: 0.3}))
    seen = found["lr.too_low"].evidence
    assert (seen["better_lr"], found["lr.too_low"].status) == (0.4, "ok")
    assert 0 < seen["own"] - seen["better"] <= 2 * seen["noise"], "within its noise, for this test to mean anything"
    assert min(seen["share"], seen["lost_frac"]) > 0.1


@pytest.mark.parametrize(
    ("baseline", "code", "blown"), [(0.1, "lr.too_low", (0.8, 1.8)), (1.8, "lr.too_high", (0.8, 1.8))]
)
def test_the_best_lr_is_not_named_where_it_lies_at_the_edge(baseline, code, blown):
    """0.7 is the best by training and by validation, and 0.8 is unstable."""
    for validation in (None, {}):
        given = own_sweep({0.1: 1.5, 0.4: 0.42, 0.7: 0.3}, baseline=baseline, blown=blown, validation=validation)
        found = wb.lr_sweep.diagnose(given)[code]
        assert (found.status, found.evidence["better_lr"]) == ("fail", 0.4)
        if code == "lr.too_low":
            end = "try 0.4, not 0.7 (lowest training loss, but next to the unstable ones)."
            assert found.summary.endswith(end)


def test_why_a_learning_rate_of_better_results_is_not_named():
    """0.4 has the lowest of both losses, and its evaluations wobble; 0.7 lies next to the unstable 0.8; 0.3 is nothing special."""
    levels = {0.1: 0.33, 0.2: 0.32, 0.3: 0.35, 0.4: 0.3, 0.7: 0.31}
    given = own_sweep(levels, baseline=0.1, blown=(0.8, 1.8), validation={}, wobble={0.4: 0.1})
    said = wb.lr_sweep.diagnose(given)["lr.too_low"].summary
    assert "about as well as the larger 0.2: validation/loss 0.3301 against 0.3201" in said
    left = said.partition("; better in one run, but not chosen: ")[2]
    assert re.fullmatch(
        r"0\.4 \(validation/loss there varies by 0\.\d+ from evaluation to evaluation\), 0\.7 \(next to the unstable ones\)\.",
        left,
    )
    calm = own_sweep(levels, baseline=0.1, blown=(3.2,), validation={})
    assert "not chosen" not in wb.lr_sweep.diagnose(calm)["lr.too_low"].summary


def test_an_lr_whose_loss_explodes_and_comes_back_is_no_choice_and_is_not_called_stable():
    levels = {0.1: 0.42, 0.4: 0.4, 0.8: 0.41}
    given = own_sweep(levels | {1.6: 0.3}, baseline=0.1, validation={})
    calm = wb.lr_sweep.diagnose(given)["lr.too_low"]
    rises = given.steps["trial"].eq(3) & given.steps["step"].between(2, 12)
    given.steps.loc[rises, "loss"] = np.linspace(1300.0, 30.0, 11)
    found = wb.lr_sweep.diagnose(given)
    assert (calm.evidence["better_lr"], found["lr.too_low"].evidence["better_lr"]) == (1.6, 0.4)
    assert wb.stability.diagnose(given)["stability.headroom"].summary == (
        "From 16 times the baseline's lr on (1.6) the loss rises from 2.3 to 1,300 or more and recovers. Instability without recovery starts "
        "between 16 and 128 times the baseline's lr."
    )
    panel = wb.lr_sweep.panel(given, found, live=True)
    panel.controls["lr"].value = 1.6
    assert "lr 1.6: rises to 1,300 at step 2 and recovers" in panels.said(panel)
    panel.controls["lr"].value = 0.8
    assert "lr 0.8: stable" in panels.said(panel)


def test_what_one_run_speaks_for_is_to_be_tried_and_what_several_seeds_do_to_be_used():
    given = own_sweep({0.1: 1.5, 0.4: 0.5}, baseline=0.1, validation={})
    assert wb.lr_sweep.diagnose(given)["lr.too_low"].summary.endswith(": try 0.4.")
    again = given.trials[given.trials["trial"] == 1].assign(trial=99, seed=1, stage="proof")
    given.trials = pd.concat([given.trials, again])
    finding = wb.lr_sweep.diagnose(given)["lr.too_low"]
    assert (finding.summary.endswith(": use 0.4."), finding.advice) == (True, ["Raise peak_lr to 0.4."])


def test_what_few_runs_in_a_budget_say():
    """The sentences name how long runs were, which were tried, and between which two training turns unstable."""
    given = sweep(levels={0.05: 0.6}, blown=(3.2, 12.8), baseline=0.05)
    given.facts |= {"budget": "spent", "first_look": {"steps": TOTAL, "whole": 2000}}
    found = wb.lr_sweep.diagnose(given)
    assert found["lr.best"].summary == (
        "Best known is 0.05, yours: the only stable one of the 3 tried (0.05, 3.2, 12.8) in runs of 200 of 2,000 updates, after which the "
        "budget was spent."
    )
    between = "between 0.05 and 3.2"
    assert found["lr.unstable"].summary == (
        f"Unstable, without recovery, from somewhere {between} on; none between them was tried."
    )
    text = answers(found.findings, {})[0].text
    assert text.endswith("none between them was tried. None below 0.05 was compared.")
    tied = sweep(levels={0.05: 0.9, 0.1: 0.6, 0.2: 0.598}, blown=(), baseline=0.05)
    tied.facts |= {"budget": "spent"}
    assert (best := wb.lr_sweep.diagnose(tied)["lr.best"]).value == 0.1
    assert "Best known is 0.1: the safest of those that train as well as 0.2, which has the lowest" in best.summary
    short = [
        trial(curve[:50], lr, stage="lr_range", total_steps=50)
        for lr, curve in {0.05: run(0.9), 0.2: run(0.4), 0.8: BLOWN}.items()
    ]
    given = sweep(*short, levels={0.1: 0.6, 0.2: 0.4}, blown=(), baseline=0.1)
    found = wb.lr_sweep.diagnose(given)["lr.unstable"]
    assert found.summary.endswith("in runs of 50 steps it is stable at 0.2 and unstable at 0.8.")
    assert "no learning rate above 0.2 was tried at full length" in found.advice[0]


def proved(levels, *, baseline, named, fresh, accuracies=(0.9, 0.9), faults=(), validation=None):
    """A sweep, and a proof under three more seeds: (baseline, candidate) levels of `fresh`, accuracies of the two everywhere."""
    trials, rows = [], []

    def add(lr, level, seed, stage):
        curve = BLOWN if level is None else decay(level)
        seen = decay((validation or {}).get(lr, 2.3 if level is None else level))
        right = accuracies[lr == named] * (1 - np.exp(-np.array(AT) / 20.0))
        rows.extend(evaluations(len(trials), AT, seen[AT], split="validation"))
        rows.extend(evaluations(len(trials), AT, right, split="validation", metric="accuracy"))
        trials.append(trial(curve[:OWN_TOTAL], lr, seed=seed, stage=stage))

    for lr, level in levels.items():
        add(lr, level, 0, "baseline" if lr == baseline else "lr_sweep")
    for seed, (ours, theirs) in enumerate(fresh, start=1):
        add(baseline, ours, seed, "baseline")
        add(named, theirs, seed, "proof")
    given = record(trials, evals=rows, total_steps=OWN_TOTAL, peak_lr=baseline)
    found = wb.lr_sweep.diagnose(given)
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


def test_an_alarm_names_the_lr_that_is_adopted_where_one_seed_spoke_for_another():
    """0.2 is best by one seed's validation; the proof is of 0.4."""
    seen = {0.1: 1.5, 0.2: 0.4, 0.4: 0.5, 0.8: 0.6}
    found, *_ = proved(LOW, baseline=0.1, named=0.4, fresh=WINS, validation=seen)
    assert found["lr.too_low"].evidence["better_lr"] == 0.2
    _, recommendation, _ = proved(LOW, baseline=0.1, named=0.4, fresh=WINS)
    after = settled_by_proof(None, found, recommendation)["lr.too_low"]
    assert recommendation["adopted"]
    assert (after.status, after.evidence["better_lr"], after.advice) == ("warn", 0.4, ("Raise peak_lr to 0.4.",))
    assert "0.2" not in after.summary
