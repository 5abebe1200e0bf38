"""A worker's study and the one that is written from its messages are the same, and older checkpoints stay behind."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.executors import assert_same_study, assert_whole
from tests.helpers.workloads import small_workload
from workbench.errors import StudyInterrupted
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.studies.executors.inbox import Inbox
from workbench.studies.executors.messages import Dropped, Event, Message, Rows, Saved
from workbench.studies.executors.parcels import pack_chunk, unpacked
from workbench.studies.executors.relay import RelayStudy
from workbench.train import checkpoint
from workbench.train.hooks import Hook, Step
from workbench.train.interrupt import ask_to_stop
from workbench.train.trainer import Trainer

WORKLOAD = small_workload(config={"eval_every_steps": 4})
CONFIGS = [WORKLOAD.config.replace(peak_lr=lr) for lr in (0.01, 0.02)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "WRITE_SECONDS", -1.0)


@pytest.fixture
def study(tmp_path: Path) -> Iterator[StudyWriter]:
    study = StudyWriter.open(tmp_path / "s", kind="sweep", workload="small", config=WORKLOAD.config.to_dict())
    study.trial(WORKLOAD.config.replace(peak_lr=9.0).to_dict(), stage="other", train_examples=48)
    for config in CONFIGS:
        study.trial(config.to_dict(), stage="x", train_examples=48)
    yield study
    study.close()


def trained(study: StudyWriter, *hooks: Hook) -> tuple[list[Message], Path]:
    """Train trials 1 and 2 as a worker does; return what it told and a copy of its folder."""
    told: list[Message] = []
    chunk = pickle.loads(pickle.dumps(pack_chunk(study, [1, 2], stage="x", configs=b"")))
    copy = study.path.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    with unpacked(chunk) as inner:
        relay = RelayStudy(inner, told.append, {"pid": 7})
        with contextlib.suppress(StudyInterrupted):
            Trainer(device="cpu", hooks=hooks).run_trials(WORKLOAD, CONFIGS, cast(StudyWriter, relay), stage="x")
        relay.flush()
        shutil.copytree(inner.path, copy)
    assert not inner.path.exists()
    return told, copy


class Stops(Hook):
    def on_step(self, step: Step) -> None:
        if step.index == 13:
            ask_to_stop()


def test_the_messages_make_the_same_study(study: StudyWriter) -> None:
    told, copy = trained(study)
    Inbox(study).apply(told)
    study.flush()
    shutil.rmtree(study.path / "trials" / "0")
    assert_same_study(study.path, copy)
    assert_whole(study.path)
    for number in (1, 2):
        for path in StudyRecord(study.path).trial(number).checkpoints:
            theirs = copy / "trials" / str(number) / "checkpoints" / path.name
            assert {f.name: f.read_bytes() for f in path.iterdir()} == {
                f.name: f.read_bytes() for f in theirs.iterdir()
            }


def test_numbers_are_those_of_the_study_and_events_say_where(study: StudyWriter) -> None:
    told, _ = trained(study)
    assert {int(n) for m in told if isinstance(m, Rows) for n in m.columns["trial"]} == {1, 2}
    started = [m for m in told if isinstance(m, Event) and m.event == "started"]
    assert [(m.trial, m.values["pid"]) for m in started] == [(1, 7), (2, 7)]


def test_a_checkpoint_is_told_after_its_rows_and_before_the_end(study: StudyWriter) -> None:
    told, _ = trained(study)
    rows = 0
    saved: set[str] = set()
    for message in told:
        if isinstance(message, Rows) and message.table == "steps":
            rows += sum(int(n) == 1 for n in message.columns["trial"])
        elif isinstance(message, Saved) and message.trial == 1:
            assert rows >= int(message.name.removeprefix("step-"))
            saved.add(message.name)
        elif isinstance(message, Event) and message.trial == 1 and message.event == "ended":
            assert "step-00000040" in saved


def test_a_trial_goes_on_elsewhere_and_older_checkpoints_stay_behind(study: StudyWriter) -> None:
    told, _ = trained(study, Stops())
    Inbox(study).apply(told)
    study.flush()
    stopped = StudyRecord(study.path).trial(1)
    kept = [path.name for path in stopped.checkpoints]
    assert kept[-1] == "step-00000014"
    chunk = pack_chunk(study, [1, 2], stage="x", configs=b"")
    assert chunk.parcels[0].kept == tuple(kept)
    assert set(chunk.parcels[0].latest) == {p.name for p in stopped.checkpoints[-1].iterdir()}
    told, _ = trained(study)
    assert {m.name for m in told if isinstance(m, Saved)}.isdisjoint(kept), "what is there is not sent again"
    assert {m.name for m in told if isinstance(m, Dropped)} & set(kept), "but counts among the best"
    Inbox(study).apply(told)
    study.flush()
    whole = StudyWriter.open(study.path.parent / "w", kind="sweep", workload="small", config=WORKLOAD.config.to_dict())
    Trainer(device="cpu").run_trials(WORKLOAD, CONFIGS, whole, stage="x")
    whole.close()
    shutil.rmtree(study.path / "trials" / "0")
    assert_whole(study.path)
    for mine, theirs in zip(StudyRecord(study.path), StudyRecord(whole.path), strict=True):
        assert mine.steps["loss"].tolist() == theirs.steps["loss"].tolist()
        assert [p.name for p in mine.checkpoints] == [p.name for p in theirs.checkpoints]


def test_facts_and_the_record_are_the_worker_s(study: StudyWriter) -> None:
    told: list[Any] = []
    with unpacked(pack_chunk(study, [2], stage="x", configs=b"")) as inner:
        relay = RelayStudy(inner, told.append, {})
        relay.add_facts(a=1.5)
        assert relay.record.facts == {"a": 1.5}
        assert relay.record.trials["trial"].tolist() == [2]
    assert told[0].values == {"a": 1.5}
