"""The sweep's panel on a quadratic, whose edge is known: 2 (1 + momentum) / curvature."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers.panels import said
from tests.helpers.records import LRS, study
from tests.helpers.simulated_records import record, trial
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.panel import lr_sweep_panel

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
        assert ("stable" if factor < 1 else "unstable") in words or "diverged" in words
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


def test_a_sweep_in_which_all_diverged_has_no_best() -> None:
    words = said(lr_sweep_panel(quadratic(8.0, 16.0), live=True))
    assert "diverged; lr* not measured; unstable not found." in words
