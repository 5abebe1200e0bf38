"""What each panel says and draws, against closed forms, NumPy and the diagnosis of the same record."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.panels import said
from tests.helpers.records import LRS, one_trial, study
from tests.helpers.simulated_records import record, trial
from tests.topics.test_warmup import GOOD, short
from tests.topics.test_warmup import study as warmups
from workbench.topics.clipping.panel import clipping_panel
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.panel import lr_sweep_panel
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
        told = re.search(r"([\d.]+)× the unstable lr", words)
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
        assert f"{lr / best:.3g}× the best lr ({best:.4g}); {lr / edge:.3g}× the unstable lr ({edge:.4g})." in said(
            panel
        )


def test_the_recommendation_kept_with_a_study_is_told(tmp_path: Path) -> None:
    advised = {"adopted": True, "proof": {"alpha": 0.05}, "config": {"peak_lr": LRS[1]}}
    kept = replace(diagnose_lr_sweep(study()), recommendation=advised)
    (tmp_path / "diagnosis.json").write_text(json.dumps(kept.to_dict()))
    panel = lr_sweep_panel(replace(study(), path=tmp_path), live=True)
    for lr, told in ((LRS[1], "; recommended."), (LRS[2], f"; recommended: {LRS[1]:.4g}.")):
        panel.controls["lr"].value = lr
        assert said(panel).strip().endswith(told)


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
