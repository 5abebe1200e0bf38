"""The warmup study on workloads whose shortest warmup follows from one line of arithmetic, and where none helps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.studies.session import Session
from workbench.workloads.analytic import Valley, quadratic, valley

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
    record = wb.WarmupStudy(**({"unstable_base_learning_rate": EDGE} | settings)).run(
        workload, wb.Trainer(device="cpu"), out=out
    )
    return wb.diagnose_warmup(record), record


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
    before = wb.lr_values(workload.config.replace(peak_lr=10 * EDGE))
    assert lr[full["warmup_steps"] :] == pytest.approx(before, rel=1e-6), "the schedule of before, untouched (F3.11)"
    assert diagnosis["warmup.shortest"].evidence["total_steps"] == full["total_steps"]


def test_where_the_cap_is_too_short_the_largest_multiple_is_found(tmp_path: Path) -> None:
    """Ten steps are too few for ten times; the oracle says for how much they are enough."""
    diagnosis, _ = run(valley(total_steps=100), tmp_path / "s")
    found = diagnosis["warmup.insufficient"]
    assert found.status == "warn"
    assert found.value is not None
    failing = [r["multiple"] for r in found.evidence["rounds"] if r["next_shorter"] == 10]
    assert survives(found.value, 10, 110)
    assert not survives(min(failing), 10, 30)
    assert min(failing) <= 1.4 * found.value, "halved three times in the logarithm"
    value = diagnosis["warmup.shortest"].value
    assert value is not None
    assert shortest(found.value, 100) <= value <= 10


class Moved(nn.Module):
    """A valley whose wall moves away by 1 with training step `at`; a buffer counts, so that a resumed run agrees."""

    seen: Tensor

    def __init__(self, at: int) -> None:
        super().__init__()
        self.valley, self.at = Valley(steepness=STEEPNESS, slow=20.0, slow_curvature=0.1), at
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        shift = (self.seen > self.at).double()
        square = (self.valley.wall + shift).square()
        steep = 0.5 * square + 0.25 * (STEEPNESS - 1) * square.square()
        slow: Tensor = 0.05 * self.valley.slow.square().sum()
        return (steep + slow).expand(len(x))


def moved(at: int, total_steps: int) -> wb.Workload:
    return valley(total_steps=total_steps, peak_lr=0.2 * EDGE).replace(build_model=lambda: Moved(at))


def test_a_later_blow_up_is_seen_by_the_full_budget_only(tmp_path: Path) -> None:
    """At step 32 the wall moves: a short trial of 10 steps of warmup ends at 30, and only a long ramp is still low then."""
    multiple, total, at = 5.0, 2500, 32
    diagnosis, record = run(moved(at, total), tmp_path / "s", multiples=(multiple,), full_runs=9)
    true = shortest(multiple, total, shift_at=at)
    assert survives(multiple, 10, 30, shift_at=at), "the short trial of 10 must pass for this test to mean anything"
    assert 10 < true <= 250
    found = diagnosis["warmup.shortest"]
    assert found.value is not None
    assert found.evidence["fails"] < true <= found.value <= 2 * found.evidence["fails"]
    lengths = {row["steps"]: row for row in found.evidence["rounds"][0]["lengths"]}
    assert (lengths[10]["short"], lengths[10]["full"]) in {(True, False), (True, None)}
    assert any(row["short"] and row["full"] is False for row in lengths.values())
    assert stages(record).count("warmup_full") > 2
    _, cheap = run(moved(at, total), tmp_path / "cheap", multiples=(multiple,), full_runs=2)
    assert stages(cheap).count("warmup_full") == 2, "no more runs of the full budget than are allowed"


def test_it_stops_early_where_neither_sign_holds(tmp_path: Path) -> None:
    """Gradient noise makes a small lr the best one, far below the edge at 2, and ten times it still trains."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    first = wb.InstabilityStudy(probe_steps=20, sweep=wb.LRSweep(lrs=(0.05, 0.1, 0.5, 1.0, 1.8, 2.5)))
    diagnosis, record = run(workload, tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert diagnosis["warmup.needed"].status == "ok"
    assert not set(stages(record)) & {"warmup", "warmup_full"}
    assert "neither sign" in diagnosis["warmup.shortest"].summary
    assert diagnosis["warmup.insufficient"].status == "not_measured"


def test_it_finds_the_unstable_lr_by_itself_and_goes_on_at_the_edge(tmp_path: Path) -> None:
    sweep = wb.LRSweep(lrs=(EDGE / 4, EDGE / 2, 0.95 * EDGE, 1.05 * EDGE))
    first = wb.InstabilityStudy(probe_steps=20, sweep=sweep)
    diagnosis, record = run(valley(), tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert record.facts["warmup"]["source"] == "record"
    assert record.facts["warmup"]["unstable_lr"] == pytest.approx(EDGE, rel=0.06)
    assert diagnosis["warmup.needed"].status == "warn"
    found = diagnosis["warmup.shortest"]
    assert found.value is not None
    assert found.evidence["fails"] < shortest(found.evidence["lr"] / EDGE, 400) <= found.value


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(valley(), tmp_path / "whole")[1]
    real, calls = Session.trials, []

    def stopping(session: Session, configs: Any, *, stage: str) -> Any:
        calls.append(stage)
        if len(calls) == 3:
            raise RuntimeError("stopped")
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        run(valley(), tmp_path / "s")
    monkeypatch.setattr(Session, "trials", real)
    again = run(valley(), tmp_path / "s")[1]
    compared = ["trial", "stage", "state", "peak_lr", "warmup_steps", "total_steps"]
    assert again.trials[compared].equals(whole.trials[compared])
    assert again.steps["loss"].equals(whole.steps["loss"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unstable_base_learning_rate": 0.0}, r"unstable_base_learning_rate=0\.0 must be a finite number above 0"),
        ({"unstable_base_learning_rate": -1e-3}, "unstable_base_learning_rate=-0.001"),
        ({"unstable_base_learning_rate": math.nan}, "unstable_base_learning_rate=nan"),
        ({"multiples": ()}, r"multiples=\(\) must hold at least one"),
        ({"multiples": (10.0, -5)}, r"multiples\[1\]=-5"),
        ({"warmup_steps": ()}, r"warmup_steps=\(\)"),
        ({"warmup_steps": (10, 0)}, r"warmup_steps\[1\]=0 must be an integer of at least 1"),
        ({"warmup_steps": (10.5,)}, r"warmup_steps\[0\]=10.5"),
        ({"warmup_steps": (3,)}, r"a trial of 9 steps, but 10 are needed to judge one: raise it to 4"),
        ({"cap_frac": 0.0}, "cap_frac=0.0"),
        ({"cap_frac": 1.5}, "cap_frac=1.5 must be at most 1"),
        ({"post_warmup_ratio": math.inf}, "post_warmup_ratio=inf"),
        ({"refine_ratio": 1.0}, "refine_ratio=1.0 must be above 1"),
        ({"full_runs": 1}, "full_runs=1 must be an integer of at least 2"),
        ({"multiple_trials": -1}, "multiple_trials=-1 must be an integer of at least 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wb.ConfigError, match=said):
        wb.WarmupStudy(**changes)
