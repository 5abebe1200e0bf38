"""Planted faults in lr traces, and healthy schedules on which nothing must be said; and the figure."""

from __future__ import annotations

import math

import numpy as np
import pytest

import workbench as wb
from tests.helpers.simulated_records import record, trial

TOTAL = 400
T = np.arange(TOTAL)
COSINE = 0.5 * (1 + np.cos(np.pi * T / TOTAL))


def diagnose(
    lr: np.ndarray,
    *,
    total: int = TOTAL,
    every: int = 1,
    others: dict[str, np.ndarray] | None = None,
    **arguments: object,
) -> wb.Diagnosis:
    """Diagnose the lr of all steps, of which each `every`-th one was recorded, and that of other groups."""
    kept = lr[::every]
    columns = {"lr": kept, **(others or {})}
    one = trial(np.full(len(kept), 1.0), 0.3, stage="baseline", columns=columns, total_steps=total)
    made = record([one])
    made.steps["step"] *= every
    return wb.schedule.diagnose(made, **arguments)  # type: ignore[arg-type]


def statuses(diagnosis: wb.Diagnosis) -> list[str]:
    return [f.status for f in diagnosis]


def planted(config: wb.TrainConfig) -> np.ndarray:
    return wb.schedules.lr_values(config)


BASE = wb.TrainConfig(peak_lr=0.3, total_steps=TOTAL, batch_size=8)
HEALTHY = {
    "constant": planted(BASE),
    "cosine": planted(BASE.replace(schedule="cosine")),
    "linear with warmup": planted(wb.schedules.prepend_warmup(BASE.replace(schedule="linear"), 40)),
    "a short ramp": planted(BASE.replace(warmup_steps=3)),
    "a ramp of one step": planted(BASE.replace(warmup_steps=1)),
    "cosine with warmup": planted(wb.schedules.prepend_warmup(BASE.replace(schedule="cosine"), 40)),
    "step decay": 0.1 ** (T // 150) * 1.0,
    "one cycle": np.interp(T, [0, 120, 399], [0.04, 1.0, 0.0]),
    "one cycle, stepped by the epoch": np.interp(T // 40, [0, 2, 9], [0.04, 1.0, 0.0]),
    "inverse square root": 1 / np.sqrt(1 + T),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 100.0])
def test_silent_on_healthy_schedules(name: str, scale: float) -> None:
    assert statuses(diagnose(scale * HEALTHY[name])) == ["ok"] * 3


def test_a_jump_is_told_at_its_real_step() -> None:
    lr = np.where(T < 200, 1.0, 0.5) * COSINE
    assert diagnose(lr, every=4)["schedule.discontinuity"].step == 200
    lr[20:60] = math.nan
    assert diagnose(lr)["schedule.discontinuity"].step == 200
    lr[199:202] = math.nan
    found = diagnose(np.where(np.isnan(lr), math.nan, np.where(T < 200, 0.4, 1.0)))["schedule.discontinuity"]
    assert (found.status, found.step) == ("warn", 202)


@pytest.mark.parametrize(("lr", "first"), [
    (2.0 ** (T // 50), 250), (0.1 + 0.3 * sum(k <= T for k in (300, 320, 340)), 300),
], ids=["doubled every epoch", "late"])  # fmt: skip
def test_steps_upwards_that_do_not_end_early_are_no_warmup(lr: np.ndarray, first: int) -> None:
    """Each is more than a tenth of the peak from `first` on."""
    found = diagnose(lr)["schedule.discontinuity"]
    assert (found.status, found.step) == ("warn", first)
    assert diagnose(lr, planned=lr)["schedule.discontinuity"].status == "ok"


def test_a_restart_warns_unless_it_was_planned() -> None:
    lr = 0.5 * (1 + np.cos(np.pi * (T % 100) / 100))
    finding = diagnose(lr)["schedule.restarts"]
    assert (finding.status, finding.step, finding.value) == ("warn", 100, 3.0)
    assert finding.evidence["periods"] == [100]
    healthy = diagnose(lr, planned=lr)
    assert statuses(healthy) == ["ok"] * 3
    assert "3 planned" in healthy["schedule.restarts"].summary


def cycles(period: int, ramp: int) -> np.ndarray:
    """Cosine cycles; every one but the first climbs back over `ramp` steps."""
    t = T % period
    decay = 0.5 * (1 + np.cos(np.pi * np.maximum(t - ramp, 0) / (period - ramp)))
    return np.where((t < ramp) & (period <= T), (t + 1) / (ramp + 1), decay)


@pytest.mark.parametrize("ramp", [1, 2, 5, 20])
@pytest.mark.parametrize("every", [1, 4])
def test_a_restart_over_a_ramp_is_told_where_it_begins(ramp: int, every: int) -> None:
    lr = cycles(100, ramp)
    found = diagnose(lr, every=every)
    assert statuses(found) == ["ok", "warn", "ok"]
    assert (found["schedule.restarts"].step, found["schedule.restarts"].value) == (100, 3.0)
    assert statuses(diagnose(lr, every=every, planned=lr)) == ["ok"] * 3
    assert statuses(diagnose(lr, every=every, restarts_planned=True)) == ["ok"] * 3


def test_a_cycle_of_ones_own_that_training_ends_high_on_is_told() -> None:
    lr = 0.5 + 0.5 * np.cos(5 * np.pi * T / len(T))
    assert statuses(diagnose(lr, restarts_planned=True)) == ["ok"] * 3
    found = diagnose(0.5 + 0.5 * np.cos(4 * np.pi * T / len(T)), restarts_planned=True)["schedule.restarts"]
    assert (found.status, found.step) == ("warn", pytest.approx(301, abs=1))
    assert found.value == pytest.approx(1.0, abs=0.01)
    begun = np.append(lr[:-1], 1.0)
    assert statuses(diagnose(begun, restarts_planned=True))[1] == "ok"


@pytest.mark.parametrize("every", [1, 4])
def test_a_collapse_is_told_at_its_real_step(every: int) -> None:
    lr = np.where(T < 200, 1 - T / 200, 0.0)
    finding = diagnose(lr, every=every)["schedule.collapse"]
    assert (finding.status, finding.step, finding.value) == ("fail", 200, 0.5)


def test_a_learning_rate_below_zero_is_told_at_its_first_step_and_rounding_is_none() -> None:
    longer = 1 - T / 360  # a linear decay whose length is 40 updates short
    finding = diagnose(longer)["schedule.collapse"]
    assert (finding.status, finding.step) == ("fail", 361)
    assert "negative from step 361 of 400 on, in 39 of 400 steps" in finding.summary
    assert diagnose(np.where(T < 399, longer.clip(min=0.1), -1e-17))["schedule.collapse"].status == "ok"


@pytest.mark.parametrize("first", [np.zeros(TOTAL), np.where(T < 200, 1.0, 0.0)], ids=["frozen", "frozen later"])
@pytest.mark.parametrize("other", ["lr/group1", "lr/optimizer1"])
def test_a_group_without_a_learning_rate_is_no_collapse_where_another_trains(first: np.ndarray, other: str) -> None:
    differs = np.where(first == 0, 1.0, math.nan)  # it is recorded from where it is another one than the first group's
    assert statuses(diagnose(first, others={other: differs})) == ["ok"] * 3
    assert diagnose(first, others={other: 0.0 * differs})["schedule.collapse"].status == "fail"


@pytest.mark.parametrize("lr", [np.full(TOTAL, math.nan), np.zeros(5), COSINE[:5]])
def test_nan_and_too_short_are_not_measured(lr: np.ndarray) -> None:
    diagnosis = diagnose(lr)
    assert {f.status for f in diagnosis} == {"not_measured"}
    assert len(diagnosis.findings) == 3


@pytest.mark.parametrize(("lr", "status"), [
    (np.where(T < 20, 1.0, 0.005), "warn"), (np.where(T < 320, 0.0, 1.0), "warn"),
    (np.where(T < 20, 1.0, 0.05), "ok"), (0.1 ** (T // 134.0), "ok"),
], ids=["falls to half a percent", "begins late", "falls to a twentieth", "staircase by tenths"])  # fmt: skip
def test_a_run_that_is_mostly_without_a_learning_rate(lr: np.ndarray, status: str) -> None:
    """It does not end early, and learns for a small part of its steps."""
    assert diagnose(lr)["schedule.collapse"].status == status
