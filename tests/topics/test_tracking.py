"""A study's row held against its folder, and the studies of a folder drawn: every way to be wrong is found, a sound one is silent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.study_folders import edited
from tests.helpers.workloads import small_workload
from workbench.findings.diagnosis import Diagnosis
from workbench.ledger.table import study_row
from workbench.record.read import StudyRecord
from workbench.topics.tracking.diagnose import CODES, diagnose_tracking
from workbench.train.trainer import Trainer


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("workbench.record.repro.git_state", lambda _: ("c0ffee" * 6, b"diff"))
    monkeypatch.setattr("sys.argv", ["train.py"])
    Trainer().run(small_workload(), out=tmp_path / "one")
    return tmp_path / "one"


def diagnosed(folder: Path) -> Diagnosis:
    found = diagnose_tracking(StudyRecord(folder))
    assert [f.code for f in found] == list(CODES)
    return found


def test_a_sound_study_is_silent(sound: Path) -> None:
    found = diagnosed(sound)
    assert found.verdict == "ok"
    best = StudyRecord(sound).trial(0).best()
    assert (found["tracking.best_value"].value, found["tracking.best_value"].step) == (best.value, best.step)
    assert "uncommitted changes are stored" in found["tracking.reproduce"].summary
    shutil.rmtree(best.checkpoint or sound)
    assert diagnosed(sound)["tracking.best_value"].status == "warn"


def test_a_changed_or_missing_config_fails(sound: Path) -> None:
    path = sound / "config.json"
    path.write_text(path.read_text() + " ")
    assert diagnosed(sound)["tracking.config"].status == "fail"
    path.unlink()
    assert "missing" in diagnosed(sound)["tracking.config"].summary
    edited(sound, config_sha256=None)
    assert diagnosed(sound)["tracking.config"].status == "not_measured"


def test_a_table_that_counts_other_trials_fails(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = study_row(sound) | {"trials": 5}
    monkeypatch.setattr("workbench.topics.tracking.diagnose.study_row", lambda _: row)
    found = diagnosed(sound)["tracking.trials"]
    assert (found.status, found.value, found.threshold) == ("fail", 5, 1)


def test_a_best_value_that_no_evaluation_has_fails(sound: Path) -> None:
    events = sound / "trials" / "0" / "events.jsonl"
    events.write_text(
        events.read_text() + '{"event": "ended", "state": "complete", "best_value": 1e-9, "best_step": 3}\n'
    )
    found = diagnosed(sound)["tracking.best_value"]
    assert (found.status, found.value) == ("fail", 1e-9)


@pytest.mark.parametrize(("changes", "status", "said"), [
    ({"command": "(from a Python session or notebook)"}, "warn", "No command"), ({"commit": None, "patch": None}, "warn", "no git repository"),
    ({"patch": "gone.patch"}, "fail", "gone.patch, are missing"), ({"patch": None}, "ok", "nothing was uncommitted"),
])  # fmt: skip
def test_what_it_takes_to_run_it_again(sound: Path, changes: dict[str, object], status: str, said: str) -> None:
    edited(sound, **changes)
    found = diagnosed(sound)["tracking.reproduce"]
    assert (found.status, said in found.summary) == (status, True)
