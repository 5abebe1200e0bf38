"""A second moment out of date: held to torch's Adam, and found where it was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.helpers.simulated_records import record, trial
from workbench.topics.optimizers.stale_moment import shorter, stale_moments, staleness

TOTAL, AT = 600, 300
NORMS = np.where(np.arange(TOTAL) == AT, 10.0, 0.1)
FALLING = 0.1 + 1.9 * np.exp(-np.arange(TOTAL) / 40)
SPIKE = np.r_[FALLING[: AT + 1], np.full(60, 1.9), FALLING[AT + 61 :]]


@pytest.mark.parametrize("memory", [0.9, 0.999])
def test_it_is_the_length_of_adams_step_without_momentum(memory):
    rng = np.random.default_rng(0)
    norms = np.exp(rng.standard_normal(100))
    theta = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, lengths = torch.optim.Adam([theta], lr=1.0, betas=(0.0, memory), eps=0.0), []
    for norm in norms:
        before, theta.grad = float(theta.detach()), torch.full_like(theta, norm)
        optimizer.step()
        lengths.append(abs(float(theta.detach()) - before))
    assert staleness(norms, memory) == pytest.approx(lengths, rel=1e-9)


def test_steady_gradients_give_one_and_a_jump_at_most_the_root_of_the_memory():
    assert staleness(np.full(50, 3.0), 0.999) == pytest.approx(1.0)
    late = staleness(np.r_[np.full(20_000, 1e-9), 1.0], 0.999)
    assert late[-1] == pytest.approx(1 / math.sqrt(0.001), rel=1e-3)


def test_what_is_not_finite_or_zero_is_left_out():
    found = staleness([1.0, math.nan, 1.0, math.inf], 0.9)
    assert found[[0, 2]] == pytest.approx([1.0, 1.0])
    assert np.isnan(found[[1, 3]]).all()
    assert staleness([0.0, 0.0], 0.9) == pytest.approx([1.0, 1.0])
    assert staleness([], 0.9).size == 0


def study(loss, norms, **more):
    own = [trial(FALLING, lr, columns={"grad_norm": np.full(TOTAL, 0.1)}) for lr in (0.1, 0.2)]
    theirs = {"stage": "optimizers", "optimizer": "adam", "columns": {"grad_norm": norms}} | more
    healthy = trial(FALLING, 0.001, **{**theirs, "columns": {"grad_norm": np.full(TOTAL, 0.1)}})
    return record(
        [*own, healthy, trial(loss, 0.01, **theirs), trial(loss, 0.02, **theirs)], total_steps=TOTAL, peak_lr=0.1
    )


def test_the_planted_rise_is_found_at_its_smallest_lr():
    (hit,) = stale_moments(study(SPIKE, NORMS))
    assert (hit.trial.curve.lr, hit.trial.curve.trial, hit.field, hit.memory) == (0.01, 3, "beta2", 0.999)
    assert hit.step == AT
    assert abs(hit.rise.onset_step - AT) <= 1
    assert hit.ratio == pytest.approx(staleness(NORMS, 0.999)[AT])


@pytest.mark.parametrize(("loss", "norms", "more"), [
    (FALLING, NORMS, {}),
    (SPIKE, np.full(TOTAL, 0.1), {}),
    (SPIKE, np.roll(NORMS, 100), {}),
    (SPIKE, np.roll(NORMS, -50), {}),
    (SPIKE, np.full(TOTAL, np.nan), {}),
    (SPIKE, NORMS, {"optimizer": "nesterov"}),
    (SPIKE, NORMS, {"optimizer": "rmsprop"}),
    (np.full(TOTAL, np.nan), NORMS, {}),
    (SPIKE[:5], NORMS[:5], {}),
], ids=["no rise", "steady", "later", "long before", "no norms", "no second moment", "short memory", "nan", "short"])  # fmt: skip
def test_it_is_silent_otherwise(loss, norms, more):
    assert stale_moments(study(loss, norms, **more)) == []


def test_the_thresholds_are_arguments():
    r = study(SPIKE, NORMS)
    ratio = staleness(NORMS, 0.999)[AT]
    assert stale_moments(r, ratio=1.01 * ratio) == []
    assert stale_moments(r, min_memory_steps=2000) == []
    assert len(stale_moments(study(SPIKE, np.roll(NORMS, -50)), before_steps=60)) == 1


def test_ten_times_shorter():
    assert shorter(0.999, 10) == pytest.approx(0.99)
    assert shorter(0.99, 10) == pytest.approx(0.9)
