"""What the terminal shows of a diagnosis: every trouble and every measurement in full, the rest by its codes."""

from __future__ import annotations

from workbench.diagnostics.base import Diagnosis, Finding


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


def test_many_codes_are_wrapped_and_none_is_lost() -> None:
    codes = [f"area{k}.condition_{k}" for k in range(40)]
    lines = diagnosis(*((code, "ok") for code in codes)).brief.splitlines()[1:]
    assert max(map(len, lines)) <= 110
    assert " ".join(lines).replace(",", "").split()[4:] == codes


def test_nothing_to_fold_is_the_whole_diagnosis() -> None:
    made = diagnosis(("lr.best", "ok"), ("lr.at_edge", "fail"))
    assert made.brief == repr(made)
    assert diagnosis().brief == repr(diagnosis())
