"""The verdict on one curve, held against closed-form stability limits and simulations with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_curves import EDGE, catapult, least_squares, noisy_decay, quadratic, tanh_net
from workbench.curves.classify import classify_curve

RULES = [("sgd", 0.0), ("nesterov", 0.9), ("momentum", 0.8), ("momentum", 0.9), ("adam", 0.9)]


def on_quadratic(rule, memory, frac, total, seed):
    loss = quadratic(rule, frac * EDGE[rule](memory), total, memory=memory, seed=seed)
    return classify_curve(loss, full_batch=True, total_steps=total, memory=memory)


@pytest.mark.parametrize("total", [100, 300])
@pytest.mark.parametrize(("rule", "memory"), RULES)
def test_quadratic_is_lasting_unstable_exactly_above_the_edge(rule, memory, total):
    for seed in range(3):
        for frac in (0.05, 0.5, 0.8, 0.95, 0.99):
            assert not on_quadratic(rule, memory, frac, total, seed).is_lasting, (frac, seed)
        for frac in (1.025, 1.05, 1.2, 2.0):
            verdict = on_quadratic(rule, memory, frac, total, seed)
            assert verdict.outcome == "divergent", (frac, seed, verdict)


@pytest.mark.parametrize("total", [100, 300])
@pytest.mark.parametrize(("rule", "memory", "fracs"), [
    ("sgd", 0.0, (0.05, 0.5, 0.9, 0.99)), ("nesterov", 0.9, (0.05, 0.5, 0.9, 0.99)), ("momentum", 0.9, (0.05, 0.5, 0.8)),
])  # fmt: skip
def test_stable_quadratic_shows_no_rise_at_all(rule, memory, fracs, total):
    verdicts = [on_quadratic(rule, memory, f, total, seed) for f in fracs for seed in range(5)]
    assert {v.when for v in verdicts} == {"none"}


@pytest.mark.parametrize(("a", "when", "outcome"), [
    (1.0, "none", "none"), (1.5, "none", "none"), (1.8, "none", "none"), (2.2, "early", "recovered"),
    (3.0, "early", "recovered"), (3.8, "early", "recovered"), (4.2, "early", "divergent"),
    (4.5, "early", "divergent"), (5.0, "early", "divergent"),
])  # fmt: skip
def test_catapult(a, when, outcome):
    for seed in range(5):
        verdict = classify_curve(catapult(a, 300, seed=seed), full_batch=True, total_steps=300)
        assert (verdict.when, verdict.outcome) == (when, outcome)
        assert verdict.onset_step == (None if when == "none" else 0)


@pytest.mark.parametrize(("scale", "offset"), [(1e-2, 0.0), (1e4, 0.0), (1.0, -1000.0), (1e4, 1e6)])
@pytest.mark.parametrize("a", [1.5, 3.0, 4.5])
def test_scale_and_offset_of_the_loss_change_nothing(a, scale, offset):
    loss = catapult(a, 300, seed=2)
    plain = classify_curve(loss, full_batch=True, total_steps=300)
    moved = classify_curve(scale * loss + offset, full_batch=True, total_steps=300)
    assert (moved.when, moved.outcome, moved.onset_step) == (plain.when, plain.outcome, plain.onset_step)


@pytest.mark.parametrize(("rule", "memory"), [("sgd", 0.0), ("momentum", 0.9), ("nesterov", 0.9)])
def test_curvature_doubled_halfway_is_mid_and_divergent_at_that_step(rule, memory):
    for frac in (0.6, 0.9):
        for seed in range(5):
            loss = quadratic(rule, frac * EDGE[rule](memory), 300, memory=memory, seed=seed, noise=0.01, double_at=150)
            verdict = classify_curve(loss, total_steps=300, memory=memory)
            assert (verdict.when, verdict.outcome) == ("mid", "divergent")
            assert verdict.onset_step == pytest.approx(150, abs=20)


@pytest.mark.parametrize("batch", [4, 16])
def test_minibatch_least_squares_is_never_lasting_below_the_mean_square_edge(batch):
    edge = 2 * batch / (batch + 2)
    for frac in (0.5, 0.8, 0.95):
        for seed in range(10):
            loss, se = least_squares(frac * edge, 300, batch=batch, seed=seed)
            assert not classify_curve(loss, loss_se=se).is_lasting
    for seed in range(10):
        loss, se = least_squares(2.6 * edge, 300, batch=batch, seed=seed)
        assert classify_curve(loss, loss_se=se, total_steps=300).is_lasting


@pytest.mark.parametrize(("lr", "seed"), [(0.2, 1), (0.18, 3)])
def test_ripple_at_the_edge_of_stability_is_healthy(lr, seed):
    loss = tanh_net(lr, 1200, seed=seed)
    assert (np.diff(loss) > 0).sum() > 100  # it does ripple
    assert classify_curve(loss, full_batch=True).when == "none"


@pytest.mark.parametrize("rate", [1.0, 6.0, 30.0])
@pytest.mark.parametrize("sd", [0.05, 0.15, 0.5])
def test_noisy_healthy_runs_raise_no_alarm_with_or_without_known_noise(rate, sd):
    for seed in range(10):
        for total in (100, 1000):
            loss, se = noisy_decay(total, seed=seed, sd=sd, rate=rate)
            assert classify_curve(loss, loss_se=se).when == "none"
            assert classify_curve(loss).when == "none"


@pytest.mark.parametrize("shape", ["ripple", "plateau", "restarts", "outlier"])
def test_uneven_healthy_curves_raise_no_alarm(shape):
    t = np.arange(1000)
    loss = 0.3 + 2 * np.exp(-t / 200)
    loss += {
        "ripple": 0.1 * np.sin(t / 10) * np.exp(-t / 300),
        "plateau": np.where((t > 300) & (t < 600), 2 * np.exp(-1.5) - 2 * np.exp(-t / 200), 0.0),
        "restarts": 0.2 * (t % 250 < 30),
        "outlier": 500.0 * (t == 400),
    }[shape]
    loss += 0.02 * np.random.default_rng(0).standard_normal(1000)
    assert classify_curve(loss, loss_se=np.full(1000, 0.02)).when == "none"


def _planted(step, back, total=1000, height=2.0):
    """A noisy healthy run whose loss jumps at `step` and decays back with time constant `back` (None: stays)."""
    loss, se = noisy_decay(total, seed=3)
    after = np.arange(total) - step
    rise = height * (np.exp(-after / back) if back else np.ones(total))
    return loss + np.where(after > 0, rise, 0.0), se


@pytest.mark.parametrize(("step", "back", "when", "outcome"), [
    (20, 20.0, "early", "recovered"), (300, 20.0, "mid", "recovered"), (600, None, "mid", "divergent"),
    (600, 400.0, "mid", "settling"),
])  # fmt: skip
def test_planted_jumps_are_found_at_their_step(step, back, when, outcome):
    loss, se = _planted(step, back)
    for curve_se in (se, None):
        verdict = classify_curve(loss, loss_se=curve_se, study_best_end=0.4, study_progress=1.9)
        assert (verdict.when, verdict.outcome) == (when, outcome)
        assert verdict.onset_step == pytest.approx(step, abs=10)
        assert verdict.peak_loss > 2.0


def test_a_rise_that_stays_below_the_start_is_lasting():
    loss, se = _planted(600, None, height=1.2)
    assert classify_curve(loss, loss_se=se).outcome == "lasting"


def test_two_rises_far_apart_are_both_reported():
    loss, _ = _planted(300, 15.0)
    loss += np.where(np.arange(1000) > 700, 2.0 * np.exp(-(np.arange(1000) - 700) / 15), 0.0)
    rises = classify_curve(loss).rises
    assert [round(r.onset_step, -2) for r in rises] == [300, 700]
    assert all(r.steps_to_recover < 100 for r in rises)


def test_never_rising_but_high_is_said_and_only_a_study_can_know_it():
    loss = 2.3 + 0.01 * np.random.default_rng(0).standard_normal(400)
    verdict = classify_curve(loss, study_best_end=0.1, study_progress=2.2)
    assert (verdict.outcome, verdict.high) == ("none", True)
    assert "ends where it began" in verdict.reason


def test_non_finite_losses():
    falling = np.linspace(2.0, 1.0, 50)
    skipped = falling.copy()
    skipped[[0 + 1, 2, 30]] = np.nan  # a loss scaler skips steps
    assert classify_curve(skipped, full_batch=True).when == "none"
    blown = classify_curve(np.append(falling, np.nan), full_batch=True, total_steps=100)
    assert (blown.when, blown.outcome, blown.onset_step) == ("mid", "divergent", 49)
    assert blown.end_loss == np.inf
    at_once = classify_curve([2.0, 1e9, np.inf], full_batch=True, total_steps=100)
    assert (at_once.when, at_once.outcome, at_once.onset_step) == ("early", "divergent", 0)
    broken = classify_curve([np.nan], total_steps=100)
    assert broken.outcome == "divergent"
    assert "not the cause" in broken.reason


@pytest.mark.parametrize("loss", [[], [1.0], [3.0, 2.0, 1.0]])
def test_too_short_is_not_measured(loss):
    assert classify_curve(loss).outcome == "not_measured"


@pytest.mark.parametrize("value", [0.0, 2.3, -1000.0])
def test_constant_is_no_instability(value):
    jitter = 1e-7 * abs(value) * np.random.default_rng(0).standard_normal(200)  # float32
    for full_batch in (True, False):
        assert classify_curve(value + jitter, full_batch=full_batch).when == "none"


def test_early_is_judged_by_the_planned_length():
    loss = np.r_[np.linspace(2, 1, 40), np.geomspace(1, 1e6, 20), np.inf]
    assert classify_curve(loss, full_batch=True, total_steps=1000).when == "early"
    assert classify_curve(loss, full_batch=True, total_steps=100).when == "mid"


@pytest.mark.parametrize("memory", [0.9, 0.999])
def test_a_memory_longer_than_the_run_excuses_no_rise_after_half_of_it(memory):
    """Momentum 0.999 may swing for 5,000 steps; a run of 300 that still does at step 200 has not settled."""
    steps = np.arange(300)
    loss = 0.5 + 1.8 * np.exp(-steps / 30) + 1.2 * np.exp(-(((steps - 200) / 12.0) ** 2))
    verdict = classify_curve(loss, full_batch=True, memory=memory)
    assert (verdict.when, verdict.outcome) == ("mid", "recovered")
