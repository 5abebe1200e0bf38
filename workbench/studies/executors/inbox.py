"""`Mailbox`: what workers tell, until the driver comes for it; `Inbox`: writes it into the study, whose one writer the driver is."""

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.progress import Progress
from workbench.record.folder import write_atomic
from workbench.record.write import StudyWriter, TrialWriter

MOST_BYTES = 64 * 2**20  # rule of thumb: workers wait for the reader while more than this is unread
FLUSH_SECONDS = 5.0  # rule of thumb: what a killed driver may cost in rows; a resumed trial trains them again

_TABLE, _CHECKPOINT, _FILE = (re.compile(p) for p in ("steps|evals|predictions", r"step-\d{8}", r"\w[\w.-]*"))


class Mailbox:
    """Letters of several senders, in the order of each; a worker of its own, so that who sends never waits for who reads."""

    def __init__(self) -> None:
        self._letters: list[tuple[str, Sequence[Any]]] = []
        self._bytes = 0
        self._stopping: set[str] = set()

    def put(self, sender: str, messages: Sequence[Any], size: int) -> bool | None:
        """Take messages and return whether their sender is to stop; None where nothing was taken, because too much is unread."""
        if self._bytes > MOST_BYTES:
            return None
        self._letters.append((sender, messages))
        self._bytes += size
        return sender in self._stopping

    def take(self) -> list[tuple[str, Sequence[Any]]]:
        """Return sender and messages of what was not read yet."""
        letters, self._letters, self._bytes = self._letters, [], 0
        return letters

    def stop(self, senders: Sequence[str]) -> None:
        """Have these senders told to stop, the next time that they put something."""
        self._stopping |= set(senders)


class Inbox:
    """Writes what workers tell into the study; one that is killed in between resumes as any other."""

    def __init__(self, study: StudyWriter, progress: Progress | None = None) -> None:
        self.study, self._progress = study, progress
        self._flushed_at = time.monotonic()
        self._rows_wait = False

    def apply(self, messages: Sequence[tuple[Any, ...]], where: dict[str, Any]) -> None:
        """Write what one worker told."""
        later: list[tuple[Any, ...]] = []
        for kind, *given in messages:
            if kind == "begun":
                where |= given[0]
            elif kind == "rows":
                getattr(self.study, _checked(given[0], _TABLE)).add(given[1])
                self._rows_wait = True
            elif kind == "rewind":
                self._settle(later, where)
                TrialWriter(self.study, given[0]).rewind(given[1])
            else:
                later.append((kind, *given))
        self._settle(later, where)
        if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all collected rows to disk."""
        self.study.flush()
        self._rows_wait, self._flushed_at = False, time.monotonic()

    def _settle(self, messages: list[tuple[Any, ...]], where: dict[str, Any]) -> None:
        """Write what is no rows; a checkpoint or an end is not on disk before the rows that it rests on."""
        ends = [m for m in messages if m[0] == "event" and m[2].get("state") not in (None, "running")]
        if self._rows_wait and (ends or any(m[0] == "saved" for m in messages)):
            self.flush()
        for kind, *given in messages:
            if kind == "advanced":
                if self._progress is not None:
                    self._progress(given[0])
                continue
            number, said = int(given[0]), given[1]
            folder = self.study.path / "trials" / str(number) / "checkpoints"
            if kind == "event":
                values = {**said, **(where if said["event"] in ("started", "resumed") else {})}
                TrialWriter(self.study, number).event(values.pop("event"), **values)
            elif kind == "saved":
                _save(folder / _checked(said, _CHECKPOINT), given[2])
            elif (dropped := folder / _checked(said, _CHECKPOINT)).exists():
                doomed = dropped.with_name(f".{dropped.name}.old")
                dropped.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        messages.clear()


def _save(target: Path, files: dict[str, bytes]) -> None:
    """Write a checkpoint whole or not at all."""
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for name, content in files.items():
            write_atomic(temporary / _checked(name, _FILE), content)
        temporary.rename(target)
    except OSError as error:
        raise RecordError(
            f"cannot write {target}: {error.strerror or error}. Nothing that was saved before is lost; run the same "
            "call again to go on."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _checked(name: str, allowed: re.Pattern[str]) -> str:
    if not allowed.fullmatch(name):
        raise RecordError(f"a worker sent {name!r}, which is no name of a table, a checkpoint or its files.")
    return name
