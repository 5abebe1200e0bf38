from __future__ import annotations

import json

import numpy as np
import pytest

from tests.diagnostics.test_lr_points import noisy_sweep
from tests.helpers.simulated_curves import quadratic
from tests.helpers.simulated_records import record, trial
from workbench.record.json_values import dumps
from workbench.topics.lr_sweep.diagnose import CODES, diagnose_lr_sweep

TOTAL = 200
BLOWN = np.r_[2.3, 50.0, np.inf]


def run(level):
    return level + (2.3 - level) * np.exp(-np.arange(TOTAL) / 20)


def sweep(*extra, baseline=0.4, levels=None, blown=(12.8,)):
    levels = levels or {0.1: 1.5, 0.2: 1.0, 0.4: 0.6, 0.8: 0.4, 1.6: 0.5, 3.2: 0.9, 6.4: 1.4}
    trials = [trial(run(level), lr) for lr, level in levels.items()] + [trial(BLOWN, lr) for lr in blown]
    return record([*trials, *extra], total_steps=TOTAL, peak_lr=baseline, optimizer="momentum")


def statuses(diagnosis):
    return {f.code: f.status for f in diagnosis}


def test_every_code_once_and_valid_json():
    for r in (sweep(), record([]), record([trial(run(0.4), 0.1)])):
        diagnosis = diagnose_lr_sweep(r)
        assert tuple(f.code for f in diagnosis) == CODES
        json.loads(dumps(diagnosis.to_dict()))


def test_an_interior_best_far_from_the_edge():
    diagnosis = diagnose_lr_sweep(sweep())
    assert diagnosis["lr.best"].value == 0.8
    assert diagnosis["lr.unstable"].value == pytest.approx(np.sqrt(6.4 * 12.8))
    assert diagnosis["lr.unstable"].evidence["lower"] == 6.4
    assert statuses(diagnosis) == {
        "lr.best": "ok", "lr.grid_edge": "ok", "lr.unstable": "ok", "lr.too_high": "ok", "lr.too_low": "ok", "lr.at_edge": "ok",
        "lr.probabilistic": "ok", "lr.nothing_learns": "ok",
    }  # fmt: skip
    assert "one seed" in diagnosis["lr.probabilistic"].summary
    assert "harmless" in diagnosis["lr.at_edge"].summary


def test_evidence_holds_what_a_figure_needs():
    rows = diagnose_lr_sweep(sweep())["lr.best"].evidence["points"]
    assert [r["lr"] for r in rows] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8]
    assert {"loss", "loss_se", "above_best", "above_best_se", "state", "outcomes", "seeds"} <= set(rows[0])
    assert rows[-1]["state"] == "diverged"
    assert rows[-1]["unstable"]


@pytest.mark.parametrize(("levels", "word"), [
    ({0.1: 0.3, 0.2: 0.4, 0.4: 0.6}, "smaller"), ({0.1: 0.9, 0.2: 0.8, 0.4: 0.6}, "larger"),
])  # fmt: skip
def test_best_at_the_border_of_the_grid(levels, word):
    given = sweep(levels=levels, blown=())
    finding = diagnose_lr_sweep(given)["lr.grid_edge"]
    assert finding.status == "warn"
    assert word in finding.advice[0]
    given.facts["initial_critical_lr"] = 1.0
    assert diagnose_lr_sweep(given)["lr.grid_edge"].status == "ok", (
        "a sweep that finds its own range ends where it has to"
    )


def test_unstable_lr_never_found_is_not_measured_unless_it_was_looked_for_far_away():
    diagnosis = diagnose_lr_sweep(sweep(blown=()))
    assert (diagnosis["lr.unstable"].status, diagnosis["lr.at_edge"].status) == ("not_measured", "ok"), "up to 8 lr*"
    near = diagnose_lr_sweep(sweep(blown=(), levels={0.4: 0.6, 0.8: 0.4, 1.2: 0.5}))
    assert near["lr.at_edge"].status == "not_measured"
    far = diagnose_lr_sweep(sweep(blown=(), levels={0.4: 0.6, 0.8: 0.4, 26.0: 0.9}))
    assert (far["lr.unstable"].status, far["lr.unstable"].value) == ("ok", None)


@pytest.mark.parametrize(("fix", "status", "harmful"), [(None, "warn", None), (0.2, "warn", True), (0.4, "ok", False)])
def test_best_at_the_edge_is_at_most_a_warning_and_a_fix_run_decides(fix, status, harmful):
    extra = [] if fix is None else [trial(run(fix), 2.1, stage="fix", max_grad_norm=1.0)]
    finding = diagnose_lr_sweep(sweep(*extra, levels={0.2: 1.0, 0.4: 0.6, 0.8: 0.4}, blown=(1.2,)))["lr.at_edge"]
    assert (finding.status, finding.evidence["harmful"]) == (status, harmful)
    assert finding.evidence["at_edge"]
    if status == "warn":
        words = ("warmup", "clip", "optimizer", "architecture", "last resort")
        assert all(word in line.lower() for word, line in zip(words, finding.advice, strict=True))


def test_a_quadratic_sits_at_its_edge_by_nature():
    lrs = [2.0 * 2.0**k for k in range(-5, 2)] + [1.8, 1.9, 1.95, 2.05]
    r = record([trial(quadratic("sgd", lr, 100), lr) for lr in lrs], total_steps=100)
    diagnosis = diagnose_lr_sweep(r)
    assert diagnosis["lr.unstable"].value == pytest.approx(2.0, rel=0.05)
    assert diagnosis["lr.best"].value < diagnosis["lr.unstable"].value
    assert diagnosis["lr.at_edge"].status == "warn"


@pytest.mark.parametrize(("lr", "status"), [(1.5, "warn"), (6.4, "ok")])
def test_seeds_that_disagree(lr, status):
    extra = [trial(run(0.4), 0.8, seed=s) for s in (1, 2)]
    extra += [trial(BLOWN, lr, seed=1), trial(run(0.8), lr, seed=2), trial(run(0.8), lr, seed=0)]
    finding = diagnose_lr_sweep(sweep(*extra, levels={0.4: 0.6, 0.8: 0.4, 1.2: 0.45}))["lr.probabilistic"]
    assert finding.status == status
    assert (finding.value, finding.evidence["disputed"][0]["lasting"]) == (lr, 1)
    agreed = diagnose_lr_sweep(noisy_sweep({0.1: 0.9, 0.2: 0.5, 0.4: 0.6}))
    assert agreed["lr.probabilistic"].status == "ok"


@pytest.mark.parametrize(("trials", "reason"), [
    ([], "at least two"),
    ([trial(run(0.4), 0.1)], "at least two"),
    ([trial(BLOWN, lr) for lr in (1.0, 2.0, 4.0)], "non-finite"),
    ([trial(np.full(TOTAL, 2.3), lr) for lr in (1.0, 2.0, 4.0)], "no learning rate brought"),
])  # fmt: skip
def test_what_cannot_be_known_is_not_measured(trials, reason):
    diagnosis = diagnose_lr_sweep(record(trials, total_steps=TOTAL))
    learned = statuses(diagnosis).pop("lr.nothing_learns") == "ok"
    assert {f.status for f in diagnosis if f.code != "lr.nothing_learns"} == {"not_measured"}
    assert learned is (len(trials) == 1), "one lr that learns says that something can be learned"
    assert reason in diagnosis["lr.best"].summary


@pytest.mark.parametrize("scale", [1e-2, 1e4])
def test_the_scale_of_the_loss_changes_nothing(scale):
    plain, scaled = sweep(), sweep()
    scaled.steps["loss"] *= scale
    one, other = diagnose_lr_sweep(plain), diagnose_lr_sweep(scaled)
    assert [(f.code, f.status, f.value) for f in one] == [(f.code, f.status, f.value) for f in other]
