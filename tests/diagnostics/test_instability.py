from __future__ import annotations

import json

import numpy as np
import pytest

from tests.helpers.simulated_curves import catapult, noisy_decay, quadratic
from tests.helpers.simulated_records import record, trial
from workbench.record.json_values import dumps
from workbench.topics.stability.diagnose import CODES, diagnose_instability

EARLY = ["warmup", "clip", "optimizer", "architecture", "last resort"]
MID = ["clip", "warmup", "optimizer", "architecture", "last resort"]
TOTAL = 400
T = np.arange(TOTAL)
LEVELS = {0.1: 1.2, 0.2: 0.8, 0.4: 0.5, 0.8: 0.7}  # lr* = 0.4
ALL = {*CODES, "stability.headroom"}


def run(level):
    return level + (2.3 - level) * np.exp(-T / 30)


def early():
    return np.r_[2.3, np.geomspace(5, 1e9, 40), np.inf]


def recovers():
    return run(0.7) + 30 * np.exp(-(((T - 8) / 4.0) ** 2))


def spike(at=200):
    return run(0.7) + np.where(at < T, 3 * np.exp(-np.maximum(T - at, 0) / 5), 0.0)


def jump(at=200):
    return np.where(at < T, 4.0, run(0.7))


def study(*extra, baseline=0.15, **kwargs):
    """A sweep, by default one that never ran the baseline's own lr."""
    trials = [trial(run(level), lr) for lr, level in LEVELS.items()]
    return record([*trials, *extra], total_steps=TOTAL, peak_lr=baseline, optimizer="momentum", **kwargs)


def raised(diagnosis):
    return {f.code.removeprefix("stability."): f.status for f in diagnosis if f.status in ("warn", "fail")}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("a", "expected"), [
    (1.5, {}), (3.0, {}), (4.5, {"early": "fail", "divergent": "fail"}),
])  # fmt: skip
def test_one_catapult_trial_alone(a, expected, seed):
    r = record([trial(catapult(a, 300, seed=seed), a, stage="baseline")], total_steps=300)
    diagnosis = diagnose_instability(r)
    assert raised(diagnosis) == expected
    assert ("costs nothing" in diagnosis["stability.early_recovers"].summary) == (a == 3.0)


def test_every_code_once_and_valid_json():
    for r in (study(trial(early(), 3.2)), record([]), record([trial([1.0, 0.9], 0.1)], total_steps=50)):
        diagnosis = diagnose_instability(r)
        assert {f.code for f in diagnosis} == ALL
        assert len(diagnosis.findings) == len(ALL)
        json.loads(dumps(diagnosis.to_dict()))


def test_a_healthy_study_is_silent():
    assert raised(diagnose_instability(study())) == {}


EVENTS = {
    "early": (early(), {"early", "divergent"}),
    "recovers": (recovers(), {"early_recovers"}),
    "spike": (spike(), {"spike"}),
    "jump": (jump(), {"mid", "divergent"}),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("lr", "zone"), [(0.3, "below"), (0.7, "near"), (3.2, "far")])
def test_where_an_event_lies_decides_how_bad_it_is(event, lr, zone):
    loss, codes = EVENTS[event]
    diagnosis = diagnose_instability(study(trial(loss, lr)))
    expected = {"below": "warn", "near": "warn", "far": "ok"}[zone]
    assert raised(diagnosis) == ({} if zone == "far" else dict.fromkeys(codes, expected))
    for code in codes:
        finding = diagnosis[f"stability.{code}"]
        assert finding.value == lr
        assert [h["zone"] for h in finding.evidence["hits"]] == [zone]
        assert ("by nature" in finding.summary) == (zone == "far")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("own", "cost"), [(0.3, None), (0.6, "warn")])
def test_an_event_of_the_own_config_fails_unless_it_recovers_and_then_warns_if_it_costs(event, own, cost):
    """Both runs end at 0.7: no lr below 0.3 does better, 0.4 does."""
    loss, codes = EVENTS[event]
    found = raised(diagnose_instability(study(trial(loss, own), baseline=own)))
    if codes & {"early_recovers", "spike"}:
        assert found == ({} if cost is None else dict.fromkeys(codes, cost))
    else:
        assert {code: found[code] for code in codes} == dict.fromkeys(codes, "fail")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("lr", "changed"), [(0.21, {}), (0.7, {}), (0.2, {"max_grad_norm": None}), (0.1, {})])
def test_what_another_config_does_is_no_fault_of_a_run_that_was_well(event, lr, changed):
    """The tool asks for larger lrs, for runs without the clipping, and for more: none of them is the person's training."""
    loss, codes = EVENTS[event]
    levels = [trial(run(level), at, max_grad_norm=1.0) for at, level in LEVELS.items() if at != 0.1]
    other = trial(loss, lr, **({"max_grad_norm": 1.0} | changed))
    r = record([*levels, other], total_steps=TOTAL, peak_lr=0.2, optimizer="momentum", max_grad_norm=1.0)
    diagnosis = diagnose_instability(r)
    assert {code: status for code, status in raised(diagnosis).items() if code != "headroom"} == {}
    for code in codes:
        assert diagnosis[f"stability.{code}"].summary.startswith(
            "Not in the one run of the baseline's own config (lr 0.2)."
        )


@pytest.mark.parametrize(("unstable", "status"), [(0.25, "warn"), (0.45, "ok")])
def test_headroom_below_one_and_a_half_is_worth_one_warning(unstable, status):
    levels = [trial(run(level), lr) for lr, level in {0.1: 1.2, 0.2: 0.8}.items()]
    diagnosis = diagnose_instability(record([*levels, trial(early(), unstable)], total_steps=TOTAL, peak_lr=0.2))
    assert raised(diagnosis) == ({"headroom": "warn"} if status == "warn" else {})


def test_a_baseline_above_lr_star_is_its_own_trouble():
    assert raised(diagnose_instability(study(trial(jump(), 1.6, stage="baseline"), baseline=1.6))) == {
        "headroom": "warn", "mid": "fail", "divergent": "fail",
    }  # fmt: skip


def test_steps_are_reported():
    diagnosis = diagnose_instability(study(trial(spike(200), 0.3), trial(jump(250), 0.35)))
    assert diagnosis["stability.spike"].step == pytest.approx(200, abs=2)
    assert diagnosis["stability.mid"].step == pytest.approx(250, abs=2)


def test_the_short_probe_counts_and_says_who_would_have_missed_it():
    loss = run(0.7)[:300] + 30 * np.exp(-(((T[:300] - 40) / 8.0) ** 2))
    r = study(trial(loss, 0.79, stage="probe", total_steps=300))
    finding = diagnose_instability(r, usual_interval=100)["stability.early_recovers"]
    assert finding.status == "warn"
    assert finding.evidence["seen_at_interval"]["missed"]
    assert "every 100 steps would have missed it" in finding.summary
    seen = diagnose_instability(r, usual_interval=10)["stability.early_recovers"]
    assert not seen.evidence["seen_at_interval"]["missed"]


@pytest.mark.parametrize(("kind", "words"), [
    ("early", EARLY), ("recovers", EARLY),
    ("jump", MID), ("spike", MID),
])  # fmt: skip
def test_advice_follows_the_kind_and_ends_with_the_lr(kind, words):
    loss, codes = EVENTS[kind]
    diagnosis = diagnose_instability(study(trial(loss, 0.3)))
    for code in codes:
        advice = diagnosis[f"stability.{code}"].advice
        assert len(advice) == len(words)
        assert all(word in line.lower() for word, line in zip(words, advice, strict=True))


def test_confirmation_runs_stand_in_the_evidence_of_mid():
    r = study(trial(jump(150), 2.0, stage="confirm"), trial(np.full(TOTAL, 2.3), 4.0, stage="confirm"))
    finding = diagnose_instability(r)["stability.mid"]
    rows = finding.evidence["confirm"]
    assert [(row["shape"], row["jump_step"]) for row in rows] == [("rise after decline", 150), ("never declined", None)]
    assert [row["times_lr_star"] for row in rows] == pytest.approx([5.0, 10.0])
    assert finding.status == "ok"  # 5 and 10 times lr* are unstable by nature


def test_spike_names_its_cause_or_says_that_it_cannot():
    norms = np.ones(TOTAL)
    norms[200] = 50.0
    known = diagnose_instability(study(trial(spike(200), 0.3, columns={"grad_norm": norms})))["stability.spike"]
    assert (known.evidence["cause"], known.evidence["outlier_step"]) == ("data", 200)
    unknown = diagnose_instability(study(trial(spike(200), 0.3)))["stability.spike"]
    assert unknown.evidence["cause"] is None
    assert "not measured" in unknown.summary


def test_a_run_that_never_trained_above_lr_star_is_divergent_below_it_is_slow():
    stuck = np.full(TOTAL, 2.3)
    assert raised(diagnose_instability(study(trial(stuck, 0.0001)))) == {}
    assert raised(diagnose_instability(study(trial(stuck, 0.79)))) == {"divergent": "warn"}


def test_harmless_where_fix_runs_gain_nothing():
    near = [trial(early(), 0.7), trial(early(), 0.6)]
    levels = {0.1: 1.2, 0.2: 0.8, 0.4: 0.5}
    trials = [trial(run(level), lr) for lr, level in levels.items()]
    fix = trial(run(0.5), 0.9, stage="fix", warmup_steps=40)
    common = {"total_steps": TOTAL, "peak_lr": 0.15}
    assert raised(diagnose_instability(record([*trials, *near], **common))) == {"early": "warn", "divergent": "warn"}
    assert raised(diagnose_instability(record([*trials, *near, fix], **common))) == {}


def test_headroom():
    finding = diagnose_instability(study(trial(early(), 1.6), trial(run(0.9), 1.55)))["stability.headroom"]
    assert finding.value == pytest.approx(np.sqrt(1.55 * 1.6) / 0.15)
    assert diagnose_instability(study(facts={"critical_lr": 1.5}))["stability.headroom"].value == pytest.approx(10.0)
    stable = diagnose_instability(study())["stability.headroom"]
    assert (stable.status, stable.value) == ("ok", pytest.approx(max(LEVELS) / 0.15)), "at least that much"
    far = diagnose_instability(study(baseline=max(LEVELS)))["stability.headroom"]
    assert far.status == "not_measured", "nothing above the baseline was tried"


@pytest.mark.parametrize("trials", [
    [], [trial([2.0, 1.9, 1.8], 0.1)], [trial(np.full(TOTAL, 2.3), lr) for lr in (0.1, 0.2, 0.4)],
])  # fmt: skip
def test_silence_is_not_health(trials):
    diagnosis = diagnose_instability(record(trials))
    assert {diagnosis[code].status for code in CODES} == {"not_measured"}


def cut(total, *extra, lrs=(0.1, 0.2, 0.4)):
    """A sweep of `total` steps, with a run at 100 times the baseline's lr that diverges in three."""
    wild = trial([2.3, 1e9, np.inf], 20.0, total_steps=total)
    return record([*(trial(run(0.7)[:total], lr) for lr in lrs), wild, *extra], total_steps=total, peak_lr=0.2)


@pytest.mark.parametrize("total", [5, 9])
def test_one_run_that_diverges_far_off_does_not_vouch_for_short_ones(total):
    diagnosis = diagnose_instability(cut(total))
    assert {diagnosis[code].status for code in CODES} == {"not_measured"}
    assert "baseline's lr 0.2" in diagnosis["stability.mid"].summary
    assert "steps are too few" in diagnosis["stability.mid"].summary
    assert "seen at lr 20" in diagnosis["stability.divergent"].summary
    assert "seen at" not in diagnosis["stability.mid"].summary
    assert "lost early" not in diagnosis["stability.mid"].summary


def test_the_twin_with_long_runs_is_healthy():
    diagnosis = diagnose_instability(cut(TOTAL))
    assert {diagnosis[code].status for code in CODES} == {"ok"}
    assert diagnosis["stability.mid"].summary == "Not seen in 4 trial(s)."


def test_only_judged_runs_are_counted():
    short = [trial(run(0.7)[:9], lr, total_steps=9) for lr in (0.05, 0.3)]
    diagnosis = diagnose_instability(cut(TOTAL, *short))
    assert len(diagnosis["stability.mid"].evidence["trials"]) == 6
    assert diagnosis["stability.mid"].summary == "Not seen in 4 trial(s)."


def test_a_long_run_far_below_the_baselines_lr_does_not_vouch_for_it():
    tiny = trial(run(0.7), 1e-4, total_steps=TOTAL)
    diagnosis = diagnose_instability(cut(9, tiny))
    assert {diagnosis[code].status for code in CODES} == {"not_measured"}


def test_short_runs_at_the_baselines_lr_hide_no_divergence_there():
    own = trial([2.3, 50.0, np.inf], 0.2, seed=1, total_steps=9)
    diagnosis = diagnose_instability(cut(9, own))
    assert raised(diagnosis) == {"early": "fail", "divergent": "fail", "headroom": "warn"}
    for code in ("stability.mid", "stability.spike"):
        assert diagnosis[code].status == "not_measured", "a run of three steps has no middle"
        assert "unless it was lost early" in diagnosis[code].summary


def test_a_quadratic_below_and_above_its_edge():
    lrs = [2.0 * 2.0**k for k in range(-5, 2)] + [1.8, 1.9, 1.95, 2.05]
    trials = [trial(quadratic("sgd", lr, 100), lr) for lr in lrs]
    calm = diagnose_instability(record(trials, total_steps=100, peak_lr=0.5))
    assert set(raised(calm).values()) <= {"warn"}
    hot = diagnose_instability(record(trials, total_steps=100, peak_lr=2.05))
    assert hot["stability.early"].status == "fail"


def test_noisy_seeds_raise_no_alarm():
    trials = []
    for seed in range(5):
        for lr, rate in ((0.1, 2.0), (0.2, 6.0), (0.4, 12.0)):
            loss, se = noisy_decay(600, seed=seed, rate=rate)
            trials.append(trial(loss, lr, seed=seed, columns={"loss_se": se}))
    assert raised(diagnose_instability(record(trials, full_batch=False, total_steps=600))) == {}


@pytest.mark.parametrize(("scale", "offset"), [(1e-2, 0.0), (1e4, 0.0), (1.0, -1000.0)])
def test_scale_and_offset_change_no_verdict(scale, offset):
    plain, moved = (study(trial(jump(), 0.3), trial(recovers(), 0.7), trial(early(), 3.2)) for _ in range(2))
    moved.steps["loss"] = scale * moved.steps["loss"] + offset
    assert raised(diagnose_instability(plain)) == raised(diagnose_instability(moved))


def test_a_rise_that_ends_high_above_lr_star_is_divergent_and_not_only_settling():
    """An early blow-up that is still coming down as the run ends, above three quarters of where it began."""
    late = np.r_[run(0.7)[:10], 0.5 + 1.4 * np.exp((380 - T[10:]) / 150)]
    found = diagnose_instability(study(trial(late, 1.6), baseline=1.6))
    assert found["stability.divergent"].status == "fail"
