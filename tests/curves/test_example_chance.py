"""A gain that the examples of the validation set may give by chance: closed form, false adoptions, and what is unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.curves.seed_comparison import example_chance
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.topics.recommendation.diagnose import recommend

NOTHING = Diagnosis(findings=(Finding(code="lr.best", status="not_measured", summary="planted"),))


def facts(
    sd: float | None,
    *,
    examples: int = 100,
    trials: tuple[tuple[int, int | None], ...] = ((1, 5),),
    is_train: bool = False,
) -> dict[str, Any]:
    pair = {"difference_sd": sd, "trials": [list(numbers) for numbers in trials]}
    return {"evaluation_sample": {"examples": examples, "pair": pair, "is_train": is_train}}


def won_over_seeds(found: dict[str, Any]) -> Any:
    """Seeds 0 to 3 of a baseline at 1.0 and of a candidate that gains 0.1 under each, give or take a hundredth."""
    loss = np.linspace(2, 1, 100)
    runs = [(trial(loss, 0.1, seed=s, stage="baseline"), 1.0 + 0.01 * s) for s in range(4)]
    runs += [
        (trial(loss, 0.3, seed=s, stage="fix" if s == 0 else "proof", max_grad_norm=1.0), 0.9 + 0.011 * s)
        for s in range(4)
    ]
    evals = [row for k, (_, value) in enumerate(runs) for row in evaluations(k, [50], [value], split="validation")]
    return record([run for run, _ in runs], evals=evals, total_steps=100, facts=found)


@pytest.mark.parametrize(("sd", "adopted"), [(0.5, True), (1.0, False), (0.0, True), (None, True)])
def test_a_gain_within_the_luck_of_the_examples_is_refused(sd: float | None, adopted: bool) -> None:
    """0.1 is 2 standard errors of 100 examples at a spread of 0.5, and one at a spread of 1."""
    found = recommend(won_over_seeds(facts(sd)), NOTHING)
    assert found["proof"]["wins"] is True
    assert found["adopted"] is adopted
    assert bool(found["changed"]) is adopted
    if adopted:
        assert found["reason"].count("dopted") == 1
    else:
        assert found["examples"]["refused"] is True
        assert "Not adopted: p = 0.16 over these 100 validation examples (limit 0.1)." in found["reason"]
        assert " Adopted" not in found["reason"]


@pytest.mark.parametrize("examples", [1, 29, 30])
def test_few_examples_choose_no_config_however_sure_they_look(examples: int) -> None:
    found = recommend(won_over_seeds(facts(1e-6, examples=examples)), NOTHING)
    assert found["adopted"] is (examples >= 30)
    assert ("too few to choose a config by; keep 30 or more" in found["reason"]) is (examples < 30)


def test_chance_is_that_of_a_t_test_on_the_differences() -> None:
    differences = np.random.default_rng(0).normal(0.2, 1.0, 60)
    known = example_chance(
        record([trial(np.ones(3), 0.1)], facts=facts(float(differences.std(ddof=1)), examples=60)),
        candidate=[5, 6],
        gain=float(differences.mean()),
    )
    assert known is not None
    expected = stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue
    assert known["chance"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "known",
    [{}, facts(None), facts(0.5, trials=((1, 9),)), facts(0.5, trials=()), facts(0.5, examples=2, is_train=True)],
    ids=["no facts", "not finite", "other models", "no pair", "the training set itself"],
)
def test_what_was_not_compared_example_by_example_is_not_known(known: dict[str, Any]) -> None:
    assert example_chance(record([trial(np.ones(3), 0.1)], facts=known), candidate=[5], gain=0.1) is None
