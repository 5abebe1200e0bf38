"""What the terminal shows of a diagnosis: every trouble and every measurement in full, the rest by its codes."""

from __future__ import annotations

from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding


def diagnosis(*findings: tuple[str, str]) -> Diagnosis:
    made = tuple(Finding(code=code, status=status, summary=f"About {code}.") for code, status in findings)  # type: ignore[arg-type]
    return Diagnosis(findings=made, workload="mine")


def test_trouble_and_measurements_stay_and_the_rest_is_counted() -> None:
    made = diagnosis(
        ("data.labels", "ok"), ("lr.best", "ok"), ("stability.early", "warn"), ("input.bound", "not_measured"), ("data.scale", "ok"),
    )  # fmt: skip
    head, *lines = made.brief.splitlines()
    assert head == repr(made).splitlines()[0] == "Diagnosis of mine: warn (1 warn, 1 not_measured, 3 ok)"
    assert [line.split()[2] for line in lines] == ["stability.early", "input.bound", "lr.best", "2"]
    assert lines[-1] == "  + ok           2 more: data.labels, data.scale"
    assert "About data.labels." in repr(made)


def test_nothing_to_fold_is_the_whole_diagnosis() -> None:
    made = diagnosis(("lr.best", "ok"), ("lr.at_edge", "fail"))
    assert made.brief == repr(made)
    assert diagnosis().brief == repr(diagnosis())


def test_what_is_said_alike_is_said_once_with_all_its_codes() -> None:
    codes = [f"hosts.code_{k}" for k in range(9)]
    alone = Finding(code="hosts.wrapped", status="fail", summary="Nobody was called.")
    alike = [Finding(code=code, status="not_measured", summary="Not measured: nobody was called.") for code in codes]
    head, first, *lines = Diagnosis(findings=(*alike[:4], alone, *alike[4:])).brief.splitlines()
    assert "1 fail, 9 not_measured" in head
    assert "hosts.wrapped" in first
    text = " ".join(" ".join(lines).split())
    assert text == f"? not_measured 9 alike: {', '.join(codes)}. Not measured: nobody was called."
    assert max(map(len, lines)) <= 110
    other = Finding(code="a.b", status="warn", summary=alike[0].summary)
    assert len(Diagnosis(findings=(other, alike[0])).brief.splitlines()) == 3, "another status is another thing"


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
    lines = made.advised().splitlines()
    assert lines[0].startswith("- Run Run")
    assert lines[1].startswith("  Run")
    assert lines[2:] == ["- Eat.", "- Sleep."]
    assert max(map(len, lines)) <= 100
    assert made.advised("a.a").splitlines()[-1] == "- Rest."
    assert Diagnosis(findings=made.findings[:1]).advised() == ""


def test_a_notebook_tells_a_reason_for_not_measuring_once_and_every_verdict_by_itself() -> None:
    reason, well = "Not measured: no candidate fits.", "No residual connection."
    findings = [
        Finding(code=f"warmup.{name}", status="not_measured", summary=reason) for name in ("needed", "over_cap")
    ]
    findings += [Finding(code=f"architecture.{name}", status="ok", summary=well) for name in ("a", "b")]
    shown = repr(Diagnosis(findings=tuple(findings)))
    assert shown.count(reason) == 1
    assert "2 alike: warmup.needed, warmup.over_cap." in shown
    assert shown.count(well) == 2


def test_a_long_summary_goes_on_below_its_own_beginning() -> None:
    made = Diagnosis(findings=(Finding(code="lr.best", status="warn", summary="word " * 60),), workload="mine")
    first, *below = repr(made).splitlines()[1:]
    assert len(below) >= 2
    assert {len(line) - len(line.lstrip()) for line in below} == {first.index("word")}
