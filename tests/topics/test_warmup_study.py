"""The warmup study on workloads whose shortest warmup follows from one line of arithmetic, and where none helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.workloads.analytic import quadratic, valley

STEEPNESS = 201.0
EDGE = 2 / STEEPNESS


def survives(multiple: float, warmup: int, total: int, *, shift_at: int | None = None) -> bool:
    """Whether gradient descent on the valley's wall stays finite, written out; at `shift_at` the wall moves away by 1."""
    wall, lr = 1.0, multiple * EDGE
    for step in range(total):
        wall += step == shift_at
        ramped = lr * min(1.0, step / warmup) if warmup else lr
        wall *= 1 - ramped * (1 + (STEEPNESS - 1) * wall**2)
        if not abs(wall) < 1e100:
            return False
    return True


def shortest(multiple: float, total: int, **more: Any) -> int:
    """The shortest warmup of the wall, on the full budget."""
    lengths = range(total)
    return next(w for w in lengths if all(survives(multiple, v, total + v, **more) for v in range(w, w + 20)))


def run(workload: wb.Workload, out: Path, **settings: Any) -> tuple[wb.Diagnosis, wb.StudyRecord]:
    record = wb.warmup.Study(**({"unstable_base_learning_rate": EDGE} | settings)).run(
        workload, wb.Trainer(device="cpu"), out=out
    )
    return wb.warmup.diagnose(record), record


def stages(record: wb.StudyRecord) -> list[str]:
    return [str(stage) for stage in record.trials["stage"]]


@pytest.mark.parametrize(("multiple", "total"), [(5.0, 300), (10.0, 400), (30.0, 500)])
def test_the_shortest_warmup_of_the_valley(tmp_path: Path, multiple: float, total: int) -> None:
    diagnosis, record = run(valley(total_steps=total), tmp_path / "s", multiples=(multiple,))
    found = diagnosis["warmup.shortest"]
    true = shortest(multiple, total)
    assert found.value is not None
    assert found.evidence["fails"] < true <= found.value <= 2 * max(found.evidence["fails"], 1)
    assert found.evidence["multiple"] == pytest.approx(multiple)
    assert diagnosis["warmup.insufficient"].status == ("ok" if multiple >= 10 else "warn")
    assert found.evidence["dropped"] == [1000, 10_000, 100_000]
    assert stages(record).count("warmup_full") == 1


def test_the_trials_are_what_the_playbook_asks_for(tmp_path: Path) -> None:
    """From 0 to the base lr, then constant for twice as long (F3.3, F3.5, F3.7), whatever the baseline's schedule."""
    workload = valley(total_steps=400)
    workload = workload.replace(config=workload.config.replace(schedule="cosine"))
    diagnosis, record = run(workload, tmp_path / "s")
    short = record.trials[record.trials["stage"] == "warmup"]
    assert short["warmup_steps"].tolist()[:2] == [10, 40], "the default grid below the cap, then the cap"
    for trial, ramp in zip(short["trial"], short["warmup_steps"], strict=True):
        lr = record.trial(trial).steps["lr"].to_numpy()
        expected = 10 * EDGE * np.minimum(np.arange(3 * ramp) / ramp, 1.0)
        assert lr == pytest.approx(expected[: len(lr)], rel=1e-6)
    (full,) = record.trials.query("stage == 'warmup_full'").to_dict("records")
    assert full["total_steps"] == 400 + full["warmup_steps"]
    lr = record.trial(full["trial"]).steps["lr"].to_numpy()
    before = wb.schedules.lr_values(workload.config.replace(peak_lr=10 * EDGE))
    assert lr[full["warmup_steps"] :] == pytest.approx(before, rel=1e-6), "the schedule of before, untouched (F3.11)"
    assert diagnosis["warmup.shortest"].evidence["total_steps"] == full["total_steps"]


def test_it_stops_early_where_neither_sign_holds(tmp_path: Path) -> None:
    """Gradient noise makes a small lr the best one, far below the edge at 2, and ten times it still trains."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    first = wb.stability.Study(probe_steps=20, sweep=wb.lr_sweep.Study(lrs=(0.05, 0.1, 0.5, 1.0, 1.8, 2.5)))
    diagnosis, record = run(workload, tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert diagnosis["warmup.needed"].status == "ok"
    assert not set(stages(record)) & {"warmup", "warmup_full"}
    assert "neither sign" in diagnosis["warmup.shortest"].summary
    assert diagnosis["warmup.insufficient"].status == "not_measured"


def test_it_finds_the_unstable_lr_by_itself_and_goes_on_at_the_edge(tmp_path: Path) -> None:
    sweep = wb.lr_sweep.Study(lrs=(EDGE / 4, EDGE / 2, 0.95 * EDGE, 1.05 * EDGE))
    first = wb.stability.Study(probe_steps=20, sweep=sweep)
    diagnosis, record = run(valley(), tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert record.facts["warmup"]["source"] == "record"
    assert record.facts["warmup"]["unstable_lr"] == pytest.approx(EDGE, rel=0.06)
    assert diagnosis["warmup.needed"].status == "warn"
    found = diagnosis["warmup.shortest"]
    assert found.value is not None
    assert found.evidence["fails"] < shortest(found.evidence["lr"] / EDGE, 400) <= found.value
