"""The study browser without a browser: what it reads, what it answers, and that it locks and spoils nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.study_folders import CONFIG, write_study
from workbench.views.studies import studies_panel
from workbench.views.studies_data import NOISE, compare, draw_comparison, side, study_table


def best(k: int, *, scale: float = 1.0, seed: int = 0) -> float:
    """The last loss of trial k of `write_study`, as its formula says."""
    return scale * 2.3 * math.exp(-0.1 * 1.3**k * (CONFIG.total_steps - 1) / 10) * (1 + 0.01 * seed)


def asked(panel: Any, **message: Any) -> dict[str, Any]:
    """Ask as the page does, and return what it is told."""
    panel._handle_custom_msg(message, [])
    said: dict[str, Any] = panel.said
    return said


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_study(tmp_path / "first", note="the baseline")
    write_study(tmp_path / "second", seeds=2, scale=0.5, note="halved")
    return tmp_path


def test_every_study_is_a_row_and_what_cannot_be_read_is_named(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (runs / "notebooks").mkdir()
    for name, content in {"damaged": "{", "foreign": '{"schema": 1}', "list": "[]", "newer": '{"schema": 99}'}.items():
        (runs / name).mkdir()
        (runs / name / "study.json").write_text(content)
    table, problems = study_table(runs)
    assert sorted(table["study"]) == ["first", "second"]
    assert len(problems) == 4
    for name, said in {"damaged": "is damaged", "foreign": "config", "newer": "newer version of workbench"}.items():
        assert any(name in problem and said in problem for problem in problems), said
    shown = studies_panel(runs, live=False)
    assert sorted(shown["study"]) == ["first", "second"]
    assert "newer version of workbench" in caplog.text
    panel = studies_panel(runs, live=True)
    assert panel.problems == problems
    assert repr(panel) == f"studies_panel({str(runs)!r}): 2 studies"


def test_opening_shows_the_trials_best_first_with_what_differs(runs: Path) -> None:
    panel = studies_panel(runs, live=True)
    assert asked(panel, do="open", path=str(runs / "first")) == {
        "text": "first is open.",
        "bad": False,
        "number": 1,
    }
    opened = panel.opened
    assert [row["trial"] for row in opened["trials"]] == [2, 1, 0, 3], "the diverged one has no value and comes last"
    assert opened["trials"][0]["best_value"] == pytest.approx(best(2))
    assert opened["trials"][3]["best_value"] is None
    assert opened["columns"] == [
        "trial",
        "stage",
        "state",
        "peak_lr",
        "seed",
        "best_value",
        "best_step",
        "steps_run",
        "seconds",
    ]
    assert "lowest validation/loss" in opened["said"]
    assert "<svg" in panel.figure
    assert opened["row"]["reproduce"].endswith("workbench diagnose digits_mlp --out " + str(runs / "first"))


def test_two_studies_are_compared_by_config_value_and_noise(runs: Path) -> None:
    one, two = side(runs / "first"), side(runs / "second")
    found = compare([one, two])
    rows = {what: values for what, *values in found["rows"]}
    assert found["names"] == ["first", "second"]
    assert rows["peak_lr"] == [pytest.approx(0.1 * 1.3**2), pytest.approx(0.1 * 1.3)]
    assert rows["value"] == [pytest.approx(best(2)), pytest.approx(best(1, scale=0.5))]
    assert rows["seeds"] == [1, 1], "its other seed diverged"
    assert "second is better by" in found["said"]
    assert "each has one seed, so the difference may be noise" in found["said"]
    longer = replace(two, config=two.config | {"total_steps": 1240, "schedule": "workbench.programs.own_config:own#1"})
    assert (
        "in runs of 1,240 against 40 steps, which alone may make the difference; each has"
        in compare([one, longer])["said"]
    )
    assert ["schedule", "constant", "the program's own"] in compare([one, longer])["rows"]
    larger = [replace(each, config=each.config | {"select_mode": "max"}) for each in (one, two)]
    assert "first is better by" in compare(larger)["said"]
    assert "<svg" in draw_comparison([one, two]).html()


def test_a_study_of_a_log_without_batch_size_is_read(tmp_path: Path) -> None:
    write_study(tmp_path / "log", kind="log", config=CONFIG.to_dict() | {"batch_size": None})
    table, problems = study_table(tmp_path)
    assert problems == []
    assert table["best_lr"].tolist() == [pytest.approx(0.1 * 1.3**2)]


def test_another_program_is_not_comparable_and_the_same_one_with_edited_code_is(runs: Path) -> None:
    sides = [side(runs / name) for name in ("first", "second")]
    for functions, comparable in ((("fn:train", "fn:train"), True), (("fn:train", "other:train"), False)):
        for each, function, code in zip(sides, functions, ("1", "2"), strict=True):
            each.record.study.update(kind="program", settings={"function": function, "code": code})
        said = compare(sides)["said"]
        assert said.startswith("second is better by" if comparable else "Different programs: not comparable")


def test_more_than_two_are_compared_and_the_best_is_held_against_the_second(runs: Path) -> None:
    write_study(runs / "third", scale=0.1)
    sides = [side(runs / name) for name in ("first", "second", "third")]
    found = compare(sides)
    rows = {what: values for what, *values in found["rows"]}
    assert rows["value"] == [pytest.approx(v) for v in (best(2), best(1, scale=0.5), best(2, scale=0.1))]
    assert "third is better by" in found["said"]
    assert f"against {best(1, scale=0.5):.4g}" in found["said"], "of the other two, the better one"
    twin = replace(sides[0], name="again")
    said = compare([sides[0], twin, sides[1]])["said"]
    assert "second is better by" in said
    worst = replace(sides[1], seeds=(9.0,), config=sides[1].config | {"total_steps": 7})
    said = compare([sides[0], twin, worst])["said"]
    assert said.startswith("2 of 3: The same config with the same seed: values are equal. first is better by")
    assert "in runs of 40 against 7 steps" in said
    other = replace(sides[2], config=sides[2].config | {"select": "train/loss"})
    assert "Not comparable" in compare([*sides[:2], other])["said"]
    panel = studies_panel(runs, live=True)
    assert "compare 2 to 6" in asked(panel, do="compare", sides=[[str(runs / "first"), None]])["text"]
    assert not asked(panel, do="compare", sides=[[str(runs / n), None] for n in ("first", "second", "third")])["bad"]


def test_trials_of_many_seeds_are_held_against_their_noise(runs: Path) -> None:
    write_study(runs / "seeds", trials=6, seeds=2)
    found = compare([side(runs / "seeds", 0), side(runs / "seeds", 2)])
    rows = {what: values for what, *values in found["rows"]}
    a, b = ([best(k, seed=s) for s in (0, 1)] for k in (0, 1))
    assert rows["value"] == [pytest.approx(sum(a) / 2), pytest.approx(sum(b) / 2)]
    deviations = [(v[1] - v[0]) / math.sqrt(2) for v in (a, b)]
    assert rows["standard deviation over seeds"] == [pytest.approx(d) for d in deviations]
    error = math.hypot(*(d / math.sqrt(2) for d in deviations))
    clear = (sum(a) - sum(b)) / 2 > NOISE * error
    assert clear, "the case is meant to be clear"
    assert "more than 2 standard errors" in found["said"]
    one = replace(side(runs / "seeds", 2), seeds=(b[0],))
    assert "one side has one seed, so the difference may be noise" in compare([side(runs / "seeds", 0), one])["said"]
    assert "nothing but the seed" in compare([side(runs / "seeds", 0), side(runs / "seeds", 1)])["said"]


def test_a_note_reaches_the_folder_and_the_rows(runs: Path) -> None:
    panel = studies_panel(runs, live=True)
    path = str(runs / "first")
    asked(panel, do="open", path=path)
    panel.drafts = {path: "so it was", "other": "x"}
    assert asked(panel, do="note", path=path, note=" so it\nwas ") == {
        "text": "The note is written.",
        "bad": False,
        "number": 2,
    }
    assert json.loads((runs / "first" / "study.json").read_text())["note"] == "so it was"
    assert [row["note"] for row in panel.studies if row["study"] == "first"] == ["so it was"]
    assert panel.opened["row"]["note"] == "so it was"
    assert panel.drafts == {"other": "x"}
    assert "is empty" in asked(panel, do="note", path=path, note=" ")["text"]


def test_a_page_reaches_the_studies_that_it_lists_and_no_other_folder(
    runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a page claims: rows that it makes up, and paths that lead out of the folder, are refused."""
    elsewhere = write_study(tmp_path_factory.mktemp("elsewhere") / "private", note="mine")
    panel = studies_panel(runs, live=True)
    panel.studies = [{**panel.studies[0], "path": str(elsewhere)}]
    for path in (str(elsewhere), str(runs / "first" / ".." / ".." / elsewhere.parent.name / "private"), "."):
        for message in (
            {"do": "open", "path": path},
            {"do": "note", "path": path, "note": "theirs"},
            {"do": "compare", "sides": [[str(runs / "first"), None], [path, None]]},
        ):
            said = asked(panel, **message)
            assert said["bad"]
            assert "not among the studies listed here" in said["text"]
    assert json.loads((elsewhere / "study.json").read_text())["note"] == "mine"
    assert (panel.opened, panel.compared) == ({}, {})
    write_study(runs / "later")
    assert asked(panel, do="open", path=str(runs / "later"))["bad"]
    asked(panel, do="read")
    assert not asked(panel, do="open", path=str(runs / "later"))["bad"]


def test_what_folders_call_themselves_is_text_in_the_table(tmp_path: Path) -> None:
    mean = "<img src=x onerror=alert(1)>"
    write_study(tmp_path / "runs" / f"named {mean}", workload=f"work {mean}", note=f"note {mean}")
    (tmp_path / "runs" / f"damaged {mean}").mkdir()
    (tmp_path / "runs" / f"damaged {mean}" / "study.json").write_text("{")
    shown = studies_panel(tmp_path / "runs", live=False)._repr_html_()
    assert "<img" not in shown
    for kind in ("named", "work", "note"):
        assert f"{kind} &lt;img" in shown
