from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.curves.judged import judged
from workbench.curves.sweep import objective, paired_difference


def noisy_sweep(levels, *, seeds=3, total=400, sd=0.1, seed_sd=0.0):
    """Runs that fall from 2.3 to `levels[lr]`; runs of one seed share the noise of their batches."""
    trials = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        batch_noise, offset = sd * rng.standard_normal(total), seed_sd * rng.standard_normal()
        for lr, level in levels.items():
            loss = level + offset + (2.3 - level) * np.exp(-np.arange(total) / 30) + batch_noise
            loss = loss + 0.01 * rng.standard_normal(total)
            trials.append(trial(loss, lr, seed=seed, columns={"loss_se": np.full(total, sd)}))
    return record(trials, total_steps=total, full_batch=False)


def test_objective_is_the_mean_of_the_last_tenth():
    loss = np.random.default_rng(0).standard_normal(200)
    good, bad = judged(record([trial(loss, 0.1), trial([1.0, np.nan], 0.2)], total_steps=200)).curves
    assert objective(good) == pytest.approx(loss[180:].mean())
    assert objective(bad) == math.inf


def test_pairing_removes_the_noise_that_two_trials_share():
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(1000)
    one = shared + 0.3 + 0.01 * rng.standard_normal(1000)
    a, b = judged(record([trial(one, 0.1), trial(shared, 0.2)], full_batch=False)).curves
    mean, se = paired_difference(a, b)
    assert mean == pytest.approx(0.3, abs=0.01)
    assert se < 0.005


def test_standard_error_of_correlated_noise_is_honest():
    """The spread over 200 simulated runs is the truth that the standard error of one run is held against."""
    means, errors = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        noise = np.convolve(rng.standard_normal(2100), np.ones(8) / 8, mode="same")[:2000]
        a, b = judged(record([trial(noise, 0.1), trial(np.zeros(2000), 0.2)], full_batch=False)).curves
        mean, se = paired_difference(a, b)
        means.append(mean)
        errors.append(se)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.2)


def test_full_batches_have_no_error_and_divergence_is_infinite():
    trials = [trial(np.linspace(2, 1, 100), 0.1), trial(np.linspace(2, 0, 100), 0.2), trial([2.0, np.nan], 9.0)]
    a, b, c = judged(record(trials, total_steps=100)).curves
    assert paired_difference(a, b)[1] == 0.0
    assert paired_difference(c, b) == (math.inf, 0.0)
    assert paired_difference(b, c) == (-math.inf, 0.0)


def test_table_of_a_noisy_sweep():
    table = judged(noisy_sweep({0.01: 0.9, 0.02: 0.5, 0.04: 0.5001, 0.08: 0.8}, seed_sd=0.2)).sweep()
    assert [p.lr for p in table.points] == [0.01, 0.02, 0.04, 0.08]
    assert table.points[table.best].lr in (0.02, 0.04)
    assert table.points[0].above_best == pytest.approx(0.4, abs=0.02)  # the seeds' offsets cancel
    assert table.points[0].above_best_se < 0.02
    assert table.points[0].loss_se > 0.03  # but not in the loss itself
    assert table.points[0].seeds == (0, 1, 2)


def test_the_same_lr_and_seed_twice_counts_once():
    loss = np.linspace(2, 1, 100)
    table = judged(record([trial(loss, 0.1, stage="baseline"), trial(loss, 0.1), trial(loss, 0.2)])).sweep()
    assert [p.trials for p in table.points] == [(0,), (2,)]


def test_no_progress_at_any_lr_has_no_best():
    rng = np.random.default_rng(0)
    trials = [
        trial(1 + 0.1 * rng.standard_normal(300), lr, columns={"loss_se": np.full(300, 0.1)}) for lr in (0.1, 0.2, 0.4)
    ]
    assert judged(record(trials, full_batch=False)).sweep().best is None
    assert judged(record([trial([2.0, np.nan], lr) for lr in (1.0, 2.0)], total_steps=50)).sweep().best is None
    assert judged(record([])).sweep().best is None


def test_huge_losses_do_not_overflow():
    loss = np.geomspace(1.0, 1e300, 100)
    table = judged(record([trial(loss, 2.0), trial(1 / loss, 0.1)], full_batch=False)).sweep()
    assert table.points[table.best].lr == 0.1


def on_the_floor(seeds):
    """Runs that start where the smallest lr would keep them: nothing can be learned at any lr."""
    lam = np.geomspace(0.01, 1, 20)
    trials = []
    for seed in seeds:
        for lr in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
            rng = np.random.default_rng(seed)
            theta, loss = rng.standard_normal(20) * np.sqrt(0.01 * 0.01 / 2 / lam), []
            for _ in range(300):
                loss.append(0.5 * np.sum(lam * theta**2) * (1 + 0.2 * rng.standard_normal()))
                theta = theta - lr * (lam * theta + 0.1 * rng.standard_normal(20))
            trials.append(trial(loss, lr, seed=seed, columns={"loss_se": 0.2 * np.abs(loss)}))
    return record(trials, full_batch=False, total_steps=300)


def test_a_start_on_the_noise_floor_shows_nothing():
    found = [judged(on_the_floor([3 * k, 3 * k + 1, 3 * k + 2])).sweep().best for k in range(5)]
    assert found == [None] * 5


def test_very_noisy_runs_show_their_progress_by_their_lead_over_smaller_lrs():
    """The first loss alone is too noisy to tell, the paired differences are not."""
    rng = np.random.default_rng(0)
    start_noise = np.where(np.arange(400) < 40, 2.0, 0.05)
    trials = []
    for lr, level in ((0.01, 2.2), (0.02, 1.9), (0.04, 1.2)):
        loss = level + (2.3 - level) * np.exp(-np.arange(400) / 30) + 0.05 * rng.standard_normal(400)
        trials.append(trial(loss, lr, columns={"loss_se": start_noise}))
    table = judged(record(trials, full_batch=False)).sweep()
    assert table.points[table.best].lr == 0.04
