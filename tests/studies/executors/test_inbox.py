"""What workers tell, on disk: in an order that a crash cannot spoil, once, and under no name but its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.config import TrainConfig
from workbench.errors import RecordError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.studies.executors import inbox as inbox_module
from workbench.studies.executors.inbox import Inbox
from workbench.studies.executors.messages import Advanced, Dropped, Ended, Event, Facts, Rewind, Rows, Saved

CONFIG = TrainConfig(peak_lr=0.1, total_steps=10, batch_size=4)
FILES = {"model.safetensors": b"m", "trainer.safetensors": b"t", "meta.json": b"{}"}


@pytest.fixture
def study(tmp_path: Path) -> Any:
    study = StudyWriter.open(tmp_path / "s", kind="sweep", workload="w", config=CONFIG.to_dict())
    for lr in (0.1, 0.2):
        study.trial(CONFIG.replace(peak_lr=lr).to_dict(), stage="x", train_examples=8)
    yield study
    study.close()


def steps(trial: int, first: int, last: int) -> Rows:
    count = last - first
    return Rows("steps", {"trial": np.full(count, trial), "step": np.arange(first, last), "loss": np.ones(count)})


def on_disk(study: StudyWriter, trial: int) -> list[int]:
    """Steps that another process would see now."""
    table = StudyRecord(study.path).steps
    return table["step"][table["trial"] == trial].tolist() if len(table) else []


def test_rows_are_on_disk_before_the_checkpoint_that_rests_on_them(
    study: StudyWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: (seen.append(on_disk(study, 0)), rename(a, b))[1])
    assert Inbox(study).apply([steps(0, 0, 5), Saved(0, "step-00000005", FILES), steps(0, 5, 7)]) is None
    assert seen == [[0, 1, 2, 3, 4, 5, 6]]
    folder = study.path / "trials" / "0" / "checkpoints" / "step-00000005"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES
    assert [p.name for p in folder.parent.iterdir()] == ["step-00000005"], "no temporary files"


def test_rows_and_checkpoints_are_on_disk_before_the_end(study: StudyWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.record.write import TrialWriter

    seen: list[Any] = []
    event = TrialWriter.event

    def spy(self: TrialWriter, name: str, **values: Any) -> None:
        seen.append((on_disk(study, 1), (self.folder / "checkpoints" / "step-00000002").exists()))
        event(self, name, **values)

    monkeypatch.setattr(TrialWriter, "event", spy)
    ended = Event(1, "ended", {"state": "complete", "best_value": 0.5, "seconds": 1.0})
    last = Inbox(study).apply([steps(1, 0, 2), Saved(1, "step-00000002", FILES), ended, Ended()])
    assert last == Ended()
    assert seen == [([0, 1], True)]
    assert StudyRecord(study.path).trial(1).state == "complete"


def test_rows_alone_wait_for_the_cadence(study: StudyWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(study)
    inbox.apply([steps(0, 0, 3), Event(0, "started", {"state": "running"})])
    assert on_disk(study, 0) == []
    monkeypatch.setattr(inbox_module, "FLUSH_SECONDS", 0.0)
    inbox.apply([])
    assert on_disk(study, 0) == [0, 1, 2]


def test_a_trial_that_goes_on_elsewhere_has_every_row_once(study: StudyWriter) -> None:
    inbox = Inbox(study)
    evals = {"trial": [0, 0], "step": [0, 4], "metric": ["loss"] * 2, "value": [1.0, 0.5]}
    inbox.apply([steps(0, 0, 6), steps(1, 0, 6), Rows("evals", evals), Saved(0, "step-00000004", FILES)])
    again = {"trial": [0], "step": [8], "metric": ["loss"], "value": [0.2]}
    inbox.apply([Rewind(0, 4), Event(0, "resumed", {"state": "running"}), steps(0, 4, 9), Rows("evals", again)])
    inbox.flush()
    assert on_disk(study, 0) == list(range(9))
    assert on_disk(study, 1) == list(range(6)), "the other trial keeps its rows"
    assert StudyRecord(study.path).evals["step"].tolist() == [0, 4, 8]


def test_rows_before_a_rewind_in_the_same_breath_are_dropped(study: StudyWriter) -> None:
    inbox = Inbox(study)
    inbox.apply([steps(0, 0, 6), Rewind(0, -1), steps(0, 0, 2)])
    inbox.flush()
    assert on_disk(study, 0) == [0, 1]


def test_superseded_checkpoints_go_and_facts_and_progress_come(study: StudyWriter) -> None:
    told: list[int] = []
    inbox = Inbox(study, told.append)
    inbox.apply([Saved(0, "step-00000001", FILES), Saved(0, "step-00000002", FILES), Dropped(0, "step-00000001")])
    inbox.apply([Dropped(0, "step-00000007"), Facts({"a": 1}), Advanced(3), Advanced(4)])
    assert [p.name for p in StudyRecord(study.path).trial(0).checkpoints] == ["step-00000002"]
    assert [p.name for p in (study.path / "trials/0/checkpoints").iterdir()] == ["step-00000002"]
    assert StudyRecord(study.path).facts == {"a": 1}
    assert told == [3, 4]


@pytest.mark.parametrize(
    "message",
    [Saved(0, "../../../x", FILES), Saved(0, "step-00000001", {"../x": b""}), Dropped(0, "."), Dropped(0, "")],
)
def test_no_message_writes_or_deletes_anything_else(study: StudyWriter, message: Any) -> None:
    before = sorted(study.path.rglob("*"))
    with pytest.raises(RecordError, match="none of a checkpoint's"):
        Inbox(study).apply([message])
    assert sorted(p for p in study.path.rglob("*") if p.name != "checkpoints") == before


def test_a_full_disk_leaves_no_half_checkpoint(study: StudyWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RecordError, match=r"cannot write .*step-00000003: No space left"):
        Inbox(study).apply([Saved(0, "step-00000003", FILES)])
    assert list((study.path / "trials/0/checkpoints").iterdir()) == []
