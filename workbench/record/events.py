"""`events.jsonl` of a trial: one JSON object a line, numbered and with a checksum, appended as things happen."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from workbench.errors import RecordError

EVENTS = "events.jsonl"
_NUMBER, _CHECKSUM = "line", "crc32"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of one trial; a last line that a crash cut off is left out."""
    path = folder / EVENTS
    content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")[:-1]  # behind the last line break is nothing, or what a crash cut off
    return [_checked(line, number, path) for number, line in enumerate(lines, 1)]


def append_event(folder: Path, event: dict[str, Any]) -> None:
    """Write one event behind the others, and over a line that a crash cut off."""
    path = folder / EVENTS
    try:
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        numbered = {**event, _NUMBER: content.count(b"\n") + 1}
        line = json.dumps({**numbered, _CHECKSUM: _checksum(numbered, folder.name)})
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(whole)
            file.seek(whole)
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}. What was saved before is kept.") from error


def _checked(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        event = dict(json.loads(line))
        wrong = None
    except (TypeError, ValueError):
        event, wrong = {}, "is no JSON object"
    given, said = event.pop(_CHECKSUM, None), event.get(_NUMBER, number)
    if given is not None and given != _checksum(event, path.parent.name):
        wrong = "does not have its checksum"
    elif said != number:
        wrong = f"is line {said} as it was written"
    if wrong:
        raise RecordError(
            f"{path} is damaged: line {number} {wrong}. Delete {path.parent} to read the other trials; the command of the study "
            "then trains this one again."
        )
    event.pop(_NUMBER, None)
    return event


def _checksum(event: dict[str, Any], trial: str) -> int:
    return zlib.crc32(json.dumps([trial, event], sort_keys=True).encode())
