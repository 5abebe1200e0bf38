from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.curves.judged import judged
from workbench.curves.trial_curves import full_length, initial_losses, judge

FALLING = np.linspace(2.0, 1.0, 50)


@pytest.mark.parametrize(("optimizer", "memory"), [
    ("sgd", 0.0), ("nesterov", 0.7), ("rmsprop", 0.7), ("adam", 0.6), ("nadam", 0.6), ("adamw", 0.6), ("mine:opt", 0.9),
])  # fmt: skip
def test_memory_of_each_rule(optimizer, memory):
    r = record([trial(FALLING, 0.1)], momentum=0.7, beta1=0.6)
    r.trials["optimizer"] = optimizer
    assert judged(r).curves[0].memory == memory


def test_failed_trials_and_trials_without_rows_are_left_out():
    r = record([trial(FALLING, 0.1, state="failed"), trial(FALLING, 0.2), trial(FALLING, 0.3)])
    r.steps = r.steps[r.steps["trial"] != 2]
    assert [c.lr for c in judged(r).curves] == [0.2]
    assert judged(record([])).curves == []


def test_full_length_keeps_one_config():
    trials = [
        trial(FALLING, 0.1, stage="baseline"),
        trial(FALLING, 0.2, seed=1),
        trial(FALLING, 0.3, eval_every_steps=7),
        trial(FALLING, 0.4, warmup_steps=5),
        trial(FALLING, 0.5, max_grad_norm=1.0),
        trial(FALLING, 0.6, stage="fix"),
        trial(FALLING[:20], 0.7, stage="probe", total_steps=20),
        trial(FALLING[:20], 0.8),
        trial(np.r_[FALLING[:5], np.inf], 0.9, stage="confirm"),
    ]
    r = record(trials, total_steps=50)
    assert [c.lr for c in judged(r).full_length] == [0.1, 0.2, 0.3, 0.9]


def test_without_a_matching_baseline_the_longest_trials_count():
    r = record([trial(FALLING, 0.1), trial(FALLING, 0.2), trial(FALLING[:20], 0.3, total_steps=20)], total_steps=50)
    assert [c.lr for c in full_length(judged(r).curves, r.config | {"total_steps": 999})] == [0.1, 0.2]


def test_what_can_be_learned_is_the_best_end_at_the_length_of_a_run():
    down = np.linspace(2, 0, 50)
    trials = [trial(FALLING, 0.1), trial(down, 0.2), trial([2.0, np.inf], 9.0)]
    curves = judged(record([*trials, trial(FALLING[:20], 0.3, stage="probe", total_steps=20)], total_steps=50)).curves
    long, short = (judge([curves[k]], curves[:3])[0].verdict.progress for k in (0, 3))
    assert long == pytest.approx(2 - np.median(down[-5:]))
    assert short == pytest.approx(2 - np.median(down[18:20]))
    assert judge([curves[0]], curves[:1])[0].verdict.progress < 2 - FALLING[-1] + 1e-9, "one run sets no scale"


def test_initial_loss_averages_seeds_only_where_they_agree():
    se = np.full(50, 0.1)
    near = [trial(FALLING + d, 0.1, seed=i, columns={"loss_se": se}) for i, d in enumerate((0.0, 0.2))]
    curves = judged(record(near, full_batch=False)).curves
    assert initial_losses(curves, curves)[0] == pytest.approx(2.1)
    far = [trial(FALLING + d, 0.1, seed=i, columns={"loss_se": se}) for i, d in enumerate((0.0, 20.0))]
    curves = judged(record(far, full_batch=False)).curves
    assert initial_losses(curves, curves)[0] == 2.0


def test_a_study_knows_that_a_run_never_trained():
    stuck = np.full(50, 2.0)
    r = record([trial(FALLING, 0.1), trial(stuck, 0.001), trial(stuck, 5.0)])
    curves = judged(r).curves
    slow, fast = judge(curves, curves)[1:]
    assert slow.verdict.high
    assert not slow.is_lasting(lr_star=0.1)  # too small an lr is slow, not unstable
    assert fast.is_lasting(lr_star=0.1)
    assert not fast.is_lasting()
