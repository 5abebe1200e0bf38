"""A budget: never exceeded, spent on what tells most, and gone on from later as if there had been none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.programs.function import FunctionRun
from workbench.record.roles import Role
from workbench.studies.session import open_session

pytestmark = pytest.mark.usefixtures("no_figures")
STEPS = 40


def diagnosed(path: Path, budget: str | None, **given: Any) -> Diagnosis:
    return wb.diagnose(small_workload(config={"total_steps": STEPS}), out=path, budget=budget, command="c", **given)


def steps(path: Path) -> int:
    return int(wb.open(path).trials["steps_run"].sum())


@pytest.mark.parametrize("given", ["", "3", "x", "-1x", "0s", "3 days", "nanx"])
def test_what_is_no_budget_says_what_is_one(given: str) -> None:
    with pytest.raises(UsageError, match=r"budget=.*is not known\. Give baseline runs or time: 3x, 90s, 45m, 2h"):
        wb.diagnose(small_workload(), budget=given)


def test_less_than_the_baseline_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"budget='0\.5x' is less than the baseline run.*--steps"):
        diagnosed(tmp_path / "s", "0.5x")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("budget", [1, 2, 3.5, 6, 9])
def test_a_budget_is_never_exceeded_and_the_baseline_comes_first(tmp_path: Path, budget: float) -> None:
    found = diagnosed(tmp_path / "s", f"{budget}x")
    assert STEPS <= steps(tmp_path / "s") <= budget * STEPS
    trials = wb.open(tmp_path / "s").trials
    assert trials["stage"].iloc[0] == Role.BASELINE
    assert set(trials["state"]) <= {"complete", "diverged"}, "a trial that is not paid for is not begun"
    assert f"budget of {budget}x" in found.cost["budget"]
    assert found["loop.no_update"].status == "ok", "what needs no further run is told"
    if budget == 1:
        assert found["lr.best"].status == "not_measured"
    again = diagnosed(tmp_path / "s", f"{budget}x")
    assert (len(wb.open(tmp_path / "s").trials), again.rows()) == (len(trials), found.rows())


def test_a_diagnosis_goes_on_with_more_and_ends_as_without_a_budget(tmp_path: Path) -> None:
    whole = diagnosed(tmp_path / "whole", None)
    assert "budget" not in whole.cost
    for budget in ("2x", "5x", None):
        last = diagnosed(tmp_path / "s", budget)
    one, other = (wb.open(tmp_path / name).trials for name in ("whole", "s"))
    assert set(one["peak_lr"]) == set(other["peak_lr"])
    assert {f.code: f.status for f in last} == {f.code: f.status for f in whole}
    assert last.recommendation["config"] == whole.recommendation["config"]
    assert not last.cost.get("budget")


def test_a_smaller_budget_does_not_replace_what_a_larger_one_has_shown(tmp_path: Path) -> None:
    diagnosed(tmp_path / "s", "6x")
    before = (tmp_path / "s" / "diagnosis.json").read_bytes()
    with pytest.raises(UsageError, match=r"budget='2x': .*s holds [\d.]+ baseline runs already.*as much or more"):
        diagnosed(tmp_path / "s", "2x")
    assert (tmp_path / "s" / "diagnosis.json").read_bytes() == before


def test_a_time_pays_for_the_baseline_at_least(tmp_path: Path) -> None:
    diagnosed(tmp_path / "s", "0.001s")
    assert steps(tmp_path / "s") == STEPS
    diagnosed(tmp_path / "s", "2h")
    assert steps(tmp_path / "s") > 3 * STEPS


def test_a_baseline_that_diverges_at_once_makes_no_other_run_look_cheap(tmp_path: Path) -> None:
    with open_session(
        small_workload(config={"total_steps": 1000}), stem="s", settings={}, out=tmp_path / "s"
    ) as session:
        writer = session.writer.trial(session.config.to_dict(), stage=Role.BASELINE, train_examples=1)
        writer.event("end", state="diverged", seconds=2.0, steps_run=10)
        session.trial(session.config, stage=Role.BASELINE)
        assert session.run_s == pytest.approx(200.0)


def too_low(run: FunctionRun) -> None:
    x = torch.randn(256, 8)
    y = x @ torch.randn(8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    for k in range(STEPS):
        optimizer.zero_grad()
        (model(x[32 * (k % 8) :][:32]).squeeze(1) - y[32 * (k % 8) :][:32]).square().mean().backward()
        optimizer.step()
    run.log(done=1.0)


def test_a_function_keeps_its_budget_and_its_proof_is_paid_for(tmp_path: Path) -> None:
    short = wb.diagnose_function(too_low, tmp_path / "short", budget="3x")
    assert STEPS <= steps(tmp_path / "short") <= 3 * STEPS
    assert short["lr.too_low"].status == "fail"
    assert short["lr.best"].summary.startswith("At least"), "the budget ended the search, not the loss"
    assert short["lr.grid_edge"].status == "not_measured"
    longer = wb.diagnose_function(too_low, tmp_path / "longer", budget="9x")
    assert steps(tmp_path / "longer") <= 9 * STEPS
    assert (wb.open(tmp_path / "longer").trials["stage"] == Role.PROOF).any()
    assert longer.recommendation["adopted"]
