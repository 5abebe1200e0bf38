"""Writing a study: what a crash, a full disk, another process or another config may and may not do to it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hooks import At
from tests.helpers.study_folders import PLAIN as CONFIG
from tests.helpers.study_folders import filled, opened
from tests.helpers.workloads import small_workload
from workbench.errors import RecordError
from workbench.record.folder import default_folder
from workbench.record.read import StudyRecord, open_record
from workbench.train import checkpoint
from workbench.train.trainer import Trainer

ROOT = str(Path(__file__).parents[2])


def test_what_is_stored_is_what_was_asked_for(tmp_path: Path) -> None:
    study = opened(tmp_path / "s", note="why", command="workbench diagnose w", settings={"lrs": (0.1, float("inf"))})
    study.add_facts(a=1)
    study.add_facts(b=float("nan"))
    study.close()
    stored = json.loads((tmp_path / "s" / "study.json").read_text())
    assert stored["name"] == "s"
    assert stored["note"] == "why"
    assert stored["command"] == "workbench diagnose w"
    assert stored["config"] == CONFIG
    assert stored["settings"] == {"lrs": [0.1, "inf"]}
    assert stored["facts"] == {"a": 1, "b": None}
    assert {"python", "torch", "numpy"} <= set(stored["versions"])
    opened(tmp_path / "t").close()
    assert "0.1" in StudyRecord(tmp_path / "t").study["note"], "one is written where none is given"


def test_the_same_config_is_the_same_trial_and_another_a_new_one(tmp_path: Path) -> None:
    study = filled(tmp_path / "s")
    again = study.trial(CONFIG, stage="lr_sweep", train_examples=32)
    assert again.number == 0
    assert again.finished
    assert study.trial(CONFIG | {"peak_lr": 0.7}, stage="lr_sweep", train_examples=32).number == 2
    study.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": CONFIG | {"batch_size": 5}}, "batch_size: there 4, here 5"),
        ({"config": CONFIG | {"total_steps": 20}}, "total_steps: there 10, here 20"),
        ({"workload": "v"}, "workload: there 'w', here 'v'"),
        ({"settings": {"seeds": 3}}, "seeds: there None, here 3"),
    ],
)
def test_another_config_in_the_same_folder_is_an_error_that_names_the_field(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    filled(tmp_path / "s").close()
    before = snapshot(tmp_path / "s")
    with pytest.raises(RecordError, match=rf"holds another study \(.*{said}.*Give a new folder; nothing"):
        opened(tmp_path / "s", **changes)
    assert snapshot(tmp_path / "s") == before


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_code_or_data_that_changed_since_are_refused_and_another_processor_is_not(tmp_path: Path) -> None:
    study = opened(tmp_path / "s")
    study.hold_against({"examples": 40, "loss": 2.0})
    study.hold_against({"examples": 40, "loss": 2.001, "new": 1})
    for changed, said in (
        ({"examples": 41}, "examples: there 40, here 41"),
        ({"loss": 2.01}, "loss: there 2.0, here 2.01"),
    ):
        with pytest.raises(RecordError, match=rf"has changed since .*s was begun \({said}\)"):
            study.hold_against({"examples": 40, "loss": 2.0} | changed)
    study.close()


def test_a_folder_that_cannot_be_used_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("precious")
    (tmp_path / "file").touch()
    (tmp_path / "locked" / ".lock").mkdir(parents=True)
    for name, said in (
        ("thesis", r"holds other files and no study\.json.*new or empty folder"),
        ("file", r"file' is a file, and a study needs a folder"),
        ("file/deeper", "cannot be created: Not a directory"),
        ("locked", r"cannot write .*\.lock: Is a directory"),
    ):
        with pytest.raises(RecordError, match=said):
            opened(tmp_path / name)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]
    with pytest.raises(RecordError, match="cannot be created"):
        default_folder("w", "lr_sweep", root=tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RecordError, match=r"is not writable\. Give another folder"):
        opened(tmp_path / "s")


def test_a_second_writer_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.helpers.study_folders import opened
from workbench.errors import RecordError
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
try: opened(Path(sys.argv[2])).close()
except RecordError as error: print(error)
else: print("opened")
"""

    def second() -> str:
        words = [sys.executable, "-c", code, ROOT, str(tmp_path / "s")]
        return subprocess.run(words, check=True, timeout=120, capture_output=True, text=True).stdout

    study = filled(tmp_path / "s")
    assert "another process is writing" in second()
    with pytest.raises(RecordError, match=r"another process is writing .*Wait for it"):
        opened(tmp_path / "s")
    assert len(open_record(tmp_path / "s").trials) == 2, "reading is always possible"
    study.close()
    assert second() == "opened\n"


def test_rewind_drops_one_trials_rows_from_a_step_on(tmp_path: Path) -> None:
    study = filled(tmp_path / "s")
    study.trial(CONFIG, stage="lr_sweep", train_examples=32).rewind(2)
    steps = study.record.steps
    assert steps[steps["trial"] == 0]["step"].tolist() == [0, 1]
    assert steps[steps["trial"] == 1]["step"].tolist() == list(range(6))
    assert study.record.evals["trial"].tolist() == [0, 1], "the evaluation at the checkpoint's own step stays"
    study.trial(CONFIG, stage="lr_sweep", train_examples=32).rewind(0)
    assert study.record.evals["trial"].tolist() == [0, 1]
    study.trial(CONFIG, stage="lr_sweep", train_examples=32).rewind(-1)
    assert study.record.evals["trial"].tolist() == [1]
    study.close()


def test_a_full_disk_while_training_loses_nothing_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    whole = Trainer().run(small_workload(), out=tmp_path / "whole")
    monkeypatch.setattr(checkpoint, "WRITE_SECONDS", -1.0)  # on disk at each evaluation, as in a long run
    with pytest.raises(RecordError, match="No space left on device.*free some space"):
        Trainer(hooks=[At(18, lambda _: monkeypatch.setattr(os, "fsync", full))]).run(
            small_workload(), out=tmp_path / "s"
        )
    monkeypatch.undo()
    cut = open_record(tmp_path / "s")
    assert cut.state == "failed"
    assert len(cut.steps) >= 16
    assert not list((tmp_path / "s").rglob("*.tmp"))
    resumed = Trainer().run(small_workload(), out=tmp_path / "s")
    assert resumed.state == "complete"
    assert resumed.steps["loss"].tolist() == whole.steps["loss"].tolist()
