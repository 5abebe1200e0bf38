"""Interval, batch size and proxy: planted faults are found, their healthy twins are not, poor input is not measured (P2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.helpers.evaluations import evaluated
from tests.helpers.records import empty, study
from tests.helpers.simulated_records import evaluations
from workbench.topics.evaluation.diagnose import diagnose_evaluation
from workbench.topics.evaluation.proxy import rank_correlation

CODES = [
    "evaluation.interval",
    "evaluation.batch_size",
    "evaluation.weighting",
    "evaluation.coverage",
    "evaluation.bad_proxy",
]
FALLING = np.geomspace(2.0, 0.1, 21)


@pytest.mark.parametrize("record", [study(), empty(), evaluated(FALLING)])
def test_each_code_is_there_once_with_its_clause(record: Any) -> None:
    findings = diagnose_evaluation(record).findings
    assert [f.code for f in findings] == CODES
    assert all(f.clause.startswith("P2.") and f.summary for f in findings)


def test_an_empty_study_is_not_measured() -> None:
    found = diagnose_evaluation(empty())
    assert [f.status for f in found] == ["not_measured", "ok", *["not_measured"] * 3]


# interval


def test_a_usual_run_is_evaluated_often_enough() -> None:
    found = diagnose_evaluation(evaluated(FALLING))["evaluation.interval"]
    assert (found.status, found.value) == ("ok", 20)
    assert "every 10 steps" in found.summary


def test_too_few_evaluations_leave_nothing_to_choose_from() -> None:
    found = diagnose_evaluation(evaluated([2.0, 1.0, 0.5]))["evaluation.interval"]
    assert (found.status, found.value, found.threshold) == ("warn", 2, 5)
    assert diagnose_evaluation(evaluated([2.0, 1.0, 0.5]), min_evaluations=2)["evaluation.interval"].status == "ok"


def timed(steps: list[int]) -> Any:
    record = evaluated(FALLING)
    record.evals = pd.DataFrame(evaluations(0, steps, np.ones(len(steps)), split="validation"))
    return record


def test_evaluations_by_seconds_are_told_by_their_uneven_steps() -> None:
    found = diagnose_evaluation(timed([0, 31, 62, 80, 111, 142, 200]))["evaluation.interval"]
    assert found.status == "warn"
    assert "18 to 31 steps apart" in found.summary
    assert (
        diagnose_evaluation(timed([0, 31, 62, 93, 124, 155, 186, 200]))["evaluation.interval"].status == "ok"
    )  # the last one


@pytest.mark.parametrize(("seconds", "status"), [(0.2, "ok"), (6.0, "warn")])
def test_time_is_worth_a_word_where_it_is_much(seconds: float, status: str) -> None:
    record = evaluated(FALLING)
    record.trials["seconds"] = 10.0
    record.evals["seconds"] = seconds / len(FALLING)
    found = diagnose_evaluation(record)["evaluation.interval"]
    assert found.status == status
    assert found.evidence.get("time_frac", 0.6) == pytest.approx(0.6)
    assert ("time_frac" in found.evidence) == (status == "warn"), "two honest runs must say the same"


# batch size


@pytest.mark.parametrize(("eval_batch", "status", "value"), [(None, "ok", 256), (64, "ok", 64), (32, "warn", 32)])
def test_a_smaller_evaluation_batch_is_warned_about(eval_batch: int | None, status: str, value: int) -> None:
    record = evaluated(FALLING)
    record.config |= {"eval_batch_size": eval_batch}
    found = diagnose_evaluation(record)["evaluation.batch_size"]
    assert (found.status, found.value, found.threshold) == (status, value, 64)


def test_memory_is_named_where_it_was_measured() -> None:
    record = evaluated(FALLING)
    record.facts["memory"] = {"training_bytes_per_example": 4096.0, "evaluation_bytes_per_example": 1024.0}
    assert (
        "4,096 bytes in training and 1,024 in evaluation"
        in diagnose_evaluation(record)["evaluation.batch_size"].summary
    )


# proxy


def noisy(correlation: float, count: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    one = rng.standard_normal(count)
    return one, correlation * one + math.sqrt(1 - correlation**2) * rng.standard_normal(count)


def proxy(record: Any, **options: Any) -> Any:
    return diagnose_evaluation(record, **options)["evaluation.bad_proxy"]


def wobbling(shared: float, seed: int = 0, sd: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Two falling curves whose noise is the same up to a share."""
    a, b = noisy(shared, len(FALLING), seed)
    return FALLING * np.exp(sd * a), 1.3 * FALLING * np.exp(sd * b)


def test_a_good_proxy_is_left_alone() -> None:
    one, other = wobbling(0.98)
    found = proxy(evaluated(one, other, subset="random-8"))
    assert (found.status, found.value) == ("ok", pytest.approx(stats.spearmanr(one, other).statistic))
    assert found.evidence["regret"] == 0
    assert "beside the trend" in found.summary


def test_a_trend_alone_makes_no_proxy_good() -> None:
    """Both fall, and what each does beside that is its own: a correlation of 0.97 that says nothing of the proxy."""
    found = proxy(evaluated(*wobbling(0.0), subset="random-8"))
    assert found.value > 0.95
    assert found.status == "not_measured"
    assert "any two curves that fall have" in found.summary
    assert "levels off" in found.advice[0]


def test_two_curves_without_any_noise_tell_no_more_than_their_trend() -> None:
    found = proxy(evaluated(FALLING, FALLING * 1.3 + 0.01))
    assert (found.value, found.status) == (pytest.approx(1.0), "not_measured")
    assert "nothing is left of it" in found.summary


@pytest.mark.parametrize("correlation", [-0.8, 0.0, 0.4])
def test_a_bad_proxy_is_flagged_with_what_it_costs(correlation: float) -> None:
    one, other = noisy(correlation)
    found = proxy(evaluated(one, other))
    assert found.status == "warn"
    assert found.value == pytest.approx(stats.spearmanr(one, other).statistic)
    assert found.evidence["regret"] == pytest.approx(other[one.argmin()] - other.min())
    assert found.evidence["low"] < found.value < found.evidence["high"] < found.threshold


def test_noise_on_a_plateau_does_not_make_a_proxy_bad() -> None:
    rng = np.random.default_rng(4)
    curve = np.r_[np.geomspace(2.0, 0.3, 6), np.full(60, 0.3)]
    one, other = (curve * (1 + 0.01 * rng.standard_normal(66)) for _ in range(2))
    found = proxy(evaluated(one, other))
    assert found.evidence["high"] < 0.8
    assert found.status == "ok"
    assert "differ by less than" in found.summary
    assert proxy(evaluated(one[::-1], other)).status == "warn"


def test_a_metric_to_be_maximised_is_chosen_at_its_largest() -> None:
    one, other = noisy(0.0)
    found = proxy(evaluated(one, other, select_mode="max"))
    assert found.evidence["regret"] == pytest.approx(other.max() - other[one.argmax()])


def test_too_few_checkpoints_are_not_measured() -> None:
    found = proxy(evaluated(FALLING[:7], FALLING[:7]))
    assert found.status == "not_measured"
    assert "7 checkpoints" in found.summary
    assert found.advice


def test_what_nine_checkpoints_cannot_tell_is_not_measured() -> None:
    one = np.arange(9.0)
    other = one[[1, 0, 3, 2, 7, 4, 5, 6, 8]]
    found = proxy(evaluated(one, other), min_correlation=0.95)
    assert found.value < 0.95 < found.evidence["high"]
    assert found.status == "not_measured"


@pytest.mark.parametrize("bad", [np.full(12, np.nan), np.full(12, 0.5), np.r_[np.nan, np.inf, np.full(10, 1.0)]])
def test_constant_or_nan_values_are_not_measured(bad: np.ndarray) -> None:
    for record in (evaluated(bad, FALLING[:12]), evaluated(FALLING[:12], bad)):
        assert proxy(record).status == "not_measured"


def test_without_a_proxy_there_is_none_to_be_bad_and_with_one_nobody_knows() -> None:
    assert proxy(evaluated(FALLING)).status == "ok"
    found = proxy(evaluated(FALLING, subset="random-8-seed0"))
    assert found.status == "not_measured"
    assert "evaluate_offline" in found.advice[0]


def test_the_interval_is_the_published_one_and_covers() -> None:
    """Bonett and Wright (2000): z +- 1.96 sqrt((1 + r^2/2)/(n - 3)); 95 % of 400 draws from a known correlation."""
    found = rank_correlation(*noisy(0.7, 50))
    z, half = math.atanh(found.value), 1.959964 * math.sqrt((1 + found.value**2 / 2) / 47)
    assert (found.low, found.high) == (
        pytest.approx(math.tanh(z - half), rel=1e-5),
        pytest.approx(math.tanh(z + half), rel=1e-5),
    )
    truth = 6 / math.pi * math.asin(0.7 / 2)  # Spearman's of a bivariate normal
    inside = [(r := rank_correlation(*noisy(0.7, 50, seed))).low <= truth <= r.high for seed in range(400)]
    assert 0.92 <= np.mean(inside) <= 0.98
