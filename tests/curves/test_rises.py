"""What can be said of a rise, of a run far above lr*, and of a fix beyond the edge: planted events and margins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.simulated_curves import catapult, noisy_decay
from tests.helpers.simulated_records import EVAL_COLUMNS, evaluations, record, trial
from workbench.curves.judged import is_harmful, judged, judged_runs
from workbench.curves.spikes import confirmation, rise_cause, seen_at_interval
from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trial_curves import judge

AT = 500


def judged_curve(loss, **columns):
    r = record([trial(loss, 0.1, columns=columns)], full_batch="loss_se" not in columns)
    return judge(judged(r).curves, [])[0]


def norms(shape):
    g = 1.0 + 0.1 * np.random.default_rng(0).random(1000)
    if shape == "jump":
        g[AT] = 40.0
    if shape == "growth":
        g[AT - 1 : AT + 6] *= np.geomspace(1.5, 60, 7)
    return g


STEPPED = np.where(np.arange(1000) < AT, 0.1, 4.0)


@pytest.mark.parametrize(("columns", "cause"), [
    ({"grad_norm": norms("jump")}, "data"), ({"grad_norm": norms("growth")}, "curvature"), ({"grad_norm": norms("quiet")}, None),
    ({"grad_norm": norms("jump"), "lr": STEPPED}, "schedule"), ({}, None),
    ({"grad_norm": norms("quiet"), "update_norm": norms("jump")}, "optimizer_state"),
])  # fmt: skip
def test_norms_and_lr_around_the_onset_name_the_cause(columns, cause):
    """F1.9: the outlier precedes the jump of the loss, here by three steps."""
    loss, se = noisy_decay(1000, seed=1, sd=0.03)
    start = AT + (1 if cause in ("schedule", "optimizer_state") else 3)
    loss[start:] += 2.0 * np.exp(-np.arange(1000 - start) / 15)
    item = judged_curve(loss, loss_se=se, **columns)
    found = rise_cause(item.curve, item.verdict.rises[0])
    assert found["cause"] == cause
    if cause == "data":
        assert (found["outlier_step"], found["jump_step"], found["lead_steps"]) == (AT, AT + 3, 3)
        assert found["outlier_ratio"] == pytest.approx(40, rel=0.1)


def test_only_evaluating_at_every_step_shows_an_early_catapult():
    item = judged_curve(catapult(3.0, 500, seed=1))
    table = pd.DataFrame(evaluations(0, np.arange(501), np.append(item.curve.loss, item.curve.loss[-1])))
    expected = {"interval": 100, "missed": True, "source": "train loss evaluated at every step"}
    assert seen_at_interval(item, table, 100) == expected
    assert not seen_at_interval(item, table, 1)["missed"]
    sparse = seen_at_interval(item, pd.DataFrame(columns=EVAL_COLUMNS), 100)
    assert sparse["source"] == "training loss of every step"


@pytest.mark.parametrize(("shape", "expected", "step"), [
    ("rise", "rise after decline", 300), ("decline", "monotone decline", None), ("stuck", "no clear decline", None),
    ("blown", "no clear decline", None), ("catapult", "rise at the start, then decline", None),
])  # fmt: skip
def test_confirmation_runs_are_told_apart(shape, expected, step):
    t = np.arange(1000)
    fall = 0.3 + 2 * np.exp(-t / 60)
    loss = {
        "rise": np.where(t > 300, 3.0, fall), "decline": fall, "stuck": np.full(1000, 2.3),
        "blown": np.r_[2.3, 40.0, 900.0, np.inf], "catapult": catapult(3.0, 1000, seed=1),
    }[shape]  # fmt: skip
    curves = judged(record([trial(fall, 0.1), trial(loss, 0.5, stage="confirm")], total_steps=1000)).curves
    peers = curves if shape != "catapult" else curves[1:]
    row = confirmation(judge(curves, peers)[1], lr_star=0.1)
    assert (row["shape"], row["jump_step"], row["times_lr_star"]) == (expected, step, 5.0)


def run(level, total=200):
    return level + (2.3 - level) * np.exp(-np.arange(total) / 20)


BLOWN = np.r_[2.3, 50.0, np.inf]


@pytest.mark.parametrize(("loss", "lr", "harmful"), [
    (None, 1.5, None), (run(0.3), 1.5, True), (run(0.499), 1.5, False), (run(0.7), 1.5, False), (BLOWN, 1.5, False),
    (run(0.3), 0.7, None),
])  # fmt: skip
def test_harmful_means_that_a_fix_beyond_the_edge_beats_the_loss_at_lr_star(loss, lr, harmful):
    trials = [trial(run(0.9), 0.1), trial(run(0.5), 0.5), trial(BLOWN, 1.0)]
    trials += [] if loss is None else [trial(loss, lr, stage="fix", warmup_steps=20)]
    r = record(trials, total_steps=200)
    assert is_harmful(judged(r).sweep(), judged_runs(r, ["fix"], above=0.75)) is harmful


def table(*, progress: float, se: float = 0.0, losses: Any = (1.0,), seeds: Any = (0,)) -> SweepTable:
    best = LRPoint(
        lr=0.5, loss=1.0, loss_se=se, above_best=0.0, above_best_se=0.0, seeds=seeds, losses=losses,
        outcomes=("none",) * len(seeds), lasting=0, trials=tuple(range(len(seeds))),
    )  # fmt: skip
    return SweepTable(
        points=(best,), noise_free=False, memory=0.0, loss_ref=1.0 + progress, progress=progress, learned=True, total_steps=200,
    )  # fmt: skip


def fix(loss: float, *, seed: int = 0, lasting: bool = False) -> dict[str, Any]:
    return {"loss": loss, "seed": seed, "lasting": lasting}


@pytest.mark.parametrize(("name", "known", "margin"), [
    ("noise_sds", table(se=0.05, progress=1.5), 0.1),  # 2 standard errors; the others ask for 0.02 and 0.015
    ("loss_tolerance", table(progress=1.5), 0.02),  # 2 % of the loss; what was learned asks for 0.015
    ("loss_tolerance", table(progress=0.5), 0.01),  # 2 % of what was learned, where that is less
    ("material_frac", table(progress=10.0), 0.1),  # 1 % of what was learned; the loss asks for 0.02
])  # fmt: skip
def test_each_margin_alone_decides(name: str, known: SweepTable, margin: float) -> None:
    """In each case one margin is the widest: a gain just inside is nothing, a gain just outside is harm."""
    assert is_harmful(known, [fix(1.0 - 0.99 * margin)]) is False
    assert is_harmful(known, [fix(1.0 - 1.01 * margin)]) is True
    assert is_harmful(known, [fix(1.0 - 0.99 * margin)], **{name: 0.0}) is True, "without it the next one decides"


def test_a_fix_is_held_against_its_own_seed_and_one_that_helps_is_enough() -> None:
    known = table(losses=(0.8, 1.2), seeds=(0, 1), progress=1.5)
    assert is_harmful(known, [fix(0.9, seed=0)]) is False
    assert is_harmful(known, [fix(0.9, seed=1)]) is True
    assert is_harmful(known, [fix(0.9, seed=7)]) is True, "a seed that lr* was not run with meets the mean"
    assert is_harmful(known, [fix(1.3), fix(0.5)]) is True
    assert is_harmful(known, [fix(0.5, lasting=True)]) is False
