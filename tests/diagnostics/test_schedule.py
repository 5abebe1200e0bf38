"""Planted faults in lr traces, and healthy schedules on which nothing must be said."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.config import TrainConfig
from workbench.diagnostics.base import Diagnosis
from workbench.diagnostics.schedule import diagnose_schedule
from workbench.schedules import lr_values, prepend_warmup

TOTAL = 400
T = np.arange(TOTAL)
COSINE = 0.5 * (1 + np.cos(np.pi * T / TOTAL))


def diagnose(lr: np.ndarray, *, total: int = TOTAL, **arguments: object) -> Diagnosis:
    one = trial(np.full(len(lr), 1.0), 0.3, stage="baseline", columns={"lr": lr}, total_steps=total)
    return diagnose_schedule(record([one]), **arguments)  # type: ignore[arg-type]


def planted(config: TrainConfig) -> np.ndarray:
    return lr_values(config)


BASE = TrainConfig(peak_lr=0.3, total_steps=TOTAL, batch_size=8)
HEALTHY = {
    "constant": planted(BASE),
    "cosine": planted(BASE.replace(schedule="cosine")),
    "linear with warmup": planted(prepend_warmup(BASE.replace(schedule="linear"), 40)),
    "a short ramp": planted(BASE.replace(warmup_steps=3)),
    "a ramp of one step": planted(BASE.replace(warmup_steps=1)),
    "step decay": 0.1 ** (T // 150) * 1.0,
    "one cycle": np.interp(T, [0, 120, 399], [0.04, 1.0, 0.0]),
    "inverse square root": 1 / np.sqrt(1 + T),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 100.0])
def test_silent_on_healthy_schedules(name: str, scale: float) -> None:
    assert [f.status for f in diagnose(scale * HEALTHY[name])] == ["ok"] * 3


def test_a_jump_where_warmup_meets_the_decay_is_found_at_its_step() -> None:
    lr = np.where(T < 50, T / 50 * 0.5, 0.5 + 0.5 * COSINE)
    finding = diagnose(lr)["schedule.discontinuity"]
    assert (finding.status, finding.step) == ("warn", 50)
    assert finding.value == pytest.approx((lr[50] - lr[49]) / lr.max())


def test_a_spike_of_one_step_is_two_jumps() -> None:
    lr = COSINE.copy()
    lr[200] = 0.7
    steps = [jump["step"] for jump in diagnose(lr)["schedule.discontinuity"].evidence["jumps"]]
    assert steps == [200, 201]


def test_a_restart_warns_unless_it_was_planned() -> None:
    lr = 0.5 * (1 + np.cos(np.pi * (T % 100) / 100))
    finding = diagnose(lr)["schedule.restarts"]
    assert (finding.status, finding.step, finding.value) == ("warn", 100, 3.0)
    assert finding.evidence["periods"] == [100]
    healthy = diagnose(lr, planned=lr)
    assert [f.status for f in healthy] == ["ok"] * 3
    assert "3 planned" in healthy["schedule.restarts"].summary


def test_restarts_of_a_schedule_of_ones_own_are_planned_but_its_jumps_are_told() -> None:
    lr = 0.5 * (1 + np.cos(np.pi * (T % 100) / 100))
    lr[50:100] *= 0.3
    found = diagnose(lr, restarts_planned=True)
    assert found["schedule.restarts"].status == "ok"
    assert (found["schedule.discontinuity"].status, found["schedule.discontinuity"].step) == ("warn", 50)


def test_a_decay_over_too_few_steps_collapses() -> None:
    lr = np.where(T < 200, 0.5 * (1 + np.cos(np.pi * np.minimum(T, 200) / 200)), 0.0)
    finding = diagnose(lr)["schedule.collapse"]
    assert finding.status == "fail"
    assert finding.step == pytest.approx(196, abs=4)
    assert finding.advice


def test_a_collapse_counts_against_the_planned_length_not_what_was_recorded() -> None:
    assert diagnose(COSINE, total=TOTAL)["schedule.collapse"].status == "ok"
    lr = np.append(COSINE, np.zeros(10))
    assert diagnose(lr, total=4000)["schedule.collapse"].status == "fail"


@pytest.mark.parametrize("lr", [np.full(TOTAL, math.nan), np.zeros(TOTAL), COSINE[:5]])
def test_nan_zero_and_too_short_are_not_measured(lr: np.ndarray) -> None:
    diagnosis = diagnose(lr)
    assert {f.status for f in diagnosis} == {"not_measured"}
    assert len(diagnosis.findings) == 3
