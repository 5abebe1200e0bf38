"""The verdict as HTML: worst first, every status as a word, what is well folded, every text escaped."""

from __future__ import annotations

import re

import pytest

from workbench.findings.diagnosis import MAX_ROWS, Diagnosis, verdict_table
from workbench.findings.finding import Finding, Status


def finding(code: str, status: Status, **given: object) -> Finding:
    return Finding(code=code, status=status, summary=f"about {code}", **given)  # type: ignore[arg-type]


def rows(html: str) -> list[list[str]]:
    """The cells of every row, without their tags, a line break as a space."""
    found = re.findall(r"<tr>(.*?)</tr>", html, flags=re.DOTALL)
    return [
        [re.sub(r"<[^>]+>", "", c.replace("<br>", " ")) for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in found
    ]


def test_worst_first_and_a_word_for_every_status() -> None:
    found = [finding("lr.best", "ok"), *(finding(f"x.{s}", s) for s in ("not_measured", "fail", "warn"))]
    _, *lines = rows(verdict_table(Diagnosis(findings=tuple(found))))
    assert [line[0] for line in lines] == [
        "✕ fail x.fail",
        "! warn x.warn",
        "✓ ok lr.best",
        "? not measured x.not_measured",
    ]


def test_of_many_what_is_well_and_no_measurement_is_folded() -> None:
    well = [finding(f"a.{k}", "ok") for k in range(MAX_ROWS)]
    html = verdict_table(Diagnosis(findings=(*well, finding("lr.best", "ok", value=0.125, unit="lr"))))
    _, *lines = rows(html)
    assert lines == [["✓ ok lr.best", "about lr.best", "0.125 lr"]]
    assert f"{MAX_ROWS} more are ok" in html
    assert all(f"<code>{f.code}</code> about {f.code}" in html for f in well)


def test_what_does_not_apply_is_not_counted_as_ok() -> None:
    """In the heading and in what is folded, as HTML and in the terminal."""
    void = [Finding(code=f"b.{k}", status="ok", summary="Does not apply: no such layer.") for k in range(3)]
    found = Diagnosis(findings=(*(finding(f"a.{k}", "ok") for k in range(MAX_ROWS)), *void))
    for text in (verdict_table(found), repr(found)):
        assert f"{MAX_ROWS} ok, 3 not applicable" in text
        assert f"{MAX_ROWS} checks are ok, 3 do not apply" in text


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(1, "models", "1 model"), (2, "models", "2 models"), (1, "loss", "1 loss"), (1, "lr", "1 lr")],
)
def test_one_of_a_thing_is_singular(value: float, unit: str, shown: str) -> None:
    assert finding("x.y", "ok", value=value, unit=unit).quantity(value) == shown


def test_the_first_advice_of_what_is_not_well_is_told() -> None:
    made = (finding("x.y", "warn", advice=["lower it", "or not"]), finding("lr.best", "ok", advice=["no"]))
    html = verdict_table(Diagnosis(findings=made))
    assert "Try: lower it" in html
    assert "or not" not in html
    assert "Try: no" not in html


def test_codes_of_which_the_same_is_said_share_a_row() -> None:
    same = [
        Finding(code=f"lr.{n}", status="not_measured", summary="no sweep", clause=c)
        for n, c in (("a", "F1"), ("b", "F2"))
    ]
    other = Finding(code="x.y", status="warn", summary="no sweep")
    html = verdict_table(Diagnosis(findings=(*same, other)))
    assert [line[0] for line in rows(html)[1:]] == ["! warn x.y", "? not measured lr.a lr.b"]
    assert re.findall(r'title="clause (\w+)">(lr\.\w)<', html) == [("F1", "lr.a"), ("F2", "lr.b")]


def test_texts_are_escaped() -> None:
    bad = '<script>alert("x")</script>'
    nasty = Finding(code=bad, status="fail", summary=bad, unit=bad, value=1.0, clause=bad, advice=[bad])
    html = verdict_table(Diagnosis(findings=(nasty,), workload=bad))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 6


def test_a_notebook_gets_text_table_and_data_of_one_diagnosis() -> None:
    diagnosis = Diagnosis(findings=(finding("a.b", "warn"),), workload="w")
    bundle = diagnosis._repr_mimebundle_()
    assert bundle["text/plain"] == repr(diagnosis)
    assert "Diagnosis of w" in bundle["text/html"]
    assert "! warn" in bundle["text/html"]
    assert bundle["application/vnd.workbench.verdict+json"]["findings"][0]["code"] == "a.b"


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0.0712, "share of steps", "7.12% of steps"),
        (4.0784, "lr.unstable / lr*", "4.078×"),
        (1.5, "times the mean", "1.5× the mean"),
        (0.03, "p", "p = 0.03"),
        (12345, "examples", "12,345 examples"),
        (5.37e-5, "lr", "5.37e-5 lr"),
        (None, "lr", ""),
    ],
)
def test_a_number_is_told_with_its_unit_as_people_write_it(value: float | None, unit: str, said: str) -> None:
    one = finding("x.y", "warn", value=value, unit=unit)
    assert rows(verdict_table(Diagnosis(findings=(one,))))[1][2:] == [said] * bool(said)  # no empty column
