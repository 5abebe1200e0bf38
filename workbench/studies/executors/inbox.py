"""`Inbox`: what workers tell, written into the study by its one writer."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from workbench.errors import RecordError
from workbench.record.parts import write_atomic
from workbench.record.write import StudyWriter, TrialWriter
from workbench.studies.executors.messages import (
    Advanced,
    Dropped,
    Ended,
    Event,
    Facts,
    Message,
    Rewind,
    Rows,
    Saved,
)
from workbench.train.progress import Progress

__all__ = ["Inbox"]

FLUSH_SECONDS = 5.0  # rule of thumb: what a killed driver may cost in rows; a resumed trial trains them again

_CHECKPOINT, _FILE = re.compile(r"step-\d{8}"), re.compile(r"\w[\w.-]*")


class Inbox:
    """Applies messages in the order of each worker; a study that is killed in between resumes as any other."""

    def __init__(self, study: StudyWriter, progress: Progress | None = None) -> None:
        self.study, self._progress = study, progress
        self._flushed_at = time.perf_counter()
        self._rows_wait = False

    def apply(self, messages: Iterable[Message]) -> Ended | None:
        """Write what one worker told, and return its last word where it is among it.

        Raises:
            RecordError: the disk is full or not writable; what was saved before is kept.
        """
        later: list[Message] = []
        ended = None
        for message in messages:
            if isinstance(message, Rows):
                getattr(self.study, message.table).add(message.columns)
                self._rows_wait = True
            elif isinstance(message, Rewind):
                self._settle(later)
                TrialWriter(self.study, message.trial).rewind(message.step)
            elif isinstance(message, Ended):
                ended = message
            else:
                later.append(message)
        self._settle(later)
        if time.perf_counter() - self._flushed_at > FLUSH_SECONDS:
            self.flush()
        return ended

    def flush(self) -> None:
        """Write all collected rows to disk."""
        self.study.flush()
        self._rows_wait, self._flushed_at = False, time.perf_counter()

    def _settle(self, messages: list[Message]) -> None:
        """Write what is no rows; a checkpoint or an end is not on disk before the rows that it rests on."""
        if self._rows_wait and any(isinstance(m, Saved) or _is_end(m) for m in messages):
            self.flush()
        for message in messages:
            if isinstance(message, Saved):
                self._save(message)
            elif isinstance(message, Dropped):
                _drop(self._checkpoint(message.trial, message.name))
            elif isinstance(message, Event):
                TrialWriter(self.study, message.trial).event(message.event, **message.values)
            elif isinstance(message, Facts):
                self.study.add_facts(**message.values)
            elif isinstance(message, Advanced) and self._progress is not None:
                self._progress(message.steps)
        messages.clear()

    def _save(self, saved: Saved) -> None:
        """Write a checkpoint whole or not at all."""
        target = self._checkpoint(saved.trial, saved.name)
        if target.exists():
            return
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            for name, content in saved.files.items():
                write_atomic(temporary / _checked(name, _FILE), content)
            temporary.rename(target)
        except OSError as error:
            raise RecordError(
                f"cannot write {target}: {error.strerror or error}. Nothing that was saved before is lost; run the same "
                "call again to go on."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _checkpoint(self, trial: int, name: str) -> Path:
        return self.study.path / "trials" / str(int(trial)) / "checkpoints" / _checked(name, _CHECKPOINT)


def _is_end(message: Message) -> bool:
    return isinstance(message, Event) and message.values.get("state") not in (None, "running")


def _drop(path: Path) -> None:
    if path.exists():
        doomed = path.with_name(f".{path.name}.old")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _checked(name: str, allowed: re.Pattern[str]) -> str:
    if not allowed.fullmatch(name):
        raise RecordError(f"a worker sent a checkpoint under the name {name!r}, which is none of a checkpoint's.")
    return name
