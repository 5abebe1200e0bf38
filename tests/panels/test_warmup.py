"""The warmup panel: shares of the baseline's steps by arithmetic, and the trial that is nearest by hand."""

from __future__ import annotations

import pytest

from tests.helpers.panels import said
from tests.topics.test_warmup import GOOD, short, study
from workbench.topics.warmup.diagnose import diagnose_warmup
from workbench.topics.warmup.panel import warmup_panel


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
    panel = warmup_panel(study(*GOOD), live=True)
    panel.controls["steps"].value = steps
    assert words in said(panel)


def test_the_nearest_trial_is_that_of_the_nearest_lr_and_then_length() -> None:
    tried = (*GOOD, short(60, passes=False, multiple=20.0), short(90, passes=True, multiple=20.0))
    panel = warmup_panel(study(*tried), live=True)
    panel.controls["lr"].value = 2.0
    for steps, nearest in (
        (0, "60 steps to lr 2, a short trial that does not train"),
        (80, "90 steps to lr 2, a short trial that trains"),
    ):
        panel.controls["steps"].value = steps
        assert nearest in said(panel)
        assert "lr 2 is 20 x the one that is unstable without warmup (0.1)" in said(panel)


def test_it_starts_at_the_shortest_warmup_of_the_diagnosis() -> None:
    made = study(*GOOD)
    panel = warmup_panel(made, diagnose_warmup(made), live=True)
    assert (panel.controls["steps"].value, panel.controls["lr"].value) == (20, 1.0)
    assert "20 steps to lr 1, a run of the full budget that trains." in said(panel)
