"""`RelayStudy`: a study's writer as the trainer knows it, in a worker's own folder, that tells all to the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from workbench.record.parts import PartWriter
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.write import StudyWriter, TrialWriter
from workbench.studies.executors.messages import Dropped, Event, Facts, Message, Rewind, Rows, Saved

__all__ = ["RelayStudy"]

Send = Callable[[Message], None]


class RelayStudy:
    """Writes into a folder of the worker, which training and hooks read, and sends what it writes.

    Attributes:
        path: the worker's folder.
        steps: takes rows of the table of steps.
        evals: takes rows of the table of evaluations.
        predictions: takes rows of the table of tracked predictions.

    Args:
        inner: the writer of the worker's folder.
        send: takes one message after the other.
        where: facts about this worker that go into the events that begin a trial.
    """

    def __init__(self, inner: StudyWriter, send: Send, where: Mapping[str, Any]) -> None:
        self.path = inner.path
        self.steps, self.evals = _Rows("steps", inner.steps, send), _Rows("evals", inner.evals, send)
        self.predictions = _Rows("predictions", inner.predictions, send)
        self._inner, self._send, self._where = inner, send, where
        self._sent: dict[int, set[str]] = {}

    @property
    def record(self) -> StudyRecord:
        """The worker's part of the study."""
        return self._inner.record

    def trial(self, config: Mapping[str, Any], *, stage: str, train_examples: int) -> _RelayTrial:
        """Return the writer of the trial with this config, under the number that the study gave to it."""
        trial = self._inner.trial(config, stage=stage, train_examples=train_examples)
        self._sent.setdefault(trial.number, _names(trial.folder))
        return _RelayTrial(trial, self, self._send, self._where)

    def add_facts(self, **facts: Any) -> None:
        """Store what was measured on the live model."""
        self._inner.add_facts(**facts)
        self._send(Facts(facts))

    def flush(self) -> None:
        """Write all collected rows to the worker's disk, and send the checkpoints that are there by now."""
        self._inner.flush()
        self.send_checkpoints()

    def send_checkpoints(self) -> None:
        """Send the checkpoints that are new on disk, and the names of those that are gone."""
        for number, sent in self._sent.items():
            folder = self.path / "trials" / str(number)
            there = _names(folder)
            for name in sorted(there - sent):
                files = {file.name: file.read_bytes() for file in (folder / "checkpoints" / name).iterdir()}
                self._send(Saved(number, name, files))
            for name in sorted(sent - there):
                self._send(Dropped(number, name))
            self._sent[number] = there


class _Rows:
    """Takes the rows of one table."""

    def __init__(self, table: Literal["steps", "evals", "predictions"], inner: PartWriter, send: Send) -> None:
        self._table, self._inner, self._send = table, inner, send

    def add(self, columns: Mapping[str, Any]) -> None:
        """Take one block of rows."""
        self._inner.add(columns)
        self._send(Rows(self._table, dict(columns)))

    def show(self, columns: Mapping[str, Any]) -> None:
        """Show nothing: who looks on does so where the study is written."""


class _RelayTrial:
    """Writes the rows and events of one trial, here and there."""

    writes = True

    def __init__(self, inner: TrialWriter, study: RelayStudy, send: Send, where: Mapping[str, Any]) -> None:
        self.study, self.number, self.folder = study, inner.number, inner.folder
        self._inner, self._send, self._where = inner, send, where

    @property
    def record(self) -> TrialRecord:
        """The trial as far as this worker knows it."""
        return self._inner.record

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened to the trial so far, with this worker or another."""
        return self._inner.events

    @property
    def finished(self) -> bool:
        """Whether the trial already ran to its end."""
        return self._inner.finished

    def event(self, event: str, **values: Any) -> None:
        """Append one event; what it says rests on checkpoints that were sent before."""
        self.study.send_checkpoints()
        if event in ("started", "resumed"):
            values |= self._where
        self._inner.event(event, **values)
        self._send(Event(self.number, event, values))

    def rewind(self, step: int) -> None:
        """Drop this trial's rows of `step` and later, and its evaluations after `step`: they come again."""
        self._inner.rewind(step)
        self._send(Rewind(self.number, step))


def _names(trial: Path) -> set[str]:
    return {path.name for path in (trial / "checkpoints").glob("step-*")}
