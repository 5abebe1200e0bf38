"""Trials that do not depend on each other are asked for together, and asking so changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.errors import DataError
from workbench.record.read import StudyRecord, TrialRecord
from workbench.studies.session import Session, open_session
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.rounds import Asked, run_round
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import catapult, quadratic
from workbench.workloads.base import Workload

Calls = list[list[float]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The lrs asked for, call by call."""
    seen: Calls = []
    real = Session.trials

    def noted(session: Session, configs: Sequence[TrainConfig], *, stage: str) -> list[TrialRecord]:
        seen.append([config.peak_lr for config in configs])
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", noted)
    return seen


def run(study: Any, workload: Workload, out: Path) -> StudyRecord:
    record = study.run(workload, Trainer(device="cpu"), out=out)
    assert isinstance(record, StudyRecord)
    return record


def test_given_lrs_are_one_round(tmp_path: Path, calls: Calls) -> None:
    record = run(LRSweep(lrs=(0.3, 0.01, 0.1), seeds=2), small_workload(), tmp_path / "s")
    assert calls == [[0.3, 0.3, 0.01, 0.01, 0.1, 0.1]]
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
    assert calls == [[0.2, 0.1, 0.3]], "one call, whatever the stages"


def test_a_round_with_a_trial_that_cannot_be_trained_names_it_and_writes_nothing(tmp_path: Path) -> None:
    workload = small_workload()
    good, bad = workload.config.replace(peak_lr=0.1), workload.config.replace(peak_lr=0.2, batch_size=1000)
    with (
        open_session(workload, stem="round", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s") as session,
        pytest.raises(DataError, match="batch_size=1000") as raised,
    ):
        run_round(session, [Asked("a", good), Asked("b", bad)])
    assert "configs[1] (peak_lr=0.2)" in str(raised.value)
    assert not (tmp_path / "s" / "trials").exists()


def test_lengths_and_stages_of_a_round_do_not_touch_each_other(tmp_path: Path) -> None:
    workload = small_workload()
    long, short = workload.config, workload.config.replace(peak_lr=0.2, total_steps=15, eval_every_steps=1)
    with open_session(
        workload, stem="round", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s"
    ) as session:
        run_round(session, [Asked("a", short), Asked("b", long)])
        together = session.record
    for number, config in enumerate((short, long)):
        alone = Trainer(device="cpu").run(workload, config, out=tmp_path / str(number))
        one, other = (r.steps["loss"].to_numpy() for r in (alone, together.trial(number)))
        assert one == pytest.approx(other, rel=1e-6)
        assert alone.evals["step"].tolist() == together.trial(number).evals["step"].tolist()


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
    record = run(study, quadratic(dimension=4, condition=4.0, total_steps=60), tmp_path / "s")
    star = record.facts["lr_star"]
    multiples = [1.0, 2.0, 5.0, 10.0] if confirm_all else [1.0, 2.0, 5.0]
    assert [lr / star for lr in calls[-1][:-1]] == pytest.approx(multiples), "and the fix comes last"
    assert len(calls) == 3, "the sweep, lr* which is there already, and all the rest"
    confirm = ["confirm"] * (1 + confirm_all)
    assert record.trials["stage"].tolist() == ["lr_sweep"] * 4 + ["probe", *confirm, "fix"]


def test_confirmation_runs_below_the_known_edge_are_run_together(tmp_path: Path, calls: Calls) -> None:
    """With lr* = 0.05 and an edge at 2, neither 5 nor 10 times lr* can be the first that is unstable: both are needed."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    sweep = LRSweep(lrs=(0.01, 0.05, 2.5))
    run(InstabilityStudy(sweep=sweep, probe_steps=20, confirm_all=False, fixes=()), workload, tmp_path / "s")
    assert calls[-1] == pytest.approx([0.05, 0.1, 0.25, 0.5])


def test_without_a_known_edge_the_first_confirmation_run_decides(tmp_path: Path, calls: Calls) -> None:
    workload = catapult(curvature=1.0, peak_lr=1.0)
    study = InstabilityStudy(best_lr=1.0, probe_steps=20, confirm_all=False, fixes=("warmup",))
    record = run(study, workload, tmp_path / "s")
    assert calls == [[1.0, 2.0, 5.0]], "5 is divergent, so 10 is not run"
    assert record.trials["stage"].tolist() == ["lr_sweep", "probe", "confirm"]
