"""Best against last: found on the test split and without one, silent where luck explains it, honest where nothing was measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.simulated_checkpoints import TOTAL, evaluated, overfitted
from tests.helpers.simulated_records import evaluations, record, trial
from workbench.findings.diagnosis import Finding
from workbench.record.json_values import dumps
from workbench.topics.checkpoints.diagnose import CODES, diagnose_checkpoints

NAN, INF = math.nan, math.inf


def best_not_last(*curves: Any, test: Any = None, **how: Any) -> Finding:
    return diagnose_checkpoints(evaluated(curves, test, **how))["checkpoints.best_not_last"]


def selection(*curves: Any, test: Any = None, **how: Any) -> Finding:
    return diagnose_checkpoints(evaluated(curves, test, **how))["checkpoints.selection"]


def noisy(level: float, *, seed: int, count: int = 41, sd: float = 0.02) -> np.ndarray:
    """Learned in the first evaluation, and noise around a level from there on."""
    return np.r_[2.3, level + sd * np.random.default_rng(seed).standard_normal(count - 1)]


def test_each_code_is_there_once_whatever_the_record() -> None:
    for r in (evaluated([overfitted()]), evaluated([]), evaluated([[NAN] * 5]), record([trial(np.ones(9), 0.1)])):
        assert [f.code for f in diagnose_checkpoints(r)] == list(CODES)


def test_overfitting_is_found_where_the_test_split_agrees() -> None:
    curves = [overfitted(seed=k) for k in range(5)]
    test = [overfitted(seed=100 + k, rise=0.3) for k in range(5)]
    found = best_not_last(*curves, test=test)
    assert (found.status, found.clause) == ("warn", "P4.3")
    gains = [t[-1] - t[int(np.argmin(c))] for c, t in zip(curves, test, strict=True)]
    assert found.value == pytest.approx(np.mean(gains))
    assert found.evidence["se"] == pytest.approx(np.std(gains, ddof=1) / math.sqrt(5))
    assert found.threshold == pytest.approx(2.131847 * found.evidence["se"], rel=1e-5), (
        "Student's t with 4 degrees of freedom"
    )
    for row, c in zip(found.evidence["runs"], curves, strict=True):
        assert row["best_step"] == int(np.argmin(c)) * TOTAL // 40
        assert row["best_frac"] == row["best_step"] / TOTAL
        assert row["gain"] == pytest.approx(c[-1] - c.min())
    assert "5 of 5 runs" in found.summary
    assert "record.best().checkpoint" in found.advice[0]


def test_a_gain_that_is_not_there_on_the_test_split_is_no_gain() -> None:
    """The curves rise where they are chosen; the test split has its own noise and no rise."""
    curves = [overfitted(seed=k, rise=0.2) for k in range(5)]
    found = best_not_last(*curves, test=[noisy(0.6, seed=50 + k) for k in range(5)])
    assert found.status == "ok"
    assert "does not carry over" in found.summary
    assert "not beyond chance" in found.summary
    assert found.evidence["selected_gain"] > 0.15


def test_selection_noise_is_not_called_a_gain() -> None:
    """A plateau: validation picks its luckiest moment, and on the test split nothing is left of it. 40 studies of 5 seeds."""
    alarms = 0
    for study in range(40):
        curves, test = ([noisy(0.5, seed=1000 * study + 10 * k + s) for k in range(5)] for s in (0, 1))
        found = best_not_last(*curves, test=test)
        alarms += found.status == "warn"
        assert found.evidence["selected_gain"] > 0
    assert alarms <= 5, "5 % of 40 are 2; more than 5 come in one of 70 such tests"


@pytest.mark.parametrize("seeds", [1, 4])
def test_without_a_test_split_luck_is_subtracted(seeds: int) -> None:
    alarms = sum(
        best_not_last(*[noisy(0.5, seed=100 * n + k) for k in range(seeds)]).status == "warn" for n in range(40)
    )
    assert alarms <= 2
    found = best_not_last(*[overfitted(seed=k) for k in range(seeds)])
    assert found.status == "warn"
    assert "how much of that holds on new data was not measured" in found.summary
    judge = found.evidence
    assert found.threshold == pytest.approx(judge["luck"] + max(4 * judge["noise"], judge["spread"]))


def test_one_run_that_ends_on_a_bad_evaluation_is_no_gain_that_the_seeds_share() -> None:
    plateaus = [noisy(0.5, seed=k) for k in range(4)]
    plateaus[2][-1] += 0.6
    assert best_not_last(*plateaus).status == "ok"
    for curve in plateaus:
        curve[-1] = 1.1
    assert best_not_last(*plateaus).status == "warn"


def test_a_run_that_ends_at_its_best_is_silent() -> None:
    at = np.linspace(0, 1, 21)
    found = best_not_last(*[2.3 * np.exp(-3 * at - k) for k in range(3)])
    assert found.status == "ok"
    assert found.evidence["runs"][0]["best_frac"] == 1.0
    assert found.value == 0
    assert found.summary == "The last checkpoint is the best in each of 3 runs."


@pytest.mark.parametrize(("rise", "status"), [(0.002, "ok"), (0.09, "ok"), (0.11, "warn")])
@pytest.mark.parametrize("tested", [False, True])
def test_what_does_not_matter_is_ok_and_says_so(rise: float, status: str, tested: bool) -> None:
    """1.0 is learned in the first half, and no evaluation is noisy: a tenth of that is the least that matters."""
    at = np.linspace(0, 1, 41)
    curves = [2.0 - np.minimum(at / 0.5, 1) + rise * np.maximum(at / 0.5 - 1, 0) for _ in range(3)]
    found = best_not_last(*curves, test=curves if tested else None)
    assert (found.status, found.value) == (status, pytest.approx(rise))
    assert ("but too little to matter (0.1)" in found.summary) is (status == "ok")


def test_higher_may_be_better() -> None:
    curves = [1 - overfitted(seed=k) / 3 for k in range(3)]
    found = best_not_last(*curves, metric="accuracy", select="validation/accuracy", select_mode="max")
    assert found.status == "warn"
    assert found.evidence["runs"][0]["best"] == pytest.approx(curves[0].max())
    assert found.value is not None
    assert found.value > 0


def test_a_last_evaluation_that_is_nan() -> None:
    found = best_not_last([2.0, 1.0, 0.9, 0.8, 0.7, NAN])
    assert found.status == "warn"
    assert "not finite in 1 of 1 runs" in found.summary
    assert dumps(found.to_dict())


@pytest.mark.parametrize("values", [[1.0], [2.0, 1.0, 0.5], [NAN] * 8, [INF] * 8, []])
def test_too_short_or_never_finite_is_not_measured(values: list[float]) -> None:
    found = best_not_last(values)
    assert found.status == "not_measured"
    assert found.value is None


@pytest.mark.parametrize("state", ["diverged", "failed", "stopped", "running"])
def test_runs_that_did_not_end_are_not_judged(state: str) -> None:
    found = best_not_last(overfitted(), states=state)
    assert found.status == "not_measured"
    assert "no run has finished" in found.summary


def test_a_constant_metric_is_silent_here_and_named_by_selection() -> None:
    assert best_not_last([0.7] * 12).status == "ok"
    found = selection([0.7] * 12)
    assert found.status == "warn"
    assert "tells no checkpoint from another" in found.summary


def test_selection_by_noise_is_found_and_its_luck_is_the_expected_maximum() -> None:
    """Each evaluation draws 20 other examples: an accuracy that wobbles by 0.1 while the model gained 0.4."""
    curves = [np.r_[0.6, 0.2 + 0.1 * np.random.default_rng(k).standard_normal(40)] for k in range(4)]
    found = selection(*curves)
    assert found.status == "warn"
    assert found.clause == "P4.5"
    assert found.value is not None
    assert found.value > 0.1
    assert found.evidence["noise"] == pytest.approx(0.1, rel=0.25)
    assert found.evidence["luck"] == pytest.approx(2.16 * 0.1, rel=0.25), (
        "the best of 40 draws lies 2.16 deviations out"
    )


def test_the_healthy_twin_of_selection_by_noise() -> None:
    curves = [noisy(0.2, seed=k, sd=0.005) for k in range(4)]
    found = selection(*curves)
    assert found.status == "ok"
    assert found.value is not None
    assert found.value < 0.02


def test_how_much_of_the_lead_carries_over_is_told() -> None:
    shared = [0.05 * np.random.default_rng(k).standard_normal(40) for k in range(20)]
    curves = [np.r_[2.3, 0.5 + s] for s in shared]
    same = selection(*curves, test=[np.r_[2.3, 0.6 + s] for s in shared])
    assert same.evidence["carried_over"] == pytest.approx(1.0)
    other = selection(*curves, test=[noisy(0.6, seed=500 + k, sd=0.05) for k in range(20)])
    assert abs(other.evidence["carried_over"]) < 0.3
    assert selection(*curves).evidence["carried_over"] is None


def test_a_metric_that_is_nan_is_named() -> None:
    never = selection([NAN] * 8, [NAN] * 8)
    assert never.status == "fail"
    assert "never finite in 2 of 2 runs" in never.summary
    sometimes = selection([2.0, NAN, 1.0, 0.9, 0.8, 0.7])
    assert sometimes.status == "warn"
    assert "1 of 6 evaluations" in sometimes.summary


@pytest.mark.parametrize(("bad", "count"), [([0.1, 0.5, NAN, INF, 0.8, 0.8], 2), ([INF] * 6, 6)])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_another_metric_that_is_not_finite_is_named_with_its_first_step(
    bad: list[float], count: int, split: str
) -> None:
    r = evaluated([[2.0, 1.2, 1.0, 0.9, 0.8, 0.7]])
    steps = [0, 200, 400, 600, 800, 1000]
    r.evals = pd.concat([r.evals, pd.DataFrame(evaluations(0, steps, bad, split=split, metric="f1"))])
    found = diagnose_checkpoints(r)["checkpoints.selection"]
    first = steps[next(k for k, value in enumerate(bad) if not math.isfinite(value))]
    assert found.status == "warn"
    assert f"{split}/f1 was not finite in {count} of 6 evaluations, first at step {first}" in found.summary
    assert found.evidence["others_not_finite"][f"{split}/f1"]["not_finite"] == count
    assert "validation/loss moves by" in found.summary, "what is said of the selected metric stays"


def test_another_metric_that_is_finite_changes_nothing_and_a_diverged_run_is_not_blamed() -> None:
    curve = [2.0, 1.2, 1.0, 0.9, 0.8, 0.7]
    alone, r = selection(curve), evaluated([curve, [2.0, NAN]])
    r.trials.loc[1, "state"] = "diverged"
    steps = [0, 200, 400, 600, 800, 1000]
    rows = evaluations(0, steps, [0.1] * 6, metric="f1") + evaluations(1, [0, 1000], [0.1, NAN], metric="f1")
    r.evals = pd.concat([r.evals, pd.DataFrame(rows)])
    found = diagnose_checkpoints(r)["checkpoints.selection"]
    assert (found.status, found.summary) == (alone.status, alone.summary)


def test_a_metric_that_never_improves_selects_the_untrained_model() -> None:
    found = selection([0.1, 0.5, 0.2, 0.6, 0.3, 0.7, 0.4])
    assert found.status == "fail"
    assert found.summary.endswith("selects the untrained model in 1 run.")


def test_a_metric_that_does_not_improve_from_its_first_evaluation_on_flatters_by_what_it_moves() -> None:
    late = evaluated([[0.1, 0.5, 0.2, 0.6, 0.3, 0.7, 0.4]])
    late.evals["step"] += 100
    found = diagnose_checkpoints(late)["checkpoints.selection"]
    assert found.status == "warn"
    assert "and training learned nothing" in found.summary
    assert "inf" not in found.summary


def test_luck_beyond_what_was_learned_is_no_percentage() -> None:
    found = selection([1.0, 0.99, 1.3, 0.98, 1.4, 0.99, 1.2])
    assert found.status == "warn"
    assert "more than all that training learned" in found.summary
    assert "% of" not in found.summary


def test_a_metric_that_was_never_evaluated_is_named() -> None:
    found = selection([2.0, 1.0, 0.9, 0.8, 0.7], select="validation/f1")
    assert found.status == "fail"
    assert "validation/f1 was never evaluated" in found.summary
    assert "validation/loss" in found.summary


def test_ties_go_to_the_earliest() -> None:
    found = best_not_last([2.0, 1.0, 0.5, 0.5, 0.9, 1.4, 2.0])
    assert found.evidence["runs"][0]["best_step"] == 2 * TOTAL // 6


def test_a_metric_that_is_read_the_wrong_way_round_fails() -> None:
    """An accuracy that rises, of which the smallest is selected: the untrained model, in every run."""
    rising = [1 - overfitted(seed=k, rise=0.0) / 2.5 for k in range(3)]
    found = selection(*rising, metric="share", select="validation/share")
    assert found.status == "fail"
    assert found.summary == "validation/share, where smaller is better, selects the untrained model in all 3 runs."
    assert "select_mode='max'" in found.advice[0]
    assert selection(*rising, metric="share", select="validation/share", select_mode="max").status == "ok"
    worse = selection(*rising)
    assert worse.status == "fail"
    assert "targets of this split" in worse.advice[0]
    one_learned = selection(*rising[:2], overfitted(), metric="share", select="validation/share")
    assert one_learned.status != "fail"
