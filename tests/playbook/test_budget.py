"""A budget: never exceeded, spent on what tells most, and gone on from later as if there had been none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.errors import UsageError, WorkloadError
from workbench.findings.diagnosis import Diagnosis
from workbench.playbook.plan import plan_diagnosis
from workbench.programs.function import FunctionRun
from workbench.record.roles import Role
from workbench.studies.budget import Budget
from workbench.studies.session import open_session

pytestmark = pytest.mark.usefixtures("no_figures")
STEPS = 40


def diagnosed(path: Path, budget: str | None, **given: Any) -> Diagnosis:
    return wb.diagnose(small_workload(config={"total_steps": STEPS}), out=path, budget=budget, command="c", **given)


def steps(path: Path) -> int:
    return int(wb.open(path).trials["steps_run"].sum())


@pytest.mark.parametrize("given", ["", "3", "x", "-1x", "0s", "3 days", "nanx"])
def test_what_is_no_budget_says_what_is_one(given: str) -> None:
    with pytest.raises(
        UsageError, match=r"budget=.*is not known\. Give baseline runs or time, or none for no limit: 3x, 90s, 45m, 2h"
    ):
        wb.diagnose(small_workload(), budget=given)


def test_less_than_the_baseline_pays_for_a_first_look(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"budget='0\.5x' pays for 20 updates of the baseline's 40.*at least 1x"):
        diagnosed(tmp_path / "s", "0.5x")
    assert not (tmp_path / "s").exists()
    found = wb.diagnose(small_workload(config={"total_steps": 400}), out=tmp_path / "s", budget="0.5x", command="c")
    assert found.cost["baseline_runs"] <= 0.5, "of whole runs"
    trials = wb.open(tmp_path / "s").trials
    assert len(trials) > 1, "the learning rate of the baseline is not the only one"
    assert set(trials["total_steps"]) == {66}, "a third of what is paid for"
    assert trials["steps_run"].sum() <= 0.5 * 400
    late = ("lr.at_edge", "evaluation.generalisation_gap", "checkpoints.best_not_last")
    assert all("a first look trains 66 updates of 400" in found[code].summary for code in late)
    assert {found[code].status for code in late} == {"not_measured"}
    assert found["loop.no_update"].status == "ok"
    assert "first look" in found.cost["budget"]


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
    whole = diagnosed(tmp_path / "whole", "none")
    assert "budget" not in whole.cost
    pairs = []
    for budget in ("2x", "5x", "none"):
        last = diagnosed(tmp_path / "s", budget)
        pairs.append(wb.open(tmp_path / "s").facts["evaluation_sample"]["pair"])
    assert pairs[0]["trials"] != pairs[-1]["trials"], (
        "the set is judged by the models that the last decision was between"
    )
    expected = {k: wb.open(tmp_path / "whole").facts["evaluation_sample"]["pair"][k] for k in ("values", "difference")}
    assert {k: pairs[-1][k] for k in expected} == expected
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


@pytest.mark.parametrize(("seeds", "limit"), [(3, 10), (1, 6)])
def test_a_diagnosis_of_which_nobody_says_what_it_may_cost_has_a_limit(tmp_path: Path, seeds: int, limit: int) -> None:
    def valley(budget: str | None) -> tuple[Diagnosis, int]:
        return wb.diagnose("valley", out=tmp_path / "s", proof_seeds=seeds, budget=budget, command="c"), steps(
            tmp_path / "s"
        )

    found, trained = valley(None)
    assert 0.5 * limit * 400 < trained <= limit * 400
    assert f"--budget {2 * limit}x, or none for no limit, goes on" in found.cost["budget"]
    if seeds > 1:
        assert found["lr.at_edge"].evidence["harmful"] is True, "a warmup was tried before the last digits of the edge"
        assert not found.recommendation["adopted"]
        assert "it was not trained under fresh seeds" in found.recommendation["reason"]
    found, all_of_it = valley("none")
    assert all_of_it > trained
    assert found.recommendation["adopted"]
    assert valley(None)[1] == all_of_it, "what costs more than the default is there: it is read"


@pytest.mark.parametrize(("name", "low", "high"), [("valley", 0.0059, 0.00704), ("breast_cancer", 0.113, 0.381)])
def test_three_runs_find_the_learning_rate_that_ten_find(tmp_path: Path, name: str, low: float, high: float) -> None:
    """Short runs choose the second one of full length; `low` and `high` are between what ten baseline runs find as good as the best."""
    found = wb.diagnose(name, out=tmp_path / "s", budget="3x", command="c")
    assert low <= found["lr.best"].value <= high
    whole = wb.load_workload(name).config.total_steps
    assert steps(tmp_path / "s") <= 3 * whole
    trials = wb.open(tmp_path / "s").trials
    assert (trials["total_steps"] == whole).sum() == 2


def test_a_plain_call_on_a_study_that_cost_more_says_what_was_said(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "s", "none")
    assert steps(tmp_path / "s") > 10 * STEPS
    again = diagnosed(tmp_path / "s", None)
    assert (again.rows(), again.cost) == (found.rows(), found.cost)


def test_seeds_of_the_baseline_are_trained_where_nothing_is_to_be_proved(tmp_path: Path) -> None:
    """Without them the noise of a loss is not known, and no learning rate is the best."""
    found = diagnosed(tmp_path / "s", "10x")
    assert found["lr.best"].status == "ok"


def test_a_time_that_is_too_short_for_the_baseline_pays_for_a_first_look(tmp_path: Path) -> None:
    diagnosed(tmp_path / "look", "0.001s")
    assert set(wb.open(tmp_path / "look").trials["total_steps"]) == {20}, "the fewest updates that show anything"
    diagnosed(tmp_path / "s", "2h")
    assert steps(tmp_path / "s") > 3 * STEPS


def endless(run: FunctionRun) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    while True:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()


def test_a_training_that_takes_longer_than_a_third_of_the_time_is_judged_by_its_beginning(tmp_path: Path) -> None:
    found = wb.diagnose_function(endless, tmp_path / "s", budget="3s")
    record = wb.open(tmp_path / "s")
    own = record.trials["total_steps"].iloc[0]
    assert record.facts["first_look"] == {"steps": own, "whole": None}
    assert set(record.trials["steps_run"]) == {own}, "every run is as long as the first one"
    assert f"a first look trains {own:,} updates, not to its end" in found["lr.at_edge"].summary
    assert found["loop.no_zero_grad"].status == "ok"
    with pytest.raises(UsageError, match="less than one run of the program"):
        wb.diagnose_function(endless, tmp_path / "other", budget="0.5x")


def test_a_first_look_for_a_time_goes_on_whatever_a_run_takes_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_s in (1.0, 1.3, 10.0):
        monkeypatch.setattr("workbench.playbook.plan.run_price", lambda *_, run_s=run_s: (run_s, 0))
        workload = small_workload(config={"total_steps": 400})
        wb.diagnose(workload, out=tmp_path / "s", steps=200, budget="0.9s", command="c")
        record = wb.open(tmp_path / "s")
        assert set(record.trials["total_steps"]) == {50}
        assert record.facts["first_look"] == {"steps": 50, "whole": 200}


def test_a_plan_tells_the_size_of_checkpoints_that_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW keeps two numbers a weight beside it: 12 bytes of each of a million."""
    workload = small_workload(
        build_model=lambda: nn.Sequential(nn.Linear(3, 200_000), nn.Linear(200_000, 1)),
        config={"optimizer": "adamw", "precision": None},
    )
    assert "Checkpoints" not in str(plan_diagnosis(workload, budget=Budget.of("3x", 3)))
    monkeypatch.setattr("workbench.playbook.plan.WAITING_BYTES", 10**6)
    assert "Checkpoints of 0.011 GiB" in str(plan_diagnosis(workload, budget=Budget.of("3x", 3)))


@pytest.mark.parametrize("whole", [40, 119, 400, 5107, 99_991])
def test_the_least_budget_that_is_told_is_taken(whole: int) -> None:
    with pytest.raises(UsageError) as error:
        Budget.of(f"{20 / whole:.6f}x", 3).first_look(whole, None)
    least = Budget.of(str(error.value).rsplit(" ", 1)[1].rstrip("."), 3)
    assert (least.first_look(whole, None) or whole) >= 20


def test_a_config_that_diverges_at_once_has_a_plan_without_times() -> None:
    plan = plan_diagnosis(small_workload(config={"peak_lr": 1e30}), budget=Budget.of("2h", 3))
    assert plan.run_s is None
    assert "nan" not in str(plan)


def falls_below_zero(run: FunctionRun) -> None:
    """As a likelihood does; the runs after the first one are ended early, as by patience."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    CALLS.append(len(CALLS))
    for _ in range(60 if len(CALLS) == 1 else 40):
        optimizer.zero_grad()
        (-1 - weight.sum() + 4 + 0.001 * torch.randn(4).sum()).backward()
        optimizer.step()


CALLS: list[int] = []


def test_a_run_that_ends_early_with_a_better_loss_below_zero_has_not_diverged(tmp_path: Path) -> None:
    CALLS.clear()
    wb.diagnose_function(falls_below_zero, tmp_path / "s", budget="3x")
    record = wb.open(tmp_path / "s")
    losses = record.steps.groupby("trial")["loss"].agg(["first", "last"])
    assert len(losses) > 1
    assert (losses["last"] < losses["first"]).all()
    assert "diverged" not in set(record.trials["state"])


def test_a_plan_of_what_cannot_be_trained_says_why() -> None:
    with pytest.raises(WorkloadError, match="shapes cannot be multiplied"):
        plan_diagnosis(small_workload(build_model=lambda: torch.nn.Linear(4, 1)), budget=Budget.of(None, 3))


@pytest.mark.parametrize("budget", ["1x", "3x", "9x"])
def test_a_plan_costs_no_more_than_its_budget_and_says_what_stays_open(budget: str) -> None:
    plan = plan_diagnosis(small_workload(config={"total_steps": STEPS}), budget=Budget.of(budget, 3))
    assert sum(stage.runs for stage in plan.stages) <= Budget.of(budget, 3).runs
    assert plan.run_s is not None
    assert plan.run_s > 0
    assert ("other learning rates" in plan.unmeasured, "a proof" in plan.unmeasured) == (budget == "1x", budget != "9x")
    lines = str(plan).splitlines()
    assert lines[0].startswith("Plan for small: runs of 40 updates")
    assert f"the budget of {budget} is the limit" in str(plan)
    assert f"all parts fit in the budget of {budget}" in str(replace(plan, paid=100.0, unmeasured=""))
    price = [float(line.split()[0]) for line in lines[2:] if line.startswith(" ")]
    assert sum(price[:-1]) == pytest.approx(price[-1])


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
    assert short["lr.best"].summary.startswith("Best known"), "the budget ended the search, not the loss"
    assert short["lr.grid_edge"].status == "not_measured"
    longer = wb.diagnose_function(too_low, tmp_path / "longer", budget="9x")
    assert steps(tmp_path / "longer") <= 9 * STEPS
    assert (wb.open(tmp_path / "longer").trials["stage"] == Role.PROOF).any()
    assert longer.recommendation["adopted"]
