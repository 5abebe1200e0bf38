"""The verdict on one curve, and what a study knows of it: against closed-form stability limits and simulations with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.simulated_curves import EDGE, catapult, least_squares, noisy_decay, quadratic, tanh_net
from tests.helpers.simulated_records import record, trial
from workbench.curves.instability import classify_curve
from workbench.curves.judged import judged
from workbench.curves.smoothing import noise_per_step, smooth
from workbench.curves.trial_curves import full_length, initial_losses, judge
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep

RULES = [("sgd", 0.0), ("nesterov", 0.9), ("momentum", 0.8), ("momentum", 0.9), ("adam", 0.9)]


def on_quadratic(rule, memory, frac, total, seed):
    loss = quadratic(rule, frac * EDGE[rule](memory), total, memory=memory, seed=seed)
    return classify_curve(loss, full_batch=True, total_steps=total, memory=memory)


@pytest.mark.parametrize("total", [100, 300])
@pytest.mark.parametrize(("rule", "memory"), RULES)
def test_quadratic_is_lasting_unstable_exactly_above_the_edge(rule, memory, total):
    for seed in range(3):
        for frac in (0.05, 0.5, 0.8, 0.95, 0.99):
            verdict = on_quadratic(rule, memory, frac, total, seed)
            assert not verdict.is_lasting, (frac, seed)
            swings = rule == "adam" or memory == 0.8 or (rule == "momentum" and frac > 0.8)
            assert verdict.when == "none" or swings, (frac, seed)
        for frac in (1.025, 1.05, 1.2, 2.0):
            verdict = on_quadratic(rule, memory, frac, total, seed)
            assert verdict.outcome == "divergent", (frac, seed, verdict)


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-2, 0.0), (1e4, 1e6), (1.0, -1000.0)])
@pytest.mark.parametrize(("a", "when", "outcome"), [
    (1.5, "none", "none"), (1.8, "none", "none"), (2.2, "early", "recovered"), (3.8, "early", "recovered"),
    (4.2, "early", "divergent"), (5.0, "early", "divergent"),
])  # fmt: skip
def test_catapults_at_any_scale_and_offset_of_the_loss(a, when, outcome, scale, offset):
    for seed in range(5):
        verdict = classify_curve(scale * catapult(a, 300, seed=seed) + offset, full_batch=True, total_steps=300)
        assert (verdict.when, verdict.outcome) == (when, outcome)
        assert verdict.onset_step == (None if when == "none" else 0)


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
    for frac, lasting in ((0.5, False), (0.8, False), (0.95, False), (2.6, True)):
        for seed in range(10):
            loss, se = least_squares(frac * edge, 300, batch=batch, seed=seed)
            assert classify_curve(loss, loss_se=se, total_steps=300).is_lasting is lasting


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


HEALTHY = {
    "usual": lambda u: 0.4 + 1.9 * np.exp(-6 * u), "slow": lambda u: 0.4 + 1.9 * np.exp(-u), "flat": lambda u: 2.3 + 0 * u,
    "to_zero": lambda u: 2.3 * np.exp(-6 * u), "stepwise": lambda u: 0.3 + 0.7 * (2.0 - (u > 0.3) - (u > 0.6)),
}  # fmt: skip
NOISES = {
    "normal": lambda s, rng: s + 0.15 * rng.standard_normal(s.size), "heavy": lambda s, rng: s + 0.1 * rng.standard_t(2, s.size),
    "relative": lambda s, rng: s * np.exp(0.4 * rng.standard_normal(s.size)),
    "wild": lambda s, rng: s * np.exp(0.8 * rng.standard_normal(s.size)),
}  # fmt: skip


@pytest.mark.parametrize("total", [10, 20, 40, 64, 128, 256, 1000])
def test_two_in_a_hundred_healthy_curves_rise_at_most_whatever_their_noise_and_length(total):
    """Noise that is unknown, heavy-tailed, or in proportion to the loss, which the noise of the whole run understates at its beginning."""
    rng, seen = np.random.default_rng(total), []
    for _ in range(25 if total < 1000 else 8):
        curves = [
            noisy(shape(np.arange(total) / total), rng) for shape in HEALTHY.values() for noisy in NOISES.values()
        ]
        seen += [classify_curve(loss).when != "none" for loss in curves]
    assert np.mean(seen) <= 0.02, f"{sum(seen)} of {len(seen)}"


@pytest.mark.parametrize(("total", "least"), [(40, 0.8), (128, 0.97), (1000, 0.97)])
@pytest.mark.parametrize("factor", [5.0, 20.0])
def test_a_loss_that_jumps_to_a_multiple_of_itself_is_found_in_noise_of_proportion(total, least, factor):
    rng, seen = np.random.default_rng(total), []
    for _ in range(40):
        base = HEALTHY["usual"](np.arange(total) / total) * np.where(np.arange(total) > total // 2, factor, 1.0)
        verdict = classify_curve(base * np.exp(0.1 * rng.standard_normal(total)))
        seen.append(verdict.is_lasting and abs((verdict.onset_step or 0) - total // 2) <= max(3, 0.05 * total))
    assert np.mean(seen) >= least, f"{sum(seen)} of {len(seen)}"


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


def test_a_rise_that_stays_below_the_start_is_lasting_and_two_far_apart_are_both_reported():
    loss, se = _planted(600, None, height=1.2)
    assert classify_curve(loss, loss_se=se).outcome == "lasting"
    loss, _ = _planted(300, 15.0)
    loss += np.where(np.arange(1000) > 700, 2.0 * np.exp(-(np.arange(1000) - 700) / 15), 0.0)
    rises = classify_curve(loss).rises
    assert [round(r.onset_step, -2) for r in rises] == [300, 700]
    assert all(r.steps_to_recover < 100 for r in rises)


def test_non_finite_losses():
    falling = np.linspace(2.0, 1.0, 50)
    skipped = falling.copy()
    skipped[[1, 2, 30]] = np.nan  # a loss scaler skips steps
    assert classify_curve(skipped, full_batch=True).when == "none"
    blown = classify_curve(np.append(falling, np.nan), full_batch=True, total_steps=100)
    assert (blown.when, blown.outcome, blown.onset_step, blown.end_loss) == ("mid", "divergent", 49, np.inf)
    at_once = classify_curve([2.0, 1e9, np.inf], full_batch=True, total_steps=100)
    assert (at_once.when, at_once.outcome, at_once.onset_step) == ("early", "divergent", 0)
    broken = classify_curve([np.nan], total_steps=100)
    assert (broken.outcome, "not the cause" in broken.reason) == ("divergent", True)


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


@pytest.mark.parametrize(("memory", "when"), [(0.0, "early"), (0.9, "none"), (0.5, "early")])
def test_the_swing_with_which_momentum_settles_is_no_instability(memory, when):
    """A bump at step 25 that stays below the start: within 5 / (1 - 0.9) = 50 steps, beyond 5 / (1 - 0.5)."""
    steps = np.arange(300)
    loss = 0.5 + 1.8 * np.exp(-steps / 30) + 0.8 * np.exp(-(((steps - 25) / 5.0) ** 2))
    assert classify_curve(loss, full_batch=True, memory=memory).when == when


TOTAL, CHANCE, START = 400, math.log(10), 180.0


def decay(end, *, start=START, seed=0):
    """From `start` to `end` within a few dozen steps, with the noise of minibatches."""
    rng = np.random.default_rng(seed)
    return end + (start - end) * np.exp(-np.arange(TOTAL) / 5) + 0.01 * rng.standard_normal(TOTAL)


def test_runs_that_end_at_chance_never_trained_though_they_come_down_from_far_above_it():
    """Two lrs train, two end at chance, as a network whose units have all died does."""
    ends = {0.01: 0.3, 0.02: 0.1, 0.2: CHANCE, 0.4: CHANCE + 0.01}
    trials = [trial(decay(end), lr, columns={"loss_se": np.full(TOTAL, 0.01)}) for lr, end in ends.items()]
    made = record(trials, total_steps=TOTAL, full_batch=False, facts={"chance_loss": CHANCE})
    table = judged(made).sweep()
    assert [bool(point.lasting) for point in table.points] == [False, False, True, True]
    assert table.progress == pytest.approx(CHANCE - 0.1, abs=0.02)
    found = diagnose_lr_sweep(made)
    assert found["lr.best"].value == pytest.approx(0.02)
    assert 0.02 < found["lr.unstable"].value <= 0.2


def test_a_rise_back_to_chance_is_seen_below_it():
    loss = decay(0.1)
    loss[200:] += CHANCE - 0.1
    seen = classify_curve(loss, loss_se=np.full(TOTAL, 0.01), loss_ref=START, chance=CHANCE)
    assert (seen.when, seen.is_lasting) == ("mid", True)
    assert abs(seen.onset_step - 200) <= 5
    assert classify_curve(loss, loss_se=np.full(TOTAL, 0.01), loss_ref=START).when == "none"


FALLING = np.linspace(2.0, 1.0, 50)


def test_full_length_keeps_one_config():
    trials = [
        trial(FALLING, 0.1, stage="baseline"), trial(FALLING, 0.2, seed=1), trial(FALLING, 0.3, eval_every_steps=7),
        trial(FALLING, 0.4, warmup_steps=5), trial(FALLING, 0.5, max_grad_norm=1.0), trial(FALLING, 0.6, stage="mine"),
        trial(FALLING[:20], 0.7, stage="probe", total_steps=20), trial(FALLING[:20], 0.8),
        trial(np.r_[FALLING[:5], np.inf], 0.9, stage="confirm"), trial(FALLING, 1.0, state="failed"),
    ]  # fmt: skip
    assert [c.lr for c in judged(record(trials, total_steps=50)).full_length] == [0.1, 0.2, 0.3, 0.9]
    odd = [trial(FALLING, 0.15, warmup_steps=5), trial(FALLING[:20], 0.3, total_steps=20)]
    r = record([*odd, trial(FALLING, 0.1), trial(FALLING, 0.2)], total_steps=50)
    other = r.config | {"total_steps": 999}
    assert [c.lr for c in full_length(judged(r).curves, other)] == [0.1, 0.2], "most of the longest share it"


@pytest.mark.parametrize(("optimizer", "memory"), [
    ("sgd", 0.0), ("nesterov", 0.7), ("rmsprop", 0.7), ("adam", 0.6), ("adamw", 0.6), ("mine:opt", 0.9),
])  # fmt: skip
def test_memory_of_each_rule(optimizer, memory):
    r = record([trial(FALLING, 0.1)], momentum=0.7, beta1=0.6)
    r.trials["optimizer"] = optimizer
    assert judged(r).curves[0].memory == memory


def test_what_can_be_learned_is_the_best_end_at_the_length_of_a_run():
    down = np.linspace(2, 0, 50)
    trials = [trial(FALLING, 0.1), trial(down, 0.2), trial([2.0, np.inf], 9.0)]
    curves = judged(record([*trials, trial(FALLING[:20], 0.3, stage="probe", total_steps=20)], total_steps=50)).curves
    long, short = (judge([curves[k]], curves[:3])[0].verdict.progress for k in (0, 3))
    assert long == pytest.approx(2 - np.median(down[-5:]))
    assert short == pytest.approx(2 - np.median(down[18:20]))
    assert judge([curves[0]], curves[:1])[0].verdict.progress < 2 - FALLING[-1] + 1e-9, "one run sets no scale"


@pytest.mark.parametrize(("apart", "start"), [(0.2, 2.1), (20.0, 2.0)])
def test_initial_loss_averages_seeds_only_where_they_agree(apart, start):
    se = np.full(50, 0.1)
    trials = [trial(FALLING + d, 0.1, seed=i, columns={"loss_se": se}) for i, d in enumerate((0.0, apart))]
    curves = judged(record(trials, full_batch=False)).curves
    assert initial_losses(curves, curves)[0] == pytest.approx(start)


def test_a_study_knows_that_a_run_never_trained():
    stuck = np.full(50, 2.0)
    curves = judged(record([trial(FALLING, 0.1), trial(stuck, 0.001), trial(stuck, 5.0)])).curves
    slow, fast = judge(curves, curves)[1:]
    assert slow.verdict.high
    assert "ends where it began" in slow.verdict.reason
    assert not slow.is_lasting(lr_star=0.1)  # too small an lr is slow, not unstable
    assert fast.is_lasting(lr_star=0.1)
    assert not fast.is_lasting()


@pytest.mark.parametrize("sd", [0.01, 0.3])
def test_unknown_noise_is_estimated_from_second_differences(sd):
    t = np.linspace(0, 1, 4000)
    loss = 3 * np.exp(-2 * t) + sd * np.random.default_rng(1).standard_normal(t.size)
    assert np.median(noise_per_step(loss, None, full_batch=False)) == pytest.approx(sd, rel=0.06)


@pytest.mark.parametrize(("sd", "width"), [(0.005, 3), (0.15, 17), (50.0, 65)])
def test_the_window_widens_with_the_noise_and_not_further(sd, width):
    loss, noise = 2 * np.exp(-5 * np.arange(1000) / 1000), np.full(1000, sd)
    smoothed, left, got = smooth(loss, noise, loss_ref=2.0, total_steps=1000, progress=2.0, full_batch=False)
    assert got == width
    assert smoothed.shape == left.shape == (1000,)
    assert left[500] == pytest.approx(1.2533 * sd / np.sqrt(width))
    assert left[0] == sd  # one value: nothing to average over


@pytest.mark.parametrize(("same", "full"), [(0, False), (49, True)])
def test_a_watched_loop_has_noise_unless_every_update_saw_the_same_batch(same, full):
    """A loop tells no number of examples: its record has 0."""
    made = record([trial(FALLING, 0.1)], facts={"loop": {"loaders": {"compared": 49, "same": same}}})
    made.trials["train_examples"] = 0
    assert judged(made).curves[0].full_batch is full


@pytest.mark.parametrize("known", [False, True], ids=["noise unknown", "noise recorded"])
@pytest.mark.parametrize("at", [4, 60, 300])
@pytest.mark.parametrize("lasts", [8, 200])
def test_a_loss_that_explodes_does_not_hide_in_noise_of_its_own(at: int, lasts: int, known: bool) -> None:
    """Its own scatter, and the errors recorded with it, are as large as the explosion; what counts is the noise before."""
    rng = np.random.default_rng(at)
    level = 2.3 * np.exp(-np.arange(600) / 150) + 0.3
    level[at : at + lasts] *= 10.0 ** rng.uniform(2, 30, lasts)
    loss = level * np.exp(0.2 * rng.standard_normal(600))
    verdict = classify_curve(loss, loss_se=0.2 * loss if known else None)
    assert verdict.when == ("early" if at <= 60 else "mid")
    assert abs(verdict.onset_step - at) <= 17


@pytest.mark.parametrize("count", [20, 64, 1000])
@pytest.mark.parametrize("before", [1, 2])
def test_a_loss_that_explodes_with_the_first_updates_and_stays_there_is_seen(before: int, count: int) -> None:
    """Nearly all losses are of the explosion, and spread as widely as they are large: the first ones are not part of their noise."""
    rng = np.random.default_rng(count)
    verdict = classify_curve(np.append(np.full(before, 2.3), rng.exponential(1e6, count - before)))
    assert verdict.when == "early", verdict
    assert verdict.outcome in ("divergent", "settling")
    assert verdict.onset_step <= before + 1


def test_a_run_that_ends_far_above_its_first_loss_is_not_said_to_end_where_it_began():
    rng = np.random.default_rng(0)  # Adam at a far too large lr: one step, then noise over many decades
    lost = np.append(2.0, np.where(rng.random(199) < 0.3, 0.0, 1e9 * rng.lognormal(size=199)))
    verdict = classify_curve(lost, study_progress=1.9, study_best_end=0.1)
    assert verdict.high
    assert verdict.end_loss > 1e8
    assert "above the 2 of the initial model" in verdict.reason
