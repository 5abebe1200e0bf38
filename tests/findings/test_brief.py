"""What a terminal shows of a diagnosis: every trouble and every measurement in full, what is well as a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.findings.diagnosis import MAX_ROWS, Diagnosis, verdict_table
from workbench.findings.finding import Finding, worst
from workbench.studies.budget import Budget


def diagnosis(*findings: tuple[str, str]) -> Diagnosis:
    made = tuple(Finding(code=code, status=status, summary=f"About {code}.") for code, status in findings)  # type: ignore[arg-type]
    return Diagnosis(findings=made, workload="mine")


def test_trouble_and_measurements_stay_and_the_rest_is_counted() -> None:
    well = [(f"data.{k}", "ok") for k in range(MAX_ROWS)]
    made = diagnosis(*well, ("lr.best", "ok"), ("input.bound", "not_measured"), ("stability.early", "warn"))
    head, *lines = repr(made).splitlines()
    assert head == f"Diagnosis of mine  [warn]  1 warn, 1 not measured, {MAX_ROWS + 1} ok"
    assert [line.split()[:2] for line in lines] == [
        ["!", "stability.early"], ["+", "lr.best"], ["?", "input.bound"], ["+", str(MAX_ROWS)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "badge", "tally"),
    [
        ("ok ok not_measured", ("ok", "ok, 1 not measured"), "3 checks"),
        ("ok not_measured not_measured", ("not_measured", "not measured"), "2 not measured, 1 ok"),
        ("ok not_measured", ("not_measured", "not measured"), "1 not measured, 1 ok"),
        ("ok ok not_measured warn", ("warn", "warn"), "1 warn, 1 not measured, 2 ok"),
        ("ok ok", ("ok", "ok"), "2 ok"),
        ("", ("not_measured", "not measured"), "nothing was checked"),
    ],
)
def test_the_badge_counts_the_few_checks_that_could_not_be_made(
    statuses: str, badge: tuple[str, str], tally: str
) -> None:
    """The same words in terminal and notebook; the verdict, and with it the exit code, stays as it is."""
    made = diagnosis(*((f"data.{k}", status) for k, status in enumerate(statuses.split())))
    assert (made.badge, made.tally) == (badge, tally)
    assert repr(made).splitlines()[0] == f"Diagnosis of mine  [{badge[1]}]  {tally}"
    assert f"{badge[1]}</strong></span> {tally}</p>" in verdict_table(made)
    assert made.verdict == worst(statuses.split())  # type: ignore[arg-type]


def test_of_few_every_finding_has_a_line_and_the_measurement_comes_first() -> None:
    made = diagnosis(("lr.grid_edge", "ok"), ("lr.unstable", "not_measured"), ("lr.best", "ok"))
    assert [line.split()[1] for line in repr(made).splitlines()[1:]] == ["lr.best", "lr.unstable", "lr.grid_edge"]


def test_what_is_said_alike_is_said_once_with_all_its_codes() -> None:
    codes = [f"hosts.code_{k}" for k in range(9)]
    alone = Finding(code="hosts.wrapped", status="fail", summary="Nobody was called.")
    alike = [Finding(code=code, status="not_measured", summary="Not measured: nobody was called.") for code in codes]
    head, first, *lines = repr(Diagnosis(findings=(*alike[:4], alone, *alike[4:]))).splitlines()
    assert "1 fail, 9 not measured" in head
    assert "hosts.wrapped" in first
    text = " ".join(" ".join(lines).split())
    assert text == f"? Not measured: nobody was called. 9 checks: {', '.join(codes)}."
    assert max(map(len, lines)) <= 110
    other = Finding(code="a.b", status="warn", summary=alike[0].summary)
    assert len(repr(Diagnosis(findings=(other, alike[0]))).splitlines()) == 3, "another status is another thing"


def test_the_advice_of_what_is_not_well_comes_worst_first_and_once() -> None:
    def finding(code: str, status: str, *advice: str) -> Finding:
        return Finding(code=code, status=status, summary="", advice=advice)  # type: ignore[arg-type]

    made = Diagnosis(
        findings=(
            finding("a.a", "ok", "Rest."),
            finding("a.b", "warn", "Sleep.", "Eat."),
            finding("a.c", "fail", "Run " * 40, "Eat."),
        )
    )
    text = repr(made)
    lines = text[text.index("What to try next:") :].splitlines()
    assert lines[1].startswith("1. Run Run")
    assert lines[2].startswith("   Run")
    assert lines[3:] == ["2. Eat.", "3. Sleep."]
    assert max(map(len, lines)) <= 100
    assert "try" not in repr(Diagnosis(findings=made.findings[:1]))


def test_a_whole_diagnosis_prints_its_config_and_the_first_of_what_is_left_to_try() -> None:
    found = {"paste": "TrainConfig(peak_lr=1.0)", "changed": [], "next": ["Eat.", "Sleep.", "Run.", "Rest."]}
    lines = repr(Diagnosis(findings=(), recommendation=found)).splitlines()
    assert lines[1:] == [
        "", "Config to train with (unchanged):", "TrainConfig(peak_lr=1.0)",
        "", "What to try next (the first 3 of 4; the report has all):", "1. Eat.", "2. Sleep.", "3. Run.",
    ]  # fmt: skip
    lines = repr(Diagnosis(findings=(), recommendation=found | {"lines": True, "next": []})).splitlines()
    assert lines[2] == "Lines to change:"


def test_a_long_summary_goes_on_below_its_own_beginning() -> None:
    made = Diagnosis(findings=(Finding(code="lr.best", status="warn", summary="word " * 60),), workload="mine")
    first, *below = repr(made).splitlines()[1:]
    assert len(below) >= 2
    assert {len(line) - len(line.lstrip()) for line in below} == {first.index("word")}


@pytest.mark.parametrize(
    ("command", "recommendation", "given", "goes_on"),
    [
        ("workbench diagnose mine", {}, None, "the same command with --out runs/a and --budget 20x, or none for no limit, goes on from there"),
        ("python train.py", {"lines": False}, None, 'the same call goes on from there: wb.diagnose_function(train, out="runs/a", budget="20x"), or "none" for no limit'),
        ("python -c 'wb.diagnose(a.replace(wb.TrainConfig(total_steps=9)), steps=3)'", {}, "4x", 'the same call goes on from there: wb.diagnose(workload, steps=3, out="runs/a", budget="10x"), or "none" for no limit'),
    ],
)  # fmt: skip
def test_where_the_budget_ran_out_the_command_or_call_that_goes_on_is_told(
    command: str, recommendation: dict[str, Any], given: str | None, goes_on: str
) -> None:
    limit = Budget.of(given, 3)
    limit.ended = "instability"
    found = Diagnosis(
        findings=(), workload="train", command=command, cost={"budget": limit.told()}, path=Path("runs/a"), recommendation=recommendation
    )  # fmt: skip
    assert found.budget.endswith(f"ran out at 'instability'; {goes_on}")
    assert f"Budget: {found.budget}." in " ".join(repr(found).split())
