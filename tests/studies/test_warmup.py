"""The warmup study on workloads whose shortest warmup follows from one line of arithmetic, and where none helps."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench.errors import ConfigError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import StudyRecord
from workbench.schedules import lr_values, prepend_warmup
from workbench.studies.session import Session, open_session
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.study import InstabilityStudy
from workbench.topics.warmup.diagnose import CODES, diagnose_warmup
from workbench.topics.warmup.search import cap_steps
from workbench.topics.warmup.study import WarmupStudy
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import Valley, quadratic, valley
from workbench.workloads.base import Workload

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


def run(workload: Workload, out: Path, **settings: Any) -> tuple[Diagnosis, StudyRecord]:
    record = WarmupStudy(**({"unstable_base_learning_rate": EDGE} | settings)).run(
        workload, Trainer(device="cpu"), out=out
    )
    return diagnose_warmup(record), record


def stages(record: StudyRecord) -> list[str]:
    return [str(stage) for stage in record.trials["stage"]]


def test_the_oracle_is_what_the_workload_says_of_itself() -> None:
    assert (shortest(10, 400), shortest(100, 2000)) == (12, 116)
    assert not survives(1.01, 0, 400)
    assert survives(0.99, 0, 400)


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


def test_a_second_round_at_a_hundred_times(tmp_path: Path) -> None:
    diagnosis, _ = run(valley(total_steps=1200), tmp_path / "s", multiples=(10.0, 100.0))
    rounds = diagnosis["warmup.shortest"].evidence["rounds"]
    assert [round(found["multiple"]) for found in rounds] == [10, 100]
    for found in rounds:
        assert found["next_shorter"] < shortest(found["multiple"], 1200) <= found["shortest"]


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
    before = lr_values(workload.config.replace(peak_lr=10 * EDGE))
    assert lr[full["warmup_steps"] :] == pytest.approx(before, rel=1e-6), "the schedule of before, untouched (F3.11)"
    assert diagnosis["warmup.shortest"].evidence["total_steps"] == full["total_steps"]


def test_ten_thousand_and_one_thousand_are_eleven_thousand() -> None:
    """F3.13, exact."""
    config = valley(total_steps=10_000).config
    assert prepend_warmup(config, 1000).total_steps == 11_000


def test_candidates_are_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    real = Session.trials

    def noted(session: Session, configs: Any, *, stage: str) -> Any:
        calls.append([config.warmup_steps for config in configs])
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", noted)
    run(valley(total_steps=400), tmp_path / "s", warmup_steps=(5, 10, 30, 40, 1000))
    assert calls[0] == [0, 0, 5, 10, 30, 40]


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


def test_on_a_quadratic_no_warmup_ever_helps(tmp_path: Path) -> None:
    """Its curvature is the same everywhere: what is unstable stays so, however it is reached."""
    workload = quadratic(dimension=4, condition=4.0, total_steps=200)
    diagnosis, record = run(workload, tmp_path / "s", unstable_base_learning_rate=2.05)
    assert diagnosis["warmup.shortest"].status == "not_measured"
    assert diagnosis["warmup.insufficient"].status == "warn"
    assert "not curable by warmup" in diagnosis["warmup.insufficient"].summary
    tried = record.trials.query("stage == 'warmup'")
    assert len(tried) == 2 + 3, "two lengths at ten times, then three smaller multiples at the cap"
    for trial in tried["trial"]:
        loss = record.trial(trial).steps["loss"].to_numpy()
        assert loss[-1] > 10 * loss[0], "each of them blew up"


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


def moved(at: int, total_steps: int) -> Workload:
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


def test_a_blow_up_after_every_ramp_leaves_nothing(tmp_path: Path) -> None:
    diagnosis, record = run(moved(350, 500), tmp_path / "s", multiple_trials=0)
    assert diagnosis["warmup.shortest"].status == "not_measured"
    assert diagnosis["warmup.insufficient"].status == "warn"
    full = record.trials.query("stage == 'warmup_full'")
    assert full["warmup_steps"].tolist()[-1] == 50, "the cap was given its chance"
    assert (full["state"] == "diverged").all()


def test_it_stops_early_where_neither_sign_holds(tmp_path: Path) -> None:
    """Gradient noise makes a small lr the best one, far below the edge at 2, and ten times it still trains."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    first = InstabilityStudy(probe_steps=20, sweep=LRSweep(lrs=(0.05, 0.1, 0.5, 1.0, 1.8, 2.5)))
    diagnosis, record = run(workload, tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert diagnosis["warmup.needed"].status == "ok"
    assert not set(stages(record)) & {"warmup", "warmup_full"}
    assert "neither sign" in diagnosis["warmup.shortest"].summary
    assert diagnosis["warmup.insufficient"].status == "not_measured"


def test_it_finds_the_unstable_lr_by_itself_and_goes_on_at_the_edge(tmp_path: Path) -> None:
    sweep = LRSweep(lrs=(EDGE / 4, EDGE / 2, 0.95 * EDGE, 1.05 * EDGE))
    first = InstabilityStudy(probe_steps=20, sweep=sweep)
    diagnosis, record = run(valley(), tmp_path / "s", unstable_base_learning_rate=None, instability=first)
    assert record.facts["warmup"]["source"] == "record"
    assert record.facts["warmup"]["unstable_lr"] == pytest.approx(EDGE, rel=0.06)
    assert diagnosis["warmup.needed"].status == "warn"
    found = diagnosis["warmup.shortest"]
    assert found.value is not None
    assert found.evidence["fails"] < shortest(found.evidence["lr"] / EDGE, 400) <= found.value


def test_what_the_study_knows_already_is_not_looked_for_again(tmp_path: Path) -> None:
    sweep = LRSweep(lrs=(EDGE / 4, EDGE / 2, 0.95 * EDGE, 1.05 * EDGE))
    with open_session(valley(), stem="walk", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s") as session:
        InstabilityStudy(probe_steps=20, sweep=sweep).extend(session)
        before = len(session.record.trials)
        WarmupStudy().extend(session)
        record = session.record
    assert set(stages(record)[before:]) == {"warmup", "warmup_full"}
    assert diagnose_warmup(record)["warmup.shortest"].value is not None


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


@pytest.mark.parametrize(("total", "settings", "said"), [
    (99, {}, "0.1 of 99 steps is 9, and the shortest candidate has 10; train for at least 100 steps"),
    (400, {"warmup_steps": (1000,)}, "give warmup_steps of 4 to 40"),
    (400, {"cap_frac": 0.01}, "train for at least 1,000 steps"),
])  # fmt: skip
def test_a_budget_too_short_for_any_candidate_says_what_would_do(
    tmp_path: Path, total: int, settings: dict[str, Any], said: str
) -> None:
    diagnosis, record = run(valley(total_steps=total), tmp_path / "s", **settings)
    assert len(record.trials) == 0
    assert {diagnosis[code].status for code in CODES} == {"not_measured"}
    assert said in diagnosis["warmup.shortest"].summary
    assert said in diagnosis["warmup.over_cap"].summary


@pytest.mark.parametrize("total", [9, 20, 39, 40, 41, 60, 99])
@pytest.mark.parametrize(("ramp", "ratio", "least"), [(0, 2.0, 4), (2, 2.0, 4), (0, 2.2, 3), (0, 1.0, 5)])
def test_what_would_do_does(total: int, ramp: int, ratio: float, least: int) -> None:
    """Its advice, followed to the letter: each length it names is accepted and fits, and so does the longer training."""
    study = WarmupStudy(post_warmup_ratio=ratio)
    config = valley(total_steps=total).config.replace(warmup_steps=ramp)
    cap = max(cap_steps(total, study.cap_frac) - ramp, 0)
    said = study._too_short(config, cap)
    needed = int(re.search(r"at least ([\d,]+) steps", said)[1].replace(",", ""))
    assert (
        cap_steps(needed, study.cap_frac) - ramp
        == min(study.warmup_steps)
        > cap_steps(needed - 1, study.cap_frac) - ramp
    )
    lengths = re.search(r"give warmup_steps of (\d+)(?: to (\d+))?$", said)
    assert (lengths is None) == (cap < least)
    if lengths is not None:
        low, high = int(lengths[1]), int(lengths[2] or lengths[1])
        assert (low, high) == (least, cap)
        for steps in (low, high):
            assert WarmupStudy(post_warmup_ratio=ratio, warmup_steps=(steps,)).warmup_steps == (steps,)


def test_twenty_steps_are_told_only_to_train_longer_and_forty_may_take_a_shorter_ramp(tmp_path: Path) -> None:
    diagnosis, _ = run(valley(total_steps=20), tmp_path / "20")
    assert "train for at least 100 steps." in diagnosis["warmup.shortest"].summary
    assert "give warmup_steps" not in diagnosis["warmup.shortest"].summary
    diagnosis, _ = run(valley(total_steps=40), tmp_path / "40")
    assert "or give warmup_steps of 4." in diagnosis["warmup.shortest"].summary
    _, record = run(valley(total_steps=40), tmp_path / "4", warmup_steps=(4,), multiple_trials=0)
    assert record.facts["warmup"]["candidates"] == [4]
    assert "warmup" in set(record.trials["stage"])


def test_a_hundred_steps_are_enough_for_the_shortest_candidate(tmp_path: Path) -> None:
    _, record = run(valley(total_steps=100), tmp_path / "s", multiple_trials=0)
    assert record.facts["warmup"]["candidates"] == [10]


def test_a_baseline_that_never_trains_shows_nothing(tmp_path: Path) -> None:
    """A flat place: no lr learns anything, so no warmup can be called too short."""
    workload = valley(slow_curvature=0.0, total_steps=200)
    flat = workload.replace(loss=lambda outputs, batch: 0.0 * outputs + 2.3)
    diagnosis, _ = run(flat, tmp_path / "s")
    assert {diagnosis[code].status for code in CODES} == {"not_measured"}
    assert "learned anything" in diagnosis["warmup.insufficient"].summary


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
    with pytest.raises(ConfigError, match=said):
        WarmupStudy(**changes)
