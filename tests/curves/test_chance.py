"""Models that begin confidently wrong: what counts as learned is what lies below the loss of guessing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.curves.classify import classify_curve
from workbench.curves.judged import judged
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep

TOTAL, CHANCE, START = 400, math.log(10), 180.0


def decay(end: float, *, start: float = START, seed: int = 0) -> np.ndarray:
    """From `start` to `end` within a few dozen steps, with the noise of minibatches."""
    rng = np.random.default_rng(seed)
    return end + (start - end) * np.exp(-np.arange(TOTAL) / 5) + 0.01 * rng.standard_normal(TOTAL)


def sweep(chance: float | None):
    """Two lrs train, two end at chance, as a network whose units have all died does."""
    ends = {0.01: 0.3, 0.02: 0.1, 0.2: CHANCE, 0.4: CHANCE + 0.01}
    trials = [trial(decay(end), lr, columns={"loss_se": np.full(TOTAL, 0.01)}) for lr, end in ends.items()]
    facts = {} if chance is None else {"chance_loss": chance}
    return record(trials, total_steps=TOTAL, full_batch=False, facts=facts)


def test_runs_that_end_at_chance_never_trained() -> None:
    table = judged(sweep(CHANCE)).sweep()
    assert [bool(point.lasting) for point in table.points] == [False, False, True, True]
    assert table.progress == pytest.approx(CHANCE - 0.1, abs=0.02)
    found = diagnose_lr_sweep(sweep(CHANCE))
    assert found["lr.best"].value == pytest.approx(0.02)
    assert 0.02 < found["lr.unstable"].value <= 0.2


def test_a_rise_back_to_chance_is_seen_below_it() -> None:
    loss = decay(0.1)
    loss[200:] += CHANCE - 0.1
    seen = classify_curve(loss, loss_se=np.full(TOTAL, 0.01), loss_ref=START, chance=CHANCE)
    assert (seen.when, seen.is_lasting) == ("mid", True)
    assert abs(seen.onset_step - 200) <= 5
    unseen = classify_curve(loss, loss_se=np.full(TOTAL, 0.01), loss_ref=START)
    assert unseen.when == "none"


def test_where_nothing_comes_below_chance_nothing_was_learned() -> None:
    trials = [trial(decay(CHANCE + 0.5, seed=k), lr) for k, lr in enumerate((0.01, 0.1))]
    found = record(trials, total_steps=TOTAL, full_batch=False, facts={"chance_loss": CHANCE})
    assert judged(found).sweep().best is None
    assert diagnose_lr_sweep(found)["lr.best"].status == "not_measured"
