"""A note written anew: into folder and ledger, atomically, and never over somebody who writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.study_folders import write_study
from workbench import cli
from workbench.errors import RecordError, UsageError
from workbench.record.ledger.index import LEDGER, list_studies
from workbench.record.ledger.note import set_note
from workbench.record.lock import lock


def noted(root: Path) -> dict[str, str]:
    """Name -> note, as the ledger file has them."""
    table = list_studies(root, ledger=f"sqlite:///{root / LEDGER}")
    return dict(zip(table["study"], table["note"], strict=True))


def test_folder_and_ledger_have_it_and_nothing_else_changes(tmp_path: Path) -> None:
    path = write_study(tmp_path / "one", note="before")
    write_study(tmp_path / "two", note="other")
    before = json.loads((path / "study.json").read_text())
    assert set_note(path, " warmup did\n not help ") == "warmup did not help"
    assert json.loads((path / "study.json").read_text()) == before | {"note": "warmup did not help"}
    assert noted(tmp_path) == {"one": "warmup did not help", "two": "other"}
    assert list_studies(tmp_path)["note"].tolist() == ["warmup did not help", "other"]
    assert list_studies(tmp_path)["config"].str.endswith("config.json").all(), (
        "the config is the one whose hash was stored"
    )


def test_a_study_that_the_ledger_does_not_know_is_entered(tmp_path: Path) -> None:
    path = write_study(tmp_path / "one", index=False)
    set_note(path, "now")
    assert noted(tmp_path) == {"one": "now"}


@pytest.mark.parametrize("note", ["", "  \n"])
def test_an_empty_note_is_refused(note: str, tmp_path: Path) -> None:
    path = write_study(tmp_path / "one", note="before", index=False)
    with pytest.raises(UsageError, match=r"note is empty.*P5\.4"):
        set_note(path, note)
    assert list_studies(tmp_path)["note"].tolist() == ["before"]


def test_while_another_process_writes_it_is_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path / "one", note="before", index=False)
    with lock(path), pytest.raises(RecordError, match="another process is writing"):
        set_note(path, "after")
    program = f"from workbench.record.ledger.note import set_note\nset_note({str(path)!r}, 'theirs')"
    with lock(path):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "another process is writing" in done.stderr
    assert list_studies(tmp_path)["note"].tolist() == ["before"]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "holds no study"), ("{", "is damaged"), ('{"schema": 99}', "newer version")]
)
def test_what_is_no_study_of_ours_is_left_alone(content: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    if content is not None:
        (tmp_path / "x" / "study.json").write_text(content)
    with pytest.raises(RecordError, match=said):
        set_note(tmp_path / "x", "words")
    assert content is None or (tmp_path / "x" / "study.json").read_text() == content


def test_a_ledger_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_study(tmp_path / "one", note="before", index=False)

    def locked(*_: Any, **__: Any) -> None:
        raise RecordError("the ledger is locked")

    monkeypatch.setattr("workbench.record.ledger.index.index", locked)
    assert set_note(path, "after") == "after"
    assert "the ledger is locked" in caplog.text
    assert list_studies(tmp_path)["note"].tolist() == ["after"]


def test_a_full_disk_leaves_the_old_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_study(tmp_path / "one", note="before", index=False)

    def full(*_: Any, **__: Any) -> None:
        raise RecordError("no space")

    monkeypatch.setattr("workbench.record.ledger.note.write_atomic", full)
    with pytest.raises(RecordError, match="no space"):
        set_note(path, "after")
    assert list_studies(tmp_path)["note"].tolist() == ["before"]
    with lock(path):
        pass


def test_the_command_writes_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(Path("runs/one"), note="before", index=False)
    assert cli.main(["studies", "--note", "one", "by name"]) == 0
    assert "by name" in capsys.readouterr().out
    assert cli.main(["studies", "--note", "runs/one", "by folder"]) == 0
    assert "by folder" in capsys.readouterr().out
    assert cli.main(["studies", "--note", "one", ""]) == 2
    assert cli.main(["studies", "--note", "two", "x"]) == 1
    assert "holds no study" in capsys.readouterr().err
