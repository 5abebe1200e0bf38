"""A candidate against the baseline over seeds: planted gains, chance, length, and what cannot be said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.curves.seed_comparison import LIMIT, p_value, prove, worth_more_seeds
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.topics.recommendation.diagnose import recommend

TOTAL, LONG = 100, 110


def study(
    baseline: list[float], candidate: list[float], same_length: list[float] | None = None, **config: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Arms that differ in warmup, with one selected value a seed; each reaches it half-way and is worse at the end."""
    arms: list[tuple[list[float], dict[str, Any]]] = [
        (baseline, {"total_steps": TOTAL}),
        (candidate, {"total_steps": LONG, "warmup_steps": LONG - TOTAL}),
        (same_length or [], {"total_steps": LONG}),
    ]
    trials, evals = [], []
    worse = -1.0 if config.get("select_mode") == "max" else 1.0
    for values, fields in arms:
        for seed, value in enumerate(values, start=1):
            evals += evaluations(
                len(trials), [0, 50, 100], [value + 9 * worse, value, value + worse], split="validation"
            )
            trials.append(trial(np.linspace(2, 1, fields["total_steps"]), 0.1, seed=seed, **fields))
    made = record(trials, evals=evals, total_steps=TOTAL, **config)
    return made, dict(made.config), dict(made.config) | arms[1][1]


def test_a_gain_in_every_seed_wins_against_both_lengths() -> None:
    made, baseline, candidate = study([1.0, 1.3, 0.8], [0.80, 1.09, 0.61], [0.99, 1.31, 0.80])
    proof = prove(made, baseline=baseline, candidate=candidate)
    assert proof is not None
    assert proof["wins"]
    first, second = proof["arms"]
    assert first["gains"] == pytest.approx([0.2, 0.21, 0.19])
    assert first["gain"] == pytest.approx(0.2)
    assert first["se"] == pytest.approx(0.01 / math.sqrt(3))
    assert second["total_steps"] == LONG
    assert proof["learned"] == pytest.approx(9.0)
    assert proof["verdict"] == "p = 0.0074 over n = 3 seeds (limit 0.05)"


def test_one_seed_that_blew_up_does_not_drown_the_others() -> None:
    """Better by a third to two thirds under every seed; as a difference the last one alone makes the spread."""
    made, baseline, candidate = study([0.59, 1.03, 2.30], [0.37, 0.71, 0.91], [0.59, 1.03, 2.30])
    proof = prove(made, baseline=baseline, candidate=candidate)
    assert proof is not None
    gains = proof["arms"][0]["gains"]
    assert stats.ttest_1samp(gains, 0.0, alternative="greater").pvalue > 0.1
    assert proof["wins"]


def test_the_scale_of_the_loss_changes_nothing_and_below_zero_differences_are_compared() -> None:
    values = np.array([[1.0, 1.3, 0.8], [0.8, 1.2, 0.75]])
    chances = []
    for scale, offset in ((1.0, 0.0), (1e4, 0.0), (1.0, -2.0)):
        before, after = (scale * values + offset).tolist()
        made, baseline, candidate = study(before, after, before)
        proof = prove(made, baseline=baseline, candidate=candidate)
        assert proof is not None
        chances.append(proof["arms"][0]["chance"])
    assert chances[1] == pytest.approx(chances[0])
    assert chances[2] == pytest.approx(stats.ttest_1samp(values[0] - values[1], 0.0, alternative="greater").pvalue)


def test_a_longer_run_must_not_win_by_its_length() -> None:
    made, baseline, candidate = study([1.0, 1.3, 0.8], [0.80, 1.09, 0.61], [0.80, 1.10, 0.60])
    proof = prove(made, baseline=baseline, candidate=candidate)
    assert proof is not None
    assert not proof["wins"]
    assert proof["verdict"].endswith("(limit 0.05), against the baseline of the same length")


@pytest.mark.parametrize("candidates", [1, 6])
def test_chance_wins_as_often_as_it_is_allowed_to_however_many_were_to_choose_from(candidates: int) -> None:
    """Configs that are all alike; the one that looks best under the first seed goes to the proof, as `screen` has it."""
    expected = 0.05
    rng, count, wins = np.random.default_rng(3), 200, 0
    for _ in range(count):
        values = 1 + rng.normal(0, 0.1, (candidates + 1, 4))
        chosen = 1 + int(np.argmin(values[1:, 0]))
        lrs = {0: 0.1, chosen: 0.2}
        runs = [(trial(np.ones(2), lr, seed=seed), values[arm][seed]) for arm, lr in lrs.items() for seed in range(4)]
        evals = [row for k, (_, v) in enumerate(runs) for row in evaluations(k, [50], [v], split="validation")]
        made = record([run for run, _ in runs], evals=evals, total_steps=2)
        proof = prove(made, baseline=made.config, candidate=made.config | {"peak_lr": 0.2})
        assert proof is not None
        assert proof["seeds"] == [1, 2, 3]
        wins += proof["wins"]
    assert abs(wins - count * expected) < 3 * math.sqrt(count * expected)


def test_a_gain_that_the_spread_hides_is_worth_more_seeds() -> None:
    """The baseline dies under the second seed: the larger that gain, the less the other two seem to show."""
    before, after = [1.03, 2.30, 0.89], [0.91, 0.64, 0.78]
    proof = _proof(before, after, before)
    assert not proof["wins"]
    assert worth_more_seeds(proof)
    assert worth_more_seeds(_proof(before, [*after[:2], 0.90], before)), "one seed that loses may be luck"
    assert not worth_more_seeds(_proof(before, after, [0.7, 0.60, 0.89])), "no gain on the other length"
    assert not worth_more_seeds(_proof(before, [1.02, 2.29, 0.88], before)), "too small to matter"
    assert not worth_more_seeds(_proof(before[:2], after[:2], before[:2])), "two seeds agree too often by chance"
    assert not worth_more_seeds(_proof(before, [0.5, 1.1, 0.4], before)), "it is adopted already"
    assert not worth_more_seeds(None)


def _proof(before: list[float], after: list[float], same_length: list[float]) -> dict[str, Any]:
    made, baseline, candidate = study(before, after, same_length)
    proof = prove(made, baseline=baseline, candidate=candidate)
    assert proof is not None
    return proof


def test_two_looks_adopt_by_chance_no_more_often_than_one_in_ten() -> None:
    """The rule itself, on gains that mean nothing: three seeds, and two more where their mean is a gain."""
    gains = np.random.default_rng(5).normal(0, 0.1, (4000, 5))
    first = np.array([p_value(row[:3]) < LIMIT for row in gains])
    second = (gains[:, :3].mean(1) > 0) & np.array([p_value(row) < LIMIT for row in gains])
    expected = 0.083  # the same rule on 200,000 draws
    assert abs((first | second).mean() - expected) < 3 * math.sqrt(expected / len(gains))


def test_five_gains_are_rare_by_chance_however_much_they_differ() -> None:
    """The baseline dies under two seeds: Student's t sees the spread, the signs see that all five gained (1 in 32)."""
    gains = [0.1, 3.4, 0.05, 0.12, 3.3]
    assert stats.ttest_1samp(gains, 0.0, alternative="greater").pvalue > LIMIT
    assert p_value(gains) == 1 / 32
    assert p_value([-0.1, *gains[1:]]) > LIMIT, "one that lost"
    assert p_value(gains[:4]) > 0.1


@pytest.mark.parametrize(("spread", "adopted"), [(0.02, True), (0.13, False)])
def test_where_the_best_candidate_is_refuted_the_second_may_be_adopted_at_half_the_limit(
    spread: float, adopted: bool
) -> None:
    """The wide one has p of 0.027: enough for a first candidate, too much for a second (Bonferroni)."""
    fixed = {"stage": "fix", "total_steps": TOTAL}
    loss, after = np.linspace(2, 1, TOTAL), 0.6 + np.array([-1.0, 0.0, 1.0]) * spread
    assert (
        LIMIT / 2
        < stats.ttest_1samp(np.log(1.0 / (0.6 + np.array([-0.13, 0.0, 0.13]))), 0.0, alternative="greater").pvalue
        < LIMIT
    )
    runs = [(trial(loss, 0.1, seed=seed, stage="baseline" if seed == 0 else "proof"), 1.0) for seed in range(4)]
    runs += [(trial(loss, 0.2, max_grad_norm=1.0, **fixed), 0.5), (trial(loss, 0.2, max_grad_norm=2.0, **fixed), 0.55)]
    runs += [(trial(loss, 0.2, seed=seed, stage="proof", max_grad_norm=1.0), 1.2) for seed in (1, 2, 3)]
    runs += [
        (trial(loss, 0.2, seed=seed, stage="proof", max_grad_norm=2.0), float(value))
        for seed, value in zip((1, 2, 3), after, strict=True)
    ]
    evals = [row for k, (_, value) in enumerate(runs) for row in evaluations(k, [50], [value], split="validation")]
    made = record([run for run, _ in runs], evals=evals, total_steps=TOTAL)
    found = recommend(made, Diagnosis(findings=(Finding(code="lr.best", status="not_measured", summary="planted"),)))
    assert (found["adopted"], found["config"]["max_grad_norm"]) == (adopted, 2.0 if adopted else None)
    assert found["candidate"] == f"lr 0.2, clipping at {2 if adopted else 1}"


def test_a_clipped_run_that_is_a_smaller_lr_in_disguise_is_no_candidate() -> None:
    """F4.12: where half of the steps or more are clipped the advice is a smaller lr, so it is not recommended either."""
    loss = np.linspace(2, 1, TOTAL)
    for share, candidate in ((0.1, "lr 0.2, clipping at 1"), (0.6, None)):
        norms = np.where(np.arange(TOTAL) < share * TOTAL, 5.0, 0.5)
        columns = {"grad_norm": norms, "clipped": norms > 1.0}
        runs = [
            (trial(loss, 0.1, stage="baseline", columns={"grad_norm": np.full(TOTAL, 0.5)}), 1.0),
            (trial(loss, 0.2, stage="clipping", max_grad_norm=1.0, columns=columns), 0.5),
        ]
        evals = [row for k, (_, value) in enumerate(runs) for row in evaluations(k, [50], [value], split="validation")]
        made = record([run for run, _ in runs], evals=evals, total_steps=TOTAL)
        nothing = Diagnosis(findings=(Finding(code="lr.best", status="ok", value=0.1, summary="planted"),))
        assert recommend(made, nothing)["candidate"] == candidate
