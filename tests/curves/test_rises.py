from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.helpers.simulated_curves import catapult, noisy_decay
from tests.helpers.simulated_records import EVAL_COLUMNS, evaluations, record, trial
from workbench.curves.judged import judged
from workbench.curves.rise_causes import confirmation, rise_cause, seen_at_interval
from workbench.curves.trial_curves import judge

NO_EVALS = pd.DataFrame(columns=EVAL_COLUMNS)
AT = 500


def judged_curve(loss, **columns):
    r = record([trial(loss, 0.1, columns=columns)], full_batch="loss_se" not in columns)
    return judge(judged(r).curves, [])[0]


def spiked(start=AT + 3):
    loss, se = noisy_decay(1000, seed=1, sd=0.03)
    after = np.arange(1000) - start
    return loss + np.where(after >= 0, 2.0 * np.exp(-np.maximum(after, 0) / 15), 0.0), se


def norms(shape):
    g = 1.0 + 0.1 * np.random.default_rng(0).random(1000)
    if shape == "jump":
        g[AT] = 40.0
    if shape == "growth":
        g[AT - 1 : AT + 6] *= np.geomspace(1.5, 60, 7)
    return g


@pytest.mark.parametrize(("shape", "cause"), [("jump", "data"), ("growth", "curvature"), ("quiet", None)])
def test_gradient_norm_names_the_cause(shape, cause):
    loss, se = spiked()
    item = judged_curve(loss, loss_se=se, grad_norm=norms(shape))
    found = rise_cause(item.curve, item.verdict.rises[0])
    assert found["cause"] == cause
    if shape == "jump":  # F1.9: the outlier precedes the jump of the loss
        assert found["outlier_step"] == AT
        assert found["jump_step"] == AT + 3
        assert found["lead_steps"] == 3
        assert found["outlier_ratio"] == pytest.approx(40, rel=0.1)


def test_schedule_and_optimizer_state():
    loss, se = spiked(AT + 1)
    lr = np.where(np.arange(1000) < AT, 0.1, 4.0)
    item = judged_curve(loss, loss_se=se, grad_norm=norms("jump"), lr=lr)
    assert rise_cause(item.curve, item.verdict.rises[0])["cause"] == "schedule"
    item = judged_curve(loss, loss_se=se, grad_norm=norms("quiet"), update_norm=norms("jump"))
    assert rise_cause(item.curve, item.verdict.rises[0])["cause"] == "optimizer_state"


def test_only_evaluating_at_every_step_shows_an_early_catapult():
    item = judged_curve(catapult(3.0, 500, seed=1))
    steps = np.arange(501)
    values = np.append(item.curve.loss, item.curve.loss[-1])
    table = pd.DataFrame(evaluations(0, steps, values))
    assert seen_at_interval(item, table, 100) == {
        "interval": 100, "missed": True, "source": "train loss evaluated at every step",
    }  # fmt: skip
    assert not seen_at_interval(item, table, 1)["missed"]
    assert seen_at_interval(item, NO_EVALS, 100)["source"] == "training loss of every step"


@pytest.mark.parametrize(("shape", "expected", "step"), [
    ("rise", "rise after decline", 300), ("decline", "monotone decline", None), ("stuck", "never declined", None),
    ("blown", "never declined", None), ("catapult", "rise at the start, then decline", None),
])  # fmt: skip
def test_confirmation_runs_are_told_apart(shape, expected, step):
    t = np.arange(1000)
    fall = 0.3 + 2 * np.exp(-t / 60)
    loss = {
        "rise": np.where(t > 300, 3.0, fall),
        "decline": fall,
        "stuck": np.full(1000, 2.3),
        "blown": np.r_[2.3, 40.0, 900.0, np.inf],
        "catapult": catapult(3.0, 1000, seed=1),
    }[shape]
    trials = [trial(fall, 0.1), trial(loss, 0.5, stage="confirm")]
    curves = judged(record(trials, total_steps=1000)).curves
    peers = curves if shape != "catapult" else curves[1:]
    row = confirmation(judge(curves, peers)[1], lr_star=0.1)
    assert (row["shape"], row["jump_step"], row["times_lr_star"]) == (expected, step, 5.0)
