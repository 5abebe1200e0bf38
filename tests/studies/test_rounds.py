"""Trials that do not depend on each other are asked for together, and asking so changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.diagnostics.lr_sweep import diagnose_lr_sweep
from workbench.record import StudyRecord, TrialRecord
from workbench.studies.instability import InstabilityStudy
from workbench.studies.lr_sweep import LRSweep
from workbench.studies.rounds import Asked, run_round
from workbench.studies.session import Session, open_session
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.catapult import catapult
from workbench.workloads.quadratic import quadratic

Calls = list[list[tuple[str, float]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is asked for, call by call, as (stage, lr)."""
    seen: Calls = []
    real = Session.trials

    def noted(session: Session, configs: Sequence[TrainConfig], *, stage: str) -> list[TrialRecord]:
        seen.append([(stage, config.peak_lr) for config in configs])
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", noted)
    return seen


def run(study: Any, workload: Workload, out: Path) -> StudyRecord:
    record = study.run(workload, Trainer(device="cpu"), out=out)
    assert isinstance(record, StudyRecord)
    return record


def test_given_lrs_are_one_round(tmp_path: Path, calls: Calls) -> None:
    record = run(LRSweep(lrs=(0.3, 0.01, 0.1), seeds=2), small_workload(), tmp_path / "s")
    assert calls == [[("lr_sweep", lr) for lr in (0.3, 0.3, 0.01, 0.01, 0.1, 0.1)]]
    assert record.trials["shared_seed"].tolist() == [0, 1] * 3


def test_a_round_is_in_order_and_the_same_trial_is_run_once(tmp_path: Path, calls: Calls) -> None:
    workload = small_workload()
    first, second, third = (workload.config.replace(peak_lr=lr) for lr in (0.1, 0.2, 0.3))
    asked = [Asked("a", second), Asked("b", first), Asked("b", second), Asked("a", third)]
    with open_session(
        workload, stem="round", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s"
    ) as session:
        records = run_round(session, asked)
        assert [r.config["peak_lr"] for r in records] == [0.2, 0.1, 0.2, 0.3]
        assert records[0].number == records[2].number
        stages = session.record.trials.set_index("peak_lr")["stage"].to_dict()
        assert stages == {0.2: "a", 0.1: "b", 0.3: "a"}, "what it was asked for first"
        assert run_round(session, []) == []
    assert sorted(lr for call in calls for _, lr in call) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_the_number_of_lanes_changes_the_rounds_and_not_the_answer(tmp_path: Path, calls: Calls, lanes: int) -> None:
    workload = quadratic(dimension=10, condition=10.0, total_steps=100)
    diagnosis = diagnose_lr_sweep(run(LRSweep(lanes=lanes, full_batch_refinements=40), workload, tmp_path / "s"))
    assert diagnosis["lr.unstable"].value == pytest.approx(2.0, rel=0.05)
    assert diagnosis["lr.unstable"].evidence["ratio"] <= 1.05 * (1 + 1e-9)
    best = diagnosis["lr.best"]
    assert best.evidence["needs_refinement"] is False
    assert best.value is not None
    assert 1.6 < best.value < 2.0
    assert max(len(call) for call in calls) <= max(4, lanes), "4 is the coarse grid"
    assert len(calls) <= {1: 24, 2: 14, 4: 9, 8: 7}[lanes]


def test_a_search_by_short_runs_takes_few_rounds_and_few_full_length_trials(tmp_path: Path, calls: Calls) -> None:
    """Curvature 1: 2 is the edge at any length, so what short runs found is confirmed at once."""
    workload = quadratic(dimension=4, condition=4.0, total_steps=3200, peak_lr=0.125)
    record = run(LRSweep(full_batch_refinements=0), workload, tmp_path / "s")
    diagnosis = diagnose_lr_sweep(record)
    assert diagnosis["lr.unstable"].value == pytest.approx(2.0, rel=0.05)
    assert diagnosis["lr.unstable"].evidence["ratio"] <= 1.05 * (1 + 1e-9)
    full = record.trials[record.trials["stage"] != "lr_range"]
    assert len(full) <= 6
    assert len(calls) <= 8
    short = record.trials[record.trials["stage"] == "lr_range"]
    assert set(short["total_steps"]) == {200}
    assert len(short) <= 14
    assert set(short["eval_every_steps"]) == {200}, "a short run is asked for its training loss alone"


@pytest.mark.parametrize("confirm_all", [False, True])
def test_probe_confirmation_and_fix_do_not_wait_for_each_other(tmp_path: Path, calls: Calls, confirm_all: bool) -> None:
    sweep = LRSweep(lrs=(0.5, 1.0, 1.9, 2.1))
    study = InstabilityStudy(sweep=sweep, probe_steps=20, confirm_all=confirm_all, fixes=("warmup",))
    run(study, quadratic(dimension=4, condition=4.0, total_steps=60), tmp_path / "s")
    stages = [stage for call in calls for stage, _ in call]
    assert stages[:5] == ["lr_sweep"] * 5, "the sweep, and lr* once more, which is there already"
    assert sorted(stages[-3 - confirm_all :]) == ["confirm"] * (1 + confirm_all) + ["fix", "probe"]


def test_confirmation_runs_below_the_known_edge_are_run_together(tmp_path: Path, calls: Calls) -> None:
    """With lr* = 0.1 and an edge at 2, neither 5 nor 10 times lr* can be the first that is unstable: both are needed."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    sweep = LRSweep(lrs=(0.01, 0.05, 2.5))
    run(InstabilityStudy(sweep=sweep, probe_steps=20, confirm_all=False, fixes=()), workload, tmp_path / "s")
    (confirm,) = [[lr for stage, lr in call if stage == "confirm"] for call in calls if call[0][0] == "confirm"]
    assert confirm == pytest.approx([0.25, 0.5])


def test_without_a_known_edge_the_first_confirmation_run_decides(tmp_path: Path, calls: Calls) -> None:
    workload = catapult(curvature=1.0, peak_lr=1.0)
    study = InstabilityStudy(best_lr=1.0, probe_steps=20, confirm_all=False, fixes=("warmup",))
    record = run(study, workload, tmp_path / "s")
    assert [lr for call in calls for stage, lr in call if stage == "confirm"] == [5.0], "5 is divergent: 10 is not run"
    assert set(record.trials["stage"]) >= {"lr_sweep", "probe", "confirm"}
