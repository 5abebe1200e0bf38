"""What each panel says and draws, against closed forms, NumPy and the diagnosis of the same record."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers.evaluations import predicted
from tests.helpers.panels import said
from tests.helpers.records import LRS, one_trial, study
from tests.helpers.simulated_checkpoints import evaluated
from tests.helpers.simulated_records import record, trial
from tests.topics.test_warmup import GOOD, short
from tests.topics.test_warmup import study as warmups
from workbench.topics.batch_norm.panel import batch_norm_panel
from workbench.topics.checkpoints.panel import checkpoints_panel
from workbench.topics.clipping.panel import clipping_panel
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.panel import lr_sweep_panel
from workbench.topics.predictions.panel import predictions_panel
from workbench.topics.warmup.panel import warmup_panel

CURVATURE, STEPS = 10.0, 60
EDGE = 2 / CURVATURE
"""Of plain gradient descent on half the curvature times x squared."""


def descent(lr: float) -> np.ndarray:
    """Loss of gradient descent from 1, in closed form, non-finite once it is beyond what float32 holds."""
    losses = CURVATURE / 2 * (1 - lr * CURVATURE) ** (2.0 * np.arange(STEPS))
    big = np.flatnonzero(losses > 3e38)
    return np.append(losses[: big[0]], np.inf) if big.size else losses


def quadratic(*factors: float):
    trials = [trial(descent(factor * EDGE), factor * EDGE, stage="lr_sweep", total_steps=STEPS) for factor in factors]
    return record(trials, total_steps=STEPS, peak_lr=0.1 * EDGE, optimizer="sgd", full_batch=True)


def test_the_distance_to_the_edge_is_that_of_the_quadratic() -> None:
    made = quadratic(0.125, 0.25, 0.5, 0.96, 1.04, 2.0)
    panel = lr_sweep_panel(made, live=True)
    for factor in (0.25, 1.04, 2.0):
        panel.controls["lr"].value = factor * EDGE
        words = said(panel)
        told = re.search(r"([\d.]+) x the unstable lr", words)
        assert told is not None
        assert float(told[1]) == pytest.approx(factor, rel=0.05)
        outcome = re.search(r"^lr \S+: (stable|unstable|diverged)", words)
        assert outcome is not None, words
        assert (outcome[1] == "stable") is (factor < 1)
    panel.controls["lr"].value = 0.125 * EDGE
    end = descent(0.125 * EDGE)[-STEPS // 10 :].mean()
    assert f"stable, training loss at the end {end:.4g};" in said(panel)


def test_the_numbers_are_those_of_the_diagnosis() -> None:
    found = diagnose_lr_sweep(study())
    best, edge = found["lr.best"].value, found["lr.unstable"].value
    assert best is not None
    assert edge is not None
    panel = lr_sweep_panel(study(), found, live=True)
    assert panel.controls["lr"].value == best
    for lr in LRS:
        panel.controls["lr"].value = lr
        assert f"{lr / best:.3g} x lr* ({best:.4g}); {lr / edge:.3g} x the unstable lr ({edge:.4g})." in said(panel)


NORMS = np.random.default_rng(0).lognormal(size=200)
STEADY = NORMS[20:]
"""Without the first tenth."""


@pytest.mark.parametrize("percentile", [50.0, 75.0, 90.0])
def test_the_words_are_what_numpy_says(percentile: float) -> None:
    panel = clipping_panel(one_trial(NORMS), percentile=percentile, live=True)
    threshold = np.percentile(STEADY, percentile)
    above = [step for step in range(200) if NORMS[step] > threshold]
    words = said(panel)
    assert f"percentile is {threshold:.4g}; it clips {len(above) / 200:.1%}, {len(above)} of 200 steps" in words
    first = re.search(r"steps: (\d+)", words)
    assert first is not None
    assert int(first[1]) == above[0]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (50, "50 steps of warmup are 5.0% of the baseline's 1,000: at most 5 % (50 steps, F3.14)"),
        (51, "above 5 %, 50 steps, so plan 1,051 steps (F3.14); below the cap of 10 %, 100."),
        (100, "so plan 1,100 steps"),
        (101, "101 steps of warmup are 10.1% of the baseline's 1,000: above the cap of 10 %, 100 steps (F3.10)."),
    ],
)
def test_both_limits_are_shares_of_the_baselines_steps(steps: int, words: str) -> None:
    panel = warmup_panel(warmups(*GOOD), live=True)
    panel.controls["steps"].value = steps
    assert words in said(panel)


def test_the_nearest_trial_is_that_of_the_nearest_lr_and_then_length() -> None:
    tried = (*GOOD, short(60, passes=False, multiple=20.0), short(90, passes=True, multiple=20.0))
    panel = warmup_panel(warmups(*tried), live=True)
    panel.controls["lr"].value = 2.0
    for steps, nearest in (
        (0, "60 steps to lr 2, a short trial that does not train"),
        (80, "90 steps to lr 2, a short trial that trains"),
    ):
        panel.controls["steps"].value = steps
        assert nearest in said(panel)
        assert "lr 2 is 20 x the one that is unstable without warmup (0.1)" in said(panel)


ARMS: dict[int | None, list[float]] = {8: [0.6, 0.7], 64: [0.5, 0.53], None: [0.5, 0.4]}


@pytest.mark.parametrize(
    ("hosts", "asked", "words"),
    [
        (1, 64, "256 examples on each: 1 statistic a step from 64 examples. No host needs another's"),
        (4, 64, "64 examples on each: 4 statistics a step from 64 examples each. No host needs another's"),
        (4, 16, "4 statistics a step from 16 examples each"),
        (
            16,
            64,
            "16 examples on each: 4 statistics a step from 64 examples each. A host has too few: synchronise 4 at a time",
        ),
        (16, 256, "1 statistic a step from 256 examples. A host has too few: synchronise 16 at a time"),
    ],
)
def test_who_shares_a_statistic(hosts: int, asked: int, words: str) -> None:
    panel = batch_norm_panel(batch_size=256, live=True)
    panel.controls["hosts"].value, panel.controls["stat_examples"].value = hosts, asked
    assert words in said(panel)
    assert ("synchronise" in said(panel)) == (asked > 256 / hosts)


CURVE = [2.0, 1.5, 1.6, 1.7, 1.0, 1.1, 1.2, 1.3, 1.4, 0.5, 0.6]
"""Evaluated every 100 steps: best at 900; patience 2 ends at 300 with 1.5, patience 4 at 800 with 1.0, patience 5 never."""


@pytest.mark.parametrize(
    ("patience", "words"),
    [
        (2, "stops at step 300 of 1,000 and keeps 1.5 of step 100: it saves 70% of the steps and loses 66.7% of what was learned against the best of the full budget, 0.5 at step 900."),
        (4, "stops at step 800 of 1,000 and keeps 1 of step 400: it saves 20% of the steps and loses 33.3%"),
        (5, "never stops and keeps 0.5 of step 900, the best of the full budget: it saves 0% and loses nothing."),
    ],
)  # fmt: skip
def test_what_patience_keeps_and_costs(patience: int, words: str) -> None:
    panel = checkpoints_panel(evaluated([CURVE]), live=True)
    panel.controls["patience"].value = patience
    assert words in said(panel)


@pytest.mark.parametrize(
    ("step", "words"), [(10, "At step 10: 7 (wrong), loss 1."), (20, "At step 20: 4 (right), loss 0.6667.")]
)
def test_what_was_predicted_at_a_step(step: int, words: str) -> None:
    panel = predictions_panel(predicted(), live=True)
    panel.controls["step"].value = step
    assert words in said(panel)
    assert "The prediction changed 1 time; right from step 20 to the end." in said(panel)
