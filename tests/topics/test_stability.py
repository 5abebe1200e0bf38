"""When training becomes unstable, whose run it is, and what came of it; and the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.helpers.simulated_records import record, trial
from tests.helpers.workloads import small_workload
from workbench.topics.stability import diagnose_check as stability_first
from workbench.topics.stability.diagnose import KINDS as CODES

TOTAL = 400
T = np.arange(TOTAL)
LEVELS = {0.1: 1.2, 0.2: 0.8, 0.4: 0.5, 0.8: 0.7}  # lr* = 0.4


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


def instability_study(*extra, baseline=0.15, **kwargs):
    """A sweep, by default one that never ran the baseline's own lr."""
    trials = [trial(run(level), lr) for lr, level in LEVELS.items()]
    return record([*trials, *extra], total_steps=TOTAL, peak_lr=baseline, optimizer="momentum", **kwargs)


def raised(diagnosis):
    return {f.code.removeprefix("stability."): f.status for f in diagnosis if f.status in ("warn", "fail")}


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
    diagnosis = wb.stability.diagnose(instability_study(trial(loss, lr)))
    expected = {"below": "warn", "near": "warn", "far": "ok"}[zone]
    assert raised(diagnosis) == ({} if zone == "far" else dict.fromkeys(codes, expected))
    for code in codes:
        finding = diagnosis[f"stability.{code}"]
        assert finding.value == lr
        assert [h["zone"] for h in finding.evidence["hits"]] == [zone]
        assert ("as expected this far above" in finding.summary) == (zone == "far")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("own", "cost"), [(0.3, None), (0.6, "warn")])
def test_an_event_of_the_own_config_fails_unless_it_recovers_and_then_warns_if_it_costs(event, own, cost):
    """Both runs end at 0.7: no lr below 0.3 does better, 0.4 does."""
    loss, codes = EVENTS[event]
    found = raised(wb.stability.diagnose(instability_study(trial(loss, own), baseline=own)))
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
    diagnosis = wb.stability.diagnose(r)
    assert {code: status for code, status in raised(diagnosis).items() if code != "headroom"} == {}
    for code in codes:
        assert diagnosis[f"stability.{code}"].summary.startswith(
            "Not seen in the one run of the baseline's own config (lr 0.2)."
        )


def test_runs_of_the_baseline_are_counted_apart_from_larger_lrs_and_the_smallest_of_these_is_named():
    """One of three seeds of the baseline spikes, two larger lrs do, and three others are lost, of which the largest ran first."""
    own = [trial(recovers() if seed == 1 else run(0.9), 0.2, seed=seed) for seed in range(3)]
    larger = [trial(recovers(), lr) for lr in (0.4, 0.6)]
    lost = [trial(early(), lr) for lr in (2.4, 1.2, 1.8)]
    r = record([*own, *larger, *lost], total_steps=TOTAL, peak_lr=0.2, optimizer="momentum")
    diagnosis = wb.stability.diagnose(r)
    spiked, blown = (diagnosis[f"stability.{code}"].summary for code in ("early_recovers", "early"))
    assert "(in 1 of 3 runs of the baseline and at 2 larger lrs)" in spiked
    assert "Not seen in 3 runs of the baseline" in blown
    assert "at lr 1.2" in blown
    assert "(and at 2 larger lrs)" in blown


def test_headroom():
    finding = wb.stability.diagnose(instability_study(trial(early(), 1.6), trial(run(0.9), 1.55)))["stability.headroom"]
    assert finding.value == pytest.approx(np.sqrt(1.55 * 1.6) / 0.15)
    assert wb.stability.diagnose(instability_study(facts={"critical_lr": 1.5}))[
        "stability.headroom"
    ].value == pytest.approx(10.0)
    stable = wb.stability.diagnose(instability_study())["stability.headroom"]
    assert (stable.status, stable.value) == ("ok", pytest.approx(max(LEVELS) / 0.15)), "at least that much"
    far = wb.stability.diagnose(instability_study(baseline=max(LEVELS)))["stability.headroom"]
    assert far.status == "not_measured", "nothing above the baseline was tried"
    begun = instability_study(
        trial(run(0.9)[:9], 2 * max(LEVELS), state="stopped", total_steps=TOTAL), baseline=max(LEVELS)
    )
    assert "to its end; 1 that were begun" in wb.stability.diagnose(begun)["stability.headroom"].summary


@pytest.mark.parametrize("trials", [
    [], [trial([2.0, 1.9, 1.8], 0.1)], [trial(np.full(TOTAL, 2.3), lr) for lr in (0.1, 0.2, 0.4)],
])  # fmt: skip
def test_silence_is_not_health(trials):
    diagnosis = wb.stability.diagnose(record(trials))
    assert {diagnosis[code].status for code in CODES} == {"not_measured"}


def cut(total, *extra, lrs=(0.1, 0.2, 0.4)):
    """A sweep of `total` steps, with a run at 100 times the baseline's lr that diverges in three."""
    wild = trial([2.3, 1e9, np.inf], 20.0, total_steps=total)
    return record([*(trial(run(0.7)[:total], lr) for lr in lrs), wild, *extra], total_steps=total, peak_lr=0.2)


def test_short_runs_at_the_baselines_lr_hide_no_divergence_there():
    own = trial([2.3, 50.0, np.inf], 0.2, seed=1, total_steps=9)
    diagnosis = wb.stability.diagnose(cut(9, own))
    assert raised(diagnosis) == {"early": "fail", "divergent": "fail", "headroom": "warn"}
    for code in ("stability.mid", "stability.spike"):
        assert diagnosis[code].status == "not_measured", "a run of three steps has no middle"
        assert "unless it was lost early" in diagnosis[code].summary


def test_a_rise_that_ends_high_above_lr_star_is_divergent_and_not_only_settling():
    """An early blow-up that is still coming down as the run ends, above three quarters of where it began."""
    late = np.r_[run(0.7)[:10], 0.5 + 1.4 * np.exp((380 - T[10:]) / 150)]
    found = wb.stability.diagnose(instability_study(trial(late, 1.6), baseline=1.6))
    assert found["stability.divergent"].status == "fail"


def test_without_a_study_there_is_no_verdict() -> None:
    (finding,) = wb.stability.check("", workload="small")
    assert (finding.code, finding.status, finding.clause) == ("stability.verdict", "not_measured", "F1.1")
    assert "02_instability" in finding.advice[0]


def test_an_unstable_study_warns_and_says_what_cures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = wb.lr_sweep.Study(lrs=(0.01, 0.1)).run(small_workload(), wb.Trainer(device="cpu"), out=tmp_path / "s").path
    assert "not of 'mine'" in wb.stability.check(folder, workload="mine")["stability.verdict"].summary
    for status, expected in (("fail", "warn"), ("warn", "warn"), ("not_measured", "not_measured"), ("ok", "ok")):
        findings = [wb.Finding(code=code, status="ok", summary="well") for code in CODES]
        findings[2] = wb.Finding(code="stability.mid", status=status, summary="said of mid", step=7)  # type: ignore[arg-type]
        found = wb.Diagnosis(findings=tuple(findings))
        monkeypatch.setattr(stability_first, "diagnose_instability", lambda record, found=found: found)
        finding = wb.stability.check(folder)["stability.verdict"]
        assert (finding.status, bool(finding.advice)) == (expected, expected != "ok")
        assert ("stability.mid" in finding.summary) is (expected != "ok")
        assert finding.step == (7 if expected == "warn" else None)


def test_a_confirmation_run_is_counted_in_multiples_of_the_studys_own_best_lr():
    """Of lrs that tie the study took the smaller, 0.2, five times of which is 1; the loss is lowest at 0.4."""
    found = wb.stability.diagnose(instability_study(trial(jump(), 1.0, stage="confirm"), facts={"lr_star": 0.2}))
    assert [row["times_lr_star"] for row in found["stability.mid"].evidence["confirm"]] == [5.0]


@pytest.mark.parametrize(("rise", "status"), [(20.0, "fail"), (0.0, "not_measured"), (0.02, "not_measured")])
def test_where_every_lr_ends_above_the_start_training_is_lost_and_where_none_moves_it_is_not_known(rise, status):
    noise = np.random.default_rng(0).normal(0, 0.05, (3, TOTAL))
    curves = [2.3 + k * rise * (1 - np.exp(-T / 3)) + noise[k - 1] for k in (1, 2, 3)]
    study = record([trial(c, lr) for c, lr in zip(curves, (5.0, 20.0, 80.0), strict=True)], total_steps=TOTAL, peak_lr=20.0)  # fmt: skip
    assert wb.stability.diagnose(study)["stability.divergent"].status == status
    said = wb.lr_sweep.diagnose(study)["lr.best"].summary
    assert ("try smaller ones" in said) == (rise > 1), said
