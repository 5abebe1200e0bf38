"""The panel of checkpoints: a curve whose stopping step can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.panels import said
from tests.helpers.simulated_checkpoints import evaluated
from workbench.topics.checkpoints.panel import checkpoints_panel

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


def test_a_checkpoint_is_held_against_the_best() -> None:
    panel = checkpoints_panel(evaluated([CURVE]), live=True)
    assert "The checkpoint of step 1,000 has 0.6, the best one 0.5 (step 900): 0.1 apart." in said(panel)
    panel.controls["step"].value = 900
    assert "The checkpoint of step 900 is the best: 0.5." in said(panel)


def test_over_several_runs_it_says_the_mean_and_the_worst() -> None:
    panel = checkpoints_panel(evaluated([CURVE, np.linspace(2, 1, 11)]), patience=2, live=True)
    assert "Over 2 runs: saves 35% of the steps, loses 33.3% of what was learned, 66.7% in the worst." in said(panel)
    panel.controls["trial"].value = 1
    assert "Trial 1 never stops and keeps 1 of step 1,000" in said(panel)
