from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.diagnostics.fix_runs import fix_trials, is_harmful
from workbench.diagnostics.lr_points import sweep_table


def run(level, total=200):
    return level + (2.3 - level) * np.exp(-np.arange(total) / 20)


BLOWN = np.r_[2.3, 50.0, np.inf]


def study(fix_loss=None, lr=1.5):
    trials = [trial(run(0.9), 0.1), trial(run(0.5), 0.5), trial(BLOWN, 1.0)]
    if fix_loss is not None:
        trials.append(trial(fix_loss, lr, stage="fix", warmup_steps=20))
    return record(trials, total_steps=200)


@pytest.mark.parametrize(("loss", "harmful"), [
    (None, None), (run(0.3), True), (run(0.499), False), (run(0.7), False), (BLOWN, False),
])  # fmt: skip
def test_harmful_means_that_a_fix_beats_the_loss_at_lr_star(loss, harmful):
    r = study(loss)
    assert is_harmful(sweep_table(r), fix_trials(r, above=0.75)) is harmful


def test_rows_say_what_was_changed_and_what_came_of_it():
    (row,) = fix_trials(study(run(0.3)), above=0.75)
    assert (row["lr"], row["warmup_steps"], row["max_grad_norm"], row["lasting"]) == (1.5, 20, None, False)
    assert row["loss"] == pytest.approx(0.3, abs=1e-3)


def test_only_runs_above_the_unstable_lr_count():
    assert fix_trials(study(run(0.3), lr=0.7), above=0.75) == []
