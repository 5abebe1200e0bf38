"""A candidate against the baseline: by selected checkpoints, over seeds, and over validation examples (P4.7, F3.12)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.curves.seed_comparison import LIMIT, example_chance, p_value, prove, worth_more_seeds
from workbench.curves.selection import compare_selected
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.topics.recommendation.diagnose import recommend

TOTAL, LONG = 100, 110
NOTHING = Diagnosis(findings=(Finding(code="lr.best", status="not_measured", summary="planted"),))
FALLING = [1.0, 0.8, 0.6, 0.4, 0.2]


def compared(*curves: list[float], noise_sds: float = 2.0, seeds: int = 1, **config: Any) -> dict[str, Any]:
    """The first curve is the baseline's, each other one that of a candidate; with `seeds` each runs so many times, 0.1 apart."""
    runs = [([v + 0.1 * (s - seeds // 2) for v in c], k, s) for k, c in enumerate(curves) for s in range(seeds)]
    trials = [trial(np.ones(2), 0.1 * (k + 1), seed=s) for _, k, s in runs]
    evals = [
        row
        for n, (values, _, _) in enumerate(runs)
        for row in evaluations(n, 25 * np.arange(len(values)), values, split="validation")
    ]
    made = record(trials, evals=evals, total_steps=25 * max(len(curves[0]) - 1, 1), **config)
    numbers = [[n for n, (_, at, _) in enumerate(runs) if at == k] for k in range(len(curves))]
    candidates = {f"c{k}": found for k, found in enumerate(numbers) if k}
    return compare_selected(made, baseline=numbers[0], candidates=candidates, noise_sds=noise_sds)


def test_the_best_checkpoint_counts_not_the_last() -> None:
    result = compared(FALLING, [1.0, 0.5, 0.1, 0.5, 0.9], noise_sds=0.0)
    assert result["baseline"]["best_step"] == 100
    assert (result["recommended"]["best_step"], result["recommended"]["validation/loss"]) == (50, 0.1)
    assert (result["adopted"], result["gain"]) == (True, pytest.approx(0.1))
    rising = [1 - v for v in FALLING]
    assert compared(rising, [v + 0.1 for v in rising], select_mode="max")["adopted"] is True
    assert compared([v + 0.1 for v in rising], rising, select_mode="max")["adopted"] is False


def test_the_luckiest_evaluation_is_not_the_best_candidate() -> None:
    """One that swings wildly touches 0.05 once; a steady one at 0.1 is chosen, and adopted."""
    wild = [2.2, 0.7, 0.05, 0.7, 0.9, 2.0, 0.6, 1.8, 0.7, 0.9]
    result = compared([1.0] * 10, wild, [0.1 + 0.001 * (k % 2) for k in range(10)])
    assert (result["candidate"], result["adopted"]) == ("c2", True)


def test_a_gain_within_the_noise_or_of_unknown_noise_is_not_adopted() -> None:
    rng = np.random.default_rng(0)
    noisy = [(1 + 0.2 * rng.standard_normal(40)).tolist() for _ in range(2)]
    noisy[1][3] = min(noisy[0]) - 0.01
    result = compared(*noisy)
    assert 0 < result["gain"] < result["noise"]
    assert (result["promising"], result["adopted"]) == (False, False)
    assert 0.2 < result["noise"] < 0.7, "two standard deviations of the planted noise are 0.4"
    few = compared([1.0, 0.5, 0.4], [1.0, 0.4, 0.3])
    assert (few["promising"], few["adopted"]) == (True, False), "worth a proof"
    seeds = compared(FALLING, [v - 0.15 for v in FALLING], seeds=3)
    assert (seeds["baseline"]["seeds"], seeds["noise"]) == (3, pytest.approx(2 * 0.1)), "their spread is noise"
    assert seeds["adopted"] is False


@pytest.mark.parametrize("bad", [[math.nan] * 5, [math.inf] * 5, []])
def test_a_run_without_a_finite_value_is_never_adopted(bad: list[float]) -> None:
    result = compared(FALLING, bad)
    assert (result["adopted"], result["candidate"]) == (False, None)
    assert result["recommended"] == result["baseline"]
    assert "no finite value of the baseline" in compared([math.nan] * 5, FALLING)["reason"]


STEPS = np.arange(20_000) / 20_000


@pytest.mark.parametrize("trend", [30.0 * STEPS, -20.0 * STEPS + 10 * STEPS**2, 50.0 * (np.arange(20_000) % 200 == 0)])
@pytest.mark.parametrize("sd", [0.01, 0.3])
def test_the_noise_is_the_standard_deviation_around_the_trend_and_the_outliers(trend: Any, sd: float) -> None:
    """White noise of known size: the second differences have 6 times its variance."""
    values = (trend + sd * np.random.default_rng(0).standard_normal(STEPS.size)).tolist()
    assert compared(FALLING, values, noise_sds=1.0)["recommended"]["noise"] == pytest.approx(sd, rel=0.06)


def study(
    before: list[float], after: list[float], same_length: list[float] = (), **config: Any
) -> dict[str, Any] | None:  # type: ignore[assignment]
    """The proof of arms that differ in warmup, one selected value a seed; each reaches it half-way and is worse at the end."""
    arms: list[tuple[list[float], dict[str, Any]]] = [
        (before, {"total_steps": TOTAL}),
        (after, {"total_steps": LONG, "warmup_steps": LONG - TOTAL}),
        (same_length, {"total_steps": LONG}),
    ]
    trials, evals = [], []
    for values, fields in arms:
        for seed, value in enumerate(values, start=1):
            curve = [value + 9, value, value + 1]
            evals += evaluations(len(trials), [0, 50, 100], curve, split="validation")
            trials.append(trial(np.linspace(2, 1, fields["total_steps"]), 0.1, seed=seed, **fields))
    made = record(trials, evals=evals, total_steps=TOTAL, **config)
    return prove(made, baseline=made.config, candidate=made.config | arms[1][1])


def proof_of(*arms: Any) -> dict[str, Any]:
    proof = study(*arms)
    assert proof is not None
    return proof


@pytest.mark.parametrize(("seeds", "test"), [(3, "one-sided paired t"), (5, "one-sided paired t or sign flips"), (11, "one-sided paired t")])  # fmt: skip
def test_the_test_that_a_chance_is_of_is_named(seeds: int, test: str) -> None:
    own = [1.0 + 0.1 * k for k in range(seeds)]
    proof = proof_of(own, [each - 0.2 - 0.001 * k for k, each in enumerate(own)], own)
    assert proof["test"] == test
    assert f", {test} over {seeds} seeds" in proof["verdict"]


def test_a_gain_in_every_seed_wins_against_both_lengths() -> None:
    proof = proof_of([1.0, 1.3, 0.8], [0.80, 1.09, 0.61], [0.99, 1.31, 0.80])
    assert proof["wins"]
    first, second = proof["arms"]
    assert first["gains"] == pytest.approx([0.2, 0.21, 0.19])
    assert (first["gain"], first["se"]) == pytest.approx((0.2, 0.01 / math.sqrt(3)))
    assert second["total_steps"] == LONG
    assert proof["learned"] == pytest.approx(9.0)
    assert proof["verdict"] == "p = 0.0074, one-sided paired t over 3 seeds (limit 0.05)"
    lost = proof_of([1.0, 1.3, 0.8], [0.80, 1.09, 0.61], [0.80, 1.10, 0.60])
    assert not lost["wins"], "by its length alone"
    assert lost["verdict"].endswith("(limit 0.05), against the baseline of the same length")
    assert study([1.0, 1.3, 0.8], [0.80, 1.09, 0.61]) is None, "the arm of the same length is missing"
    assert proof_of([1.0, 1.0, math.nan], [0.5, 0.6, 0.1], [1.0] * 3)["seeds"] == [1, 2]
    assert study([1.0], [0.5], [1.0]) is None


def test_one_seed_that_blew_up_does_not_drown_the_others_whatever_the_scale() -> None:
    """Better by a third to two thirds under every seed; as a difference the last one alone makes the spread."""
    chances = []
    for scale, offset in ((1.0, 0.0), (1e4, 0.0), (1.0, -3.0)):
        values = np.array([[0.59, 1.03, 2.30], [0.37, 0.71, 0.91]])
        before, after = (scale * values + offset).tolist()
        chances.append(proof_of(before, after, before)["arms"][0]["chance"])
    by_difference = stats.ttest_1samp(values[0] - values[1], 0.0, alternative="greater").pvalue
    assert (
        chances[0]
        == pytest.approx(chances[1])
        == pytest.approx(stats.ttest_1samp(np.log(values[0] / values[1]), 0.0, alternative="greater").pvalue)
    )
    assert chances[0] < LIMIT < 0.1 < by_difference
    assert chances[2] == pytest.approx(by_difference), "below zero there is no ratio"


def test_chance_wins_as_often_as_it_is_allowed_to_however_many_were_to_choose_from() -> None:
    """Seven configs that are all alike; the one that looks best under the first seed goes to the proof, as `screen` has it."""
    expected = 0.05
    rng, count, wins = np.random.default_rng(3), 200, 0
    for _ in range(count):
        values = 1 + rng.normal(0, 0.1, (7, 4))
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
    assert not proof_of(before, after, before)["wins"]
    assert worth_more_seeds(proof_of(before, after, before))
    assert worth_more_seeds(proof_of(before, [*after[:2], 0.90], before)), "one seed that loses may be luck"
    assert not worth_more_seeds(proof_of(before, after, [0.7, 0.60, 0.89])), "no gain on the other length"
    assert not worth_more_seeds(proof_of(before, [1.02, 2.29, 0.88], before)), "too small to matter"
    assert not worth_more_seeds(proof_of(before[:2], after[:2], before[:2])), "two seeds agree too often by chance"
    assert not worth_more_seeds(proof_of(before, [0.5, 1.1, 0.4], before)), "it is adopted already"


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
    assert [p_value([gain] * 3) for gain in (0.5, 0.0, -0.5)] == [0.0, 1.0, 1.0]


def test_a_candidate_that_was_tested_does_not_give_way_to_one_whose_luck_was_not() -> None:
    """The one chosen by a lucky seed loses over three; the runner-up, with its single seed, is not adopted instead."""
    fixed = {"stage": "fix", "total_steps": TOTAL}
    loss = np.linspace(2, 1, TOTAL)
    runs = [(trial(loss, 0.1, seed=seed, stage="baseline" if seed == 0 else "proof"), 1.0) for seed in range(3)]
    runs += [(trial(loss, 0.2, max_grad_norm=1.0, **fixed), 0.5), (trial(loss, 0.2, max_grad_norm=2.0, **fixed), 0.6)]
    runs += [(trial(loss, 0.2, seed=seed, stage="proof", max_grad_norm=1.0), 1.2) for seed in (1, 2)]
    evals = [row for k, (_, value) in enumerate(runs) for row in evaluations(k, [50], [value], split="validation")]
    made = record([run for run, _ in runs], evals=evals, total_steps=TOTAL)
    found = recommend(made, NOTHING)
    assert found["candidate"] == "lr 0.2, clipping at 1"
    assert found["chosen"] == {"trial": 3, "validation/loss": 0.5}
    assert found["recommended"]["trials"] == [5, 6], "the seeds of the proof, not the one that chose it"
    assert found["proof"]["candidate"] == [1.2, 1.2]
    assert found["adopted"] is False
    assert found["changed"] == []


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
    found = recommend(made, NOTHING)
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


def facts(sd: float | None, *, examples: int = 100, trials: Any = ((1, 5),), is_train: bool = False) -> dict[str, Any]:
    pair = {"difference_sd": sd, "trials": [list(numbers) for numbers in trials]}
    return {"evaluation_sample": {"examples": examples, "pair": pair, "is_train": is_train}}


def won_over_seeds(found: dict[str, Any]) -> Any:
    """Seeds 0 to 3 of a baseline at 1.0 and of a candidate that gains 0.1 under each, give or take a hundredth."""
    loss, fix = np.linspace(2, 1, 100), {"max_grad_norm": 1.0}
    runs = [(trial(loss, 0.1, seed=s, stage="baseline"), 1.0 + 0.01 * s) for s in range(4)]
    runs += [(trial(loss, 0.3, seed=s, stage="proof" if s else "fix", **fix), 0.9 + 0.011 * s) for s in range(4)]
    evals = [row for k, (_, value) in enumerate(runs) for row in evaluations(k, [50], [value], split="validation")]
    return record([run for run, _ in runs], evals=evals, total_steps=100, facts=found)


@pytest.mark.parametrize(("known", "adopted", "said"), [
    (facts(0.5), True, "Adopted"), (facts(None), True, "Adopted"), (facts(0.0), True, "Adopted"),
    (facts(1.0), False, "Not adopted: p = 0.16 over these 100 validation examples (limit 0.1)."),
    (facts(1e-6, examples=30), True, "Adopted"), (facts(1e-6, examples=29), False, "keep 30 or more"),
])  # fmt: skip
def test_a_gain_within_the_luck_of_the_examples_is_refused(known: dict[str, Any], adopted: bool, said: str) -> None:
    """0.1 is 2 standard errors of 100 examples at a spread of 0.5, and one at a spread of 1."""
    found = recommend(won_over_seeds(known), NOTHING)
    assert (found["proof"]["wins"], found["adopted"], bool(found["changed"])) == (True, adopted, adopted)
    assert said in found["reason"]


def test_chance_is_that_of_a_t_test_on_the_differences() -> None:
    differences = np.random.default_rng(0).normal(0.2, 1.0, 60)
    made = record([trial(np.ones(3), 0.1)], facts=facts(float(differences.std(ddof=1)), examples=60))
    known = example_chance(made, candidate=[5, 6], gain=float(differences.mean()))
    assert known is not None
    assert known["chance"] == pytest.approx(stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue)


@pytest.mark.parametrize(
    "known", [{}, facts(None), facts(0.5, trials=((1, 9),)), facts(0.5, trials=()), facts(0.5, examples=2, is_train=True)],
    ids=["no facts", "not finite", "other models", "no pair", "the training set itself"],
)  # fmt: skip
def test_what_was_not_compared_example_by_example_is_not_known(known: dict[str, Any]) -> None:
    assert example_chance(record([trial(np.ones(3), 0.1)], facts=known), candidate=[5], gain=0.1) is None
