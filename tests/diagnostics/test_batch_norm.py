"""What batch norm's facts and a study's arms amount to; live models and processes are in the tests of `studies` and `hosts`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.simulated_norms import row, study
from tests.helpers.simulated_records import record
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.batch_norm.diagnose import CODES, NormArm, better_arms, diagnose_batch_norm


def judged(*args: Any, **facts: Any) -> Diagnosis:
    return diagnose_batch_norm(study(*args, **facts))


def test_each_code_is_given_once_and_a_healthy_model_is_ok() -> None:
    found = judged()
    assert [f.code for f in found] == list(CODES)
    assert {f.status for f in found} == {"ok"}
    assert all(f.clause and f.clause.startswith("P6.") for f in found)


@pytest.mark.parametrize("facts", [{}, {"batch_norm": None}])
def test_nobody_looked(facts: dict[str, Any]) -> None:
    found = diagnose_batch_norm(record([], facts=facts))
    assert [f.code for f in found] == list(CODES)
    assert {f.status for f in found} == {"not_measured"}


def test_without_batch_norm_it_does_not_apply() -> None:
    found = diagnose_batch_norm(record([], facts={"batch_norm": {"layers": 0}}))
    assert [f.code for f in found] == list(CODES)
    assert {f.status for f in found} == {"ok"}
    assert all("no batch norm" in f.summary for f in found)


@pytest.mark.parametrize(("examples", "status"), [(2, "warn"), (15, "warn"), (16, "ok"), (None, "not_measured")])
def test_few_statistic_examples(examples: int | None, status: str) -> None:
    assert judged(batch_norm={"examples": examples})["batch_norm.small_batch"].status == status


@pytest.mark.parametrize(
    ("examples", "independent", "status"), [(4, 15.9, "warn"), (4, 16.0, "ok"), (64, 3.0, "ok"), (4, None, "warn")]
)
def test_values_that_are_steady_stand_in_for_examples_and_not_the_other_way_round(
    examples: int, independent: float | None, status: str
) -> None:
    """Batches of a loader that is not shuffled differ more than their noise: enough examples are enough."""
    found = judged(batch_norm={"examples": examples, "independent": independent})["batch_norm.small_batch"]
    assert (found.status, found.value) == (status, examples)


def test_a_batch_that_batch_norm_refuses_is_worse_than_a_small_one() -> None:
    found = judged(batch_norm={"examples": 64, "refused": 1})["batch_norm.small_batch"]
    assert found.status == "fail"
    assert judged(batch_norm={"examples": None, "refused": 3})["batch_norm.small_batch"].status == "fail"


def test_layers_that_training_does_not_use_are_not_judged() -> None:
    found = judged(batch_norm={"unused": 2, "examples": None, "ema": [], "estimate": None})
    assert [f.code for f in found] == list(CODES)
    assert {f.status for f in found} == {"ok"}
    some = judged(batch_norm={"unused": 1, "examples": 2})
    assert some["batch_norm.small_batch"].status == "warn"


@pytest.mark.parametrize(("warm", "status"), [(0.95, "ok"), (0.8, "warn"), (0.4, "fail"), (math.nan, "not_measured")])
def test_cold_averages(warm: float, status: str) -> None:
    ema = [{"layer": "1", "momentum": 0.1, "batches": 10, "warm": warm}]
    assert judged(batch_norm={"ema": ema})["batch_norm.cold_ema"].status == status


def test_the_advice_for_a_cold_average_makes_it_warm() -> None:
    ema = [{"layer": "1", "momentum": 0.1, "batches": 10, "warm": 1 - 0.9**10}]
    finding = judged(batch_norm={"ema": ema})["batch_norm.cold_ema"]
    assert "at least 22 batches" in finding.advice[0]
    assert 1 - 0.9**22 >= 0.9 > 1 - 0.9**21


@pytest.mark.parametrize(
    ("shift", "noise", "status"),
    [
        (0.4, 0.01, "ok"),
        (0.6, 0.01, "warn"),
        (0.6, 0.3, "ok"),
        (math.nan, 0.1, "not_measured"),
        (None, None, "not_measured"),  # what JSON makes of it
    ],
)
def test_stale_statistics_are_those_that_noise_does_not_explain(shift: float, noise: float, status: str) -> None:
    layers = [{"layer": "1", "shift": 0.01, "noise": 0.01}, {"layer": "4", "shift": shift, "noise": noise}]
    estimate = {"batches": 20, "layers": layers, "loss": None}
    assert judged(batch_norm={"estimate": estimate})["batch_norm.stale"].status == status
    assert judged(batch_norm={"estimate": None})["batch_norm.stale"].status == "not_measured"


def losses(stored: float, anew: float) -> dict[str, float]:
    return {"start": 2.3, "stored": stored, "anew": anew}


@pytest.mark.parametrize(("stored", "status"), [(0.31, "ok"), (1.5, "warn"), (0.2, "ok"), (math.nan, "warn")])
def test_where_the_loss_is_known_it_decides(stored: float, status: str) -> None:
    """Statistics that differ and cost nothing are no alarm; what they cost is a share of what training learned."""
    ema = [{"layer": "1", "momentum": 0.01, "batches": 160, "warm": 0.8}]
    assert judged(batch_norm={"ema": ema, "loss": losses(stored, 0.3)})["batch_norm.cold_ema"].status == status
    far = {"batches": 20, "layers": [{"layer": "1", "shift": 0.9, "noise": 0.01}]}
    assert judged(batch_norm={"estimate": far, "loss": losses(stored, 0.3)})["batch_norm.stale"].status == status
    both = judged(batch_norm={"ema": ema, "estimate": far, "loss": losses(1.5, 0.3)})
    assert [both[f"batch_norm.{name}"].status for name in ("cold_ema", "stale")] == ["warn", "ok"], (
        "one cause is told once"
    )


def test_layers_frozen_as_they_were_made_normalise_nothing() -> None:
    for unused in (1, 2):
        found = judged(batch_norm={"unused": unused, "layers": 2, "frozen_new": ["b1"]})["batch_norm.cold_ema"]
        assert found.status == "warn"
        assert "b1" in found.summary
    assert judged(batch_norm={"unused": 2, "layers": 2, "frozen_new": []})["batch_norm.cold_ema"].status == "ok"


# The arms of a study.


def test_a_virtual_batch_that_is_better_beyond_chance_is_named() -> None:
    whole = [0.50, 0.52, 0.48, 0.51, 0.49]
    found = judged(
        {None: whole, 64: [v + 0.001 for v in whole], 16: [v - 0.1 for v in whole[::-1]], 8: [v + 0.1 for v in whole]}
    )
    ghost = found["batch_norm.ghost_size"]
    assert ghost.status == "warn"
    assert "bn_stat_examples=16" in ghost.advice[0]
    assert {row["statistic"] for row in ghost.evidence["arms"]} == {128, 64, 16, 8}


def test_the_chance_that_is_allowed_is_the_one_that_was_given() -> None:
    """Paired gains 3, 1, 2 and 2 hundredths: t = 4.9 with 3 degrees of freedom, 0.8 % by chance, 2.4 % with three arms."""
    whole = [0.5, 0.5, 0.5, 0.5]
    arms: dict[int | None, list[float]] = {None: whole, 16: [0.47, 0.49, 0.48, 0.48], 8: [0.6] * 4, 32: [0.6] * 4}
    chance = judged(arms)["batch_norm.ghost_size"].evidence["chance"][16]
    assert chance == pytest.approx(3 * stats.ttest_1samp([0.03, 0.01, 0.02, 0.02], 0, alternative="greater").pvalue)
    for alpha, status in ((chance * 1.01, "warn"), (chance * 0.99, "ok"), (0.05, "warn")):
        assert diagnose_batch_norm(study(arms), alpha=alpha)["batch_norm.ghost_size"].status == status


def test_larger_is_better_where_the_metric_says_so() -> None:
    whole = [0.90, 0.92, 0.88, 0.91]
    arms = {None: whole, 16: [v - 0.1 for v in whole[::-1]]}
    assert judged(arms, select_mode="max")["batch_norm.ghost_size"].status == "ok"
    assert judged(arms)["batch_norm.ghost_size"].status == "warn"


def test_chance_names_a_virtual_batch_as_seldom_as_asked_for() -> None:
    """Arms that are all alike, and seeds that lift all of them together, as shared seeds do."""
    rng, named, studies = np.random.default_rng(0), 0, 2000
    for _ in range(studies):
        seed = rng.normal(0.5, 0.05, 4)
        whole, *others = (
            NormArm(size, 128, 1, dict(enumerate(seed + rng.normal(0, 0.02, 4)))) for size in (None, 8, 16, 32, 64)
        )
        named += min(better_arms(others, whole, sign=1.0).values()) < 0.05
    assert named < studies * 0.05 + 3 * math.sqrt(studies * 0.05 * 0.95)
    assert named > studies * 0.02, "a test that never fires is none"


@pytest.mark.parametrize("values", [[math.nan] * 3, [0.5], []])
def test_arms_that_say_little_are_told_and_not_judged(values: list[float]) -> None:
    found = judged({None: [0.5] * max(len(values), 1), 16: values})["batch_norm.ghost_size"]
    assert found.status == "ok"


def test_statistics_of_fewer_examples_than_asked_for() -> None:
    found = judged(batch_norm={"asked": 64, "examples": 16})["batch_norm.ghost_size"]
    assert (found.status, found.value, found.threshold) == ("warn", 16, 64)
    assert judged(batch_norm={"asked": 64, "examples": 64})["batch_norm.ghost_size"].status == "ok"
    assert judged(batch_norm={"examples": None})["batch_norm.ghost_size"].status == "not_measured"


# Simulated devices.


@pytest.mark.parametrize(
    ("spread", "status"), [(0.01, "ok"), (0.049, "ok"), (0.06, "warn"), (math.nan, "not_measured")]
)
def test_a_loss_that_depends_on_the_device_is_found(spread: float, status: str) -> None:
    found = judged(batch_norm_devices=[row(1, spread=0), row(4, spread=spread)])["batch_norm.rank_local"]
    assert found.status == status


@pytest.mark.parametrize(("missing", "status"), [(0.01, "ok"), (0.2, "warn")])
def test_variance_that_averaging_leaves_out_is_found(missing: float, status: str) -> None:
    found = judged(batch_norm_devices=[row(4, missing=missing)])["batch_norm.variance_of_means"]
    assert (found.status, found.value) == (status, missing)


def test_sorted_shards_are_told_and_not_judged_where_nobody_sorts() -> None:
    devices = [row(4), row(4, shards="sorted", spread=0.5, missing=0.9)]
    found = judged(batch_norm_devices=devices)
    assert found["batch_norm.rank_local"].status == found["batch_norm.variance_of_means"].status == "ok"
    assert "50.00%" in found["batch_norm.rank_local"].summary
    assert judged(batch_norm_devices=devices[1:])["batch_norm.rank_local"].status == "warn"


def test_norms_are_told_at_their_best_learning_rate() -> None:
    rows = [{"norm": norm, "batch_size": 4, "lr": lr, "values": [v], "mean": v} for norm, lr, v in
            (("batch", 0.1, 0.9), ("batch", 0.2, 0.8), ("layer", 0.1, 0.5), ("layer", 0.2, math.inf))]  # fmt: skip
    summary = judged(batch_norm_swap=rows)["batch_norm.small_batch"].summary
    assert "4: batch 0.8, layer 0.5" in summary
