"""A config that looks better is not adopted where that is absurd, and is where it is not: each case beside its healthy twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.recommendation.diagnose import recommend, screen

TOTAL, SEEDS = 100, 4
FALLING = np.linspace(2, 1, TOTAL)
SPREAD = np.array([0.0, 0.01, -0.01, 0.02])
STEPS = [0, 50, 100]


def known(star: float = 0.3, unstable: float | None = None, *more: Finding, lrs: tuple[float, ...] = ()) -> Diagnosis:
    points = [{"lr": lr, "loss": abs(math.log(lr / star)), "unstable": False} for lr in (*lrs, star)]
    best = Finding(code="lr.best", status="ok", value=star, summary="planted", evidence={"points": points})
    edge = Finding(code="lr.unstable", status="ok" if unstable else "not_measured", value=unstable, summary="planted")
    return Diagnosis(findings=(best, edge, *more))


def alarm(code: str, status: Any) -> Finding:
    return Finding(code=code, status=status, summary="planted")


class Study:
    """Runs of a baseline at lr 0.1 and of others, each with the selected metric at its evaluations."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def run(self, lr: float, curve: Any, *, seed: int = 0, stage: str = "lr_sweep", steps: Any = None, accuracy: Any = None, loss: Any = FALLING, **config: Any) -> None:  # fmt: skip
        number, at = len(self.runs), STEPS[: len(curve)] if steps is None else steps
        self.evals += evaluations(number, at, curve, split="validation")
        if accuracy is not None:
            self.evals += evaluations(number, at, accuracy, split="validation", metric="accuracy")
        columns = {"grad_norm": config.pop("norms", np.full(len(loss), 0.5))}
        self.runs.append(trial(loss, lr, seed=seed, stage=stage, columns=columns, **config))

    def arm(self, lr: float, ends: Any, *, start: float = 2.0, accuracies: Any = None, first: str = "lr_sweep", **more: Any) -> Study:  # fmt: skip
        """One run a seed, from `start` straight to its end."""
        for seed, end in enumerate(np.broadcast_to(ends, SEEDS)):
            right = None if accuracies is None else [0.1, 0.5, np.broadcast_to(accuracies, SEEDS)[seed]]
            stage = first if seed == 0 else "baseline" if lr == 0.1 else "proof"
            self.run(lr, [start, (start + end) / 2, end], seed=seed, stage=stage, accuracy=right, **more)
        return self

    @property
    def record(self) -> Any:
        return record(self.runs, evals=self.evals, total_steps=TOTAL, peak_lr=0.1)


def two_arms(before: Any, after: Any, **more: Any) -> Any:
    return Study().arm(0.1, before, **more).arm(0.3, after, **more).record


def said(made: Any, diagnosis: Diagnosis | None = None) -> tuple[bool, str]:
    found = recommend(made, diagnosis or known())
    assert found["adopted"] is bool(found["changed"])
    return found["adopted"], found["reason"]


def test_the_reason_says_p_and_n() -> None:
    adopted, reason = said(two_arms(1.0 + SPREAD, 0.5 + SPREAD))
    assert adopted
    assert reason.endswith("Adopted: p < 0.001 over n = 3 seeds (limit 0.05).")
    adopted, reason = said(two_arms(1.0 + SPREAD, [0.5, 0.9, 1.3, 0.6]))
    assert not adopted
    assert "Not adopted: p = 0.3" in reason
    assert "over n = 3 seeds (limit 0.05)" in reason


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (1.0 + SPREAD, 0.0, "is exactly 0 in 1 of 1 runs"),
        (1.0 + SPREAD, 1e-6, ""),
        (-2e4 + SPREAD, -3e36, "falls to -3e+36, as if without bound"),
        (0.5 + SPREAD, -600.0 + SPREAD, "falls to -6e+02, as if without bound"),
        (0.5 + SPREAD, -30.0 + SPREAD, ""),
    ],
    ids=["zero", "nearly zero", "no minimum", "300 times as far below zero", "log density"],
)
def test_a_loss_that_is_too_good_is_doubted(before: Any, after: Any, why: str) -> None:
    adopted, reason = said(two_arms(before, after))
    assert adopted is not bool(why)
    assert why in reason
    assert screen(two_arms(before, after), known())["promising"] is adopted, "it is not even proved"


def test_where_every_example_is_right_already_there_is_nothing_to_gain() -> None:
    adopted, reason = said(two_arms(1e-1 + SPREAD, 1e-3, accuracies=1.0))
    assert not adopted
    assert "nothing is left to gain: validation/accuracy is 1 in both" in reason
    study = Study().arm(0.1, 1e-1 + SPREAD, accuracies=0.99).arm(0.3, 1e-3, accuracies=1.0)
    assert said(study.record)[0]


def test_a_gain_that_does_not_matter_is_not_even_proved() -> None:
    """1 % and 4 % of what training learned, the same under every seed."""
    for gain, adopted in ((0.015, False), (0.06, True)):
        made = two_arms(0.5 + SPREAD, 0.5 - gain + SPREAD)
        assert said(made)[0] is adopted
        assert screen(made, known())["promising"] is adopted
    assert "the gain is 1.0% of what training learned (limit 2%)" in said(two_arms(0.5, 0.485))[1]


@pytest.mark.parametrize(("better", "adopted"), [(2.35, False), (2.25, True)])
def test_a_config_that_is_no_better_than_guessing_is_refused(better: float, adopted: bool) -> None:
    """From 66 down to chance at 2.3 takes no learning, however much less bad one of the two is."""
    study = Study().arm(0.1, 2.4 + SPREAD, start=66.0).arm(0.3, better + SPREAD, start=66.0)
    made = record(study.runs, evals=study.evals, total_steps=TOTAL, peak_lr=0.1, facts={"chance_loss": 2.3})
    got, reason = said(made)
    assert got is adopted
    assert screen(made, known())["promising"] is adopted, "it is not even proved"
    why = "Not adopted: neither run learned anything: the better one is 0.05 worse than guessing or the untrained model"
    assert (why in reason) is not adopted


def test_the_best_of_more_evaluations_is_no_gain() -> None:
    """The same noise, seen three times by the baseline and a hundred times by the candidate."""
    rng, study = np.random.default_rng(0), Study()
    for seed in range(SEEDS):
        study.run(0.1, [2.0, *(1 + 0.2 * rng.standard_normal(2))], seed=seed, stage="baseline")
    for seed in range(SEEDS):
        curve = np.append(2.0, 1 + 0.2 * rng.standard_normal(TOTAL))
        study.run(0.3, curve, seed=seed, stage="lr_sweep" if seed == 0 else "proof", steps=range(TOTAL + 1))
    made = study.record
    every = [made.evals[made.evals["trial"] == number]["value"].min() for number in range(2 * SEEDS)]
    assert min(every[:SEEDS]) > max(every[SEEDS:]) + 0.1, "by all its evaluations it would win under every seed"
    found = recommend(made, known())
    assert not found["adopted"]
    assert abs(np.mean(found["proof"]["arms"][0]["gains"])) < 0.3


def test_a_candidate_that_depends_on_the_seed_three_times_as_much_is_refused() -> None:
    """Its gain has to outweigh that: a baseline that learns nothing under any seed does not vary at all."""
    spread = 2 * SPREAD
    adopted, reason = said(two_arms(0.59 + SPREAD / 4, 0.5 + spread))
    assert not adopted
    assert "its standard deviation over the seeds is 0.031, the baseline's 0.0038" in reason
    assert said(two_arms(2.0 + SPREAD / 1000, 0.5 + spread))[0]
    assert said(two_arms(0.59 + SPREAD, 0.5 + spread))[0]


def test_a_lower_loss_at_a_lower_accuracy_is_refused() -> None:
    study = Study().arm(0.1, 1.0 + SPREAD, accuracies=0.9 + SPREAD / 10).arm(0.3, 0.5 + SPREAD, accuracies=0.8)
    adopted, reason = said(study.record)
    assert not adopted
    assert "validation/accuracy is worse: 0.8 against 0.9" in reason
    level = Study().arm(0.1, 1.0 + SPREAD, accuracies=0.9 + SPREAD).arm(0.3, 0.5 + SPREAD, accuracies=0.895 - SPREAD)
    assert said(level.record)[0], "within noise"


@pytest.mark.parametrize(
    ("code", "status", "vetoes"),
    [
        ("loop.no_gradient", "warn", True),
        ("loss.broadcast", "fail", True),
        ("schedule.collapse", "fail", True),
        ("data.labels", "fail", True),
        ("data.scale", "warn", False),
        ("init.loss", "warn", False),
        ("architecture.no_norm", "warn", False),
        ("loop.no_gradient", "ok", False),
        ("lr.too_low", "warn", False),
    ],
)
def test_a_fault_of_structure_is_mended_before_anything_is_tuned(code: str, status: str, vetoes: bool) -> None:
    adopted, reason = said(two_arms(1.0 + SPREAD, 0.5 + SPREAD), known(0.3, None, alarm(code, status)))
    assert adopted is not vetoes
    assert (f"Not adopted: mend {code} first" in reason) is vetoes


def test_a_baseline_that_diverges_under_every_seed_gives_way_to_one_that_trains_under_every_seed() -> None:
    study = Study()
    for seed in range(SEEDS):
        study.run(0.1, [2.0 + SPREAD[seed]], seed=seed, stage="baseline", loss=[2.0, math.nan], state="diverged")
    study.arm(0.01, [0.5, 0.3, 1.2, 0.8])
    adopted, reason = said(study.record, known(0.01))
    assert adopted
    assert reason.endswith("Adopted: the baseline diverges under each of n = 3 seeds, the candidate under none.")
    study.runs[-1]["state"] = "diverged"
    adopted, reason = said(study.record, known(0.01))
    assert not adopted, "the same values, which by themselves may be chance"
    assert "p = 0.05" in reason


def test_the_lr_keeps_a_distance_from_the_edge() -> None:
    """lr* at 0.3 under an edge at 0.4: the best point of the sweep at 0.267 or below is the candidate."""
    study = Study().arm(0.1, 1.0 + SPREAD).arm(0.3, 0.4 + SPREAD).arm(0.2, 0.5 + SPREAD)
    near = known(0.3, 0.4, lrs=(0.05, 0.1, 0.2))
    assert recommend(study.record, near)["config"]["peak_lr"] == 0.2
    assert recommend(study.record, known(0.3, 0.45, lrs=(0.05, 0.1, 0.2)))["config"]["peak_lr"] == 0.3
    assert recommend(study.record, known(0.3, 0.12, lrs=(0.05, 0.1, 0.2)))["candidate"] is None


def test_the_lr_that_a_finding_names_is_the_one_that_is_proved() -> None:
    """Not lr*, which is the best by training loss; and none where the own one is as good."""
    study = Study().arm(0.1, 1.0 + SPREAD).arm(0.3, 0.4 + SPREAD).arm(0.2, 0.5 + SPREAD)
    low = Finding(code="lr.too_low", status="warn", summary="planted", evidence={"better_lr": 0.2})
    high = alarm("lr.too_high", "ok")
    assert recommend(study.record, known(0.3, None, low, high))["config"]["peak_lr"] == 0.2
    assert recommend(study.record, known(0.3, None, alarm("lr.too_low", "ok"), high))["candidate"] is None


@pytest.mark.parametrize(
    ("beyond", "adopted", "why"),
    [
        (None, False, "not trained at 1.5 times its lr"),
        ({}, True, "Adopted"),
        (
            {"loss": np.append(FALLING[:50], np.linspace(2, 50, 60))},
            False,
            "no other change that was tried trains stably with a margin",
        ),
        ({"warmup_steps": 20}, False, "not trained at 1.5 times its lr"),
    ],
    ids=["not tried", "stable", "unstable", "stable with more warmup"],
)
def test_a_cure_shows_by_itself_how_far_it_is_from_the_edge(beyond: Any, adopted: bool, why: str) -> None:
    """A warmup opens lr 0.3, beyond the edge without one at 0.2; half as much again tells how near that is."""
    long: dict[str, Any] = {"warmup_steps": 10, "total_steps": TOTAL + 10, "loss": np.linspace(2, 1, TOTAL + 10)}
    study = Study().arm(0.1, 1.0 + SPREAD).arm(0.3, 0.5 + SPREAD, first="fix", **long)
    study.arm(0.1, 1.0 + SPREAD, **long | {"warmup_steps": 0})
    if beyond is not None:
        study.run(0.45, [2.0, 1.5], stage="margin", **long | beyond)
    said_so, reason = said(study.record, known(0.1, 0.2))
    assert said_so is adopted
    assert why in reason
    assert screen(study.record, known(0.1, 0.2)).get("untried", False) is ("1.5 times" in why)


def test_a_clip_far_too_low_is_loosened_and_not_outrun_by_the_lr() -> None:
    """Every step of the baseline is clipped; ten times its lr would gain as much as a looser threshold."""
    study = Study().arm(0.1, 1.5 + SPREAD, max_grad_norm=0.01).arm(1.0, 0.5 + SPREAD, max_grad_norm=0.01)
    study.arm(0.1, 0.55 + SPREAD, first="clipping", max_grad_norm=1.0)
    study.run(0.15, [2.0, 0.5], stage="margin", max_grad_norm=1.0)
    made = record(study.runs, evals=study.evals, total_steps=TOTAL, peak_lr=0.1, max_grad_norm=0.01)
    found = recommend(made, known(1.0))
    assert found["candidate"] == "lr 0.1, clipping at 1"
    for run in study.runs:
        run["columns"]["grad_norm"] = np.where(np.arange(TOTAL) < 60, 0.5, 0.005)
    rarely = record(study.runs, evals=study.evals, total_steps=TOTAL, peak_lr=0.1, max_grad_norm=0.01)
    assert recommend(rarely, known(1.0))["candidate"] == "lr 1"


@pytest.mark.parametrize(
    ("star", "edge", "findings", "reason"),
    [
        (0.1, None, [], "the baseline trains at the best lr already, and nothing else was tried"),
        (1.6, None, [("lr.too_low", "ok")], "no other lr is better than the baseline's 0.1 by enough to matter, and nothing else was tried"),
        (1.6, 0.12, [("lr.too_low", "fail")], "no lr that is better than the baseline's 0.1 keeps a margin to the edge, and nothing else was tried"),
    ],
    ids=["own", "as good", "edge"],
)  # fmt: skip
def test_where_nothing_was_held_against_the_baseline_the_reason_says_why(star: float, edge: float | None, findings: Any, reason: str) -> None:  # fmt: skip
    alone = Study().arm(0.1, 1.0 + SPREAD).record
    got = recommend(alone, known(star, edge, *(alarm(*found) for found in findings)))["reason"]
    assert got == f"Not adopted: {reason}."


def test_a_baseline_that_clips_nearly_every_step_is_told_to_loosen_the_clip() -> None:
    study = Study().arm(0.1, 1.5 + SPREAD, max_grad_norm=0.01).arm(1.0, 0.5 + SPREAD, max_grad_norm=0.01)
    made = record(study.runs, evals=study.evals, total_steps=TOTAL, peak_lr=0.1, max_grad_norm=0.01)
    reason = said(made, known(1.0, None, alarm("lr.too_low", "fail")))[1]
    assert reason.startswith(
        "Not adopted: nearly every step is clipped, so a larger lr would only make up for that: loosen the clip"
    )
