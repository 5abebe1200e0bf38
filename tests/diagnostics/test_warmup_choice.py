"""A warmup against the limits of F3, by arithmetic, and against what was tried."""

from __future__ import annotations

import pytest

from tests.diagnostics.test_warmup import GOOD, short, study
from workbench.topics.warmup.choice import tried_warmups, warmup_choice
from workbench.topics.warmup.diagnose import diagnose_warmup


def test_shares_are_of_the_baseline_before_the_warmup_is_prepended() -> None:
    made = study(*GOOD)
    choice = warmup_choice(made, diagnose_warmup(made), steps=80, lr=1.0)
    assert (choice.lengthen_from, choice.cap, choice.share) == (50, 100, 0.08)
    assert choice.unstable_lr == 0.1
    assert "so plan 1,080 steps (F3.14)" in choice.words


def test_every_length_is_there_once_with_its_longest_run() -> None:
    tried = tried_warmups(diagnose_warmup(study(*GOOD)))
    assert [(one.steps, one.full, one.passes) for one in tried] == [(10, False, False), (20, True, True)]


@pytest.mark.parametrize(
    ("steps", "lr", "nearest"), [(0, 1.0, (10, 1.0)), (19, 1.0, (20, 1.0)), (500, 3.0, (40, 2.0)), (0, 0.5, (10, 1.0))]
)
def test_the_nearest_is_by_ratio_of_the_lr_and_then_by_length(
    steps: int, lr: float, nearest: tuple[int, float]
) -> None:
    made = study(*GOOD, short(40, passes=True, multiple=20.0))
    found = warmup_choice(made, diagnose_warmup(made), steps=steps, lr=lr).nearest
    assert found is not None
    assert (found.steps, found.lr) == nearest


def test_without_a_trial_there_is_no_nearest() -> None:
    made = study()
    choice = warmup_choice(made, diagnose_warmup(made), steps=5, lr=1.0)
    assert choice.nearest is None
    assert choice.words.endswith("No trial of a warmup was run.")
