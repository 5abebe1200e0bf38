"""What a terminal shows of a diagnosis: every trouble and every measurement in full, what is well as a number."""

from __future__ import annotations

from workbench.findings.diagnosis import MAX_ROWS, Diagnosis
from workbench.findings.finding import Finding


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
    assert text == f"? 9 alike: {', '.join(codes)}. Not measured: nobody was called."
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
    lines = made.advised().splitlines()
    assert lines[0].startswith("- Run Run")
    assert lines[1].startswith("  Run")
    assert lines[2:] == ["- Eat.", "- Sleep."]
    assert max(map(len, lines)) <= 100
    assert made.advised("a.a").splitlines()[-1] == "- Rest."
    assert Diagnosis(findings=made.findings[:1]).advised() == ""


def test_a_long_summary_goes_on_below_its_own_beginning() -> None:
    made = Diagnosis(findings=(Finding(code="lr.best", status="warn", summary="word " * 60),), workload="mine")
    first, *below = repr(made).splitlines()[1:]
    assert len(below) >= 2
    assert {len(line) - len(line.lstrip()) for line in below} == {first.index("word")}
