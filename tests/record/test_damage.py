"""Whatever happens to a study's files: it is named, or nothing that is read changes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.study_folders import PLAIN, filled
from workbench.cli import main
from workbench.errors import RecordError
from workbench.record.missing import missing
from workbench.record.read import StudyRecord, open_record
from workbench.record.write import StudyWriter

KINDS = ("truncate", "flip", "delete", "swap", "empty", "line")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished study of three trials, with tracked predictions."""
    path = tmp_path_factory.mktemp("whole") / "s"
    writer = filled(path, trials=3)
    for number in range(3):
        writer.predictions.add(
            {"trial": [number], "step": [0], "split": ["test"], "example": [4], "prediction": [number], "label": [1]}
        )
    writer.add_facts(num_params=10, share=0.125)
    writer.finish()
    writer.close()
    return path


def contents(path: Path) -> dict[str, Any]:
    """Return all that a reader of the study sees, as text; a name and a note may be edited by hand."""
    record = StudyRecord(path)
    study = {key: value for key, value in record.study.items() if key not in ("name", "note", "crc32")}
    tables = {name: getattr(record, name) for name in ("trials", "steps", "evals", "predictions", "lanes")}
    return {"study": study, **{name: table.to_csv() for name, table in tables.items()}}


def mutated(path: Path, kind: str, draw: random.Random) -> None:
    """Do one thing to one of the study's files."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != ".lock")
    target = draw.choice(files)
    content = target.read_bytes()
    if kind == "delete":
        target.unlink()
    elif kind == "swap":
        other = draw.choice([p for p in files if p != target and p.suffix == target.suffix] or [target])
        there = other.read_bytes()
        other.write_bytes(content)
        target.write_bytes(there)
    elif kind == "line":
        lines = content.splitlines(keepends=True)
        del lines[draw.randrange(len(lines))]
        target.write_bytes(b"".join(lines))
    elif kind == "flip":
        place = draw.randrange(len(content))
        target.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
    else:
        target.write_bytes(content[: draw.randrange(len(content)) if kind == "truncate" else 0])


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_or_harmless(whole: Path, tmp_path: Path, kind: str) -> None:
    before, draw = contents(whole), random.Random(kind)
    silent = []
    for number in range(50):
        path = tmp_path / str(number)
        shutil.copytree(whole, path)
        mutated(path, kind, draw)
        try:
            if contents(path) != before and not missing(path):
                silent.append(number)
        except RecordError as error:
            if str(path) not in str(error):
                silent.append(number)
    assert not silent, f"{len(silent)} of 50 are read otherwise than they were written, without a word"


def test_a_trial_that_was_deleted_is_trained_again_and_nothing_else_is(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    shutil.copytree(whole, path)
    before = contents(path)
    shutil.rmtree(path / "trials" / "1")
    assert missing(path) == [f"{path / 'trials' / '1'}: the trial's config.json is missing."]
    writer = StudyWriter.open(path, kind="lr_sweep", workload="w", config=PLAIN)
    assert writer.trial(PLAIN | {"peak_lr": 0.1}, stage="lr_sweep", train_examples=32).finished
    again = writer.trial(PLAIN | {"peak_lr": 0.2}, stage="lr_sweep", train_examples=32)
    assert (again.number, again.finished) == (1, False)
    assert set(writer.record.steps["trial"]) == {0, 2}, "rows of the deleted trial would be there twice"
    rows = StudyRecord(whole).trial(1)
    writer.steps.add(rows.steps.dropna(axis=1).to_dict("series"))
    writer.evals.add(rows.evals[["trial", "step", "split", "metric", "value"]].to_dict("series"))
    writer.predictions.add(
        rows.predictions[["trial", "step", "split", "example", "prediction", "label"]].to_dict("series")
    )
    again.event("started", state="running")
    again.event("ended", state="complete", best_step=0, best_value=1.0, steps_run=6, seconds=0.1)
    writer.close()
    after = contents(path)
    assert {key: after[key] for key in ("trials", "evals", "predictions")} == {
        key: before[key] for key in ("trials", "evals", "predictions")
    }


@pytest.mark.parametrize("lost", ["steps/part-000001.parquet", "trials/1/events.jsonl", "trials/1/config.json"])
def test_a_study_that_lacks_something_is_told_when_opened_and_not_added_to(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    path = tmp_path / "s"
    shutil.copytree(whole, path)
    (path / lost).unlink()
    open_record(path)
    assert str((path / lost).parent) in caplog.text
    before = sorted(p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock")
    with pytest.raises(RecordError, match=str((path / lost).parent)):
        StudyWriter.open(path, kind="lr_sweep", workload="w", config=PLAIN)
    assert before == sorted(p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock")
    assert (main(["report", str(whole)]), main(["report", str(path)])) == (0, 1)


def test_a_part_that_vanishes_before_the_study_is_closed_is_missed(tmp_path: Path) -> None:
    writer = filled(tmp_path / "s")
    writer.flush()
    for step in (6, 7):
        writer.steps.add({"trial": [0], "step": [step], "loss": [0.0]})
        writer.flush()
    writer.lock.close()  # as a process that was killed
    (tmp_path / "s" / "steps" / "part-000002.parquet").unlink()
    assert missing(tmp_path / "s") == [f"{tmp_path / 's' / 'steps'}: part 2 is missing."]


def test_a_line_cut_off_by_a_crash_is_no_damage(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    shutil.copytree(whole, path)
    events = path / "trials" / "0" / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"event": "cut of')
    assert contents(path)["trials"] == contents(whole)["trials"]
    writer = StudyWriter.open(path, kind="lr_sweep", workload="w", config=PLAIN)
    writer.trial(PLAIN | {"peak_lr": 0.1}, stage="lr_sweep", train_examples=32).event("note")
    writer.close()
    assert not missing(path)
    assert [line[:9] for line in events.read_text().splitlines()] == ['{"event":'] * 3


def test_a_name_may_be_edited_by_hand_and_a_value_not(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    shutil.copytree(whole, path)
    file = path / "study.json"
    file.write_text(file.read_text().replace('"name": "s"', '"name": "renamed"'))
    assert open_record(path).study["name"] == "renamed"
    file.write_text(file.read_text().replace('"share": 0.125', '"share": 0.25'))
    with pytest.raises(RecordError, match="do not have its checksum"):
        open_record(path)
