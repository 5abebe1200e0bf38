"""`Guard`: keeps a program that is being diagnosed from a person's own files. It is there before torch, so it imports little."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_CACHES = {".cache", ".config", ".triton", ".nv", "__pycache__"}
"""Folders that libraries keep for themselves, as below a home directory."""
_COMPILED = "torchinductor_"
_TAKEN = {"os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)), "shutil.rmtree": ((0, 1),)}
"""Audit event -> where among its arguments a path stands whose entry goes away or is replaced, and the folder that it is seen from."""
_BEGUN: list[Guard] = []


def begin(trial: Mapping[str, Any]) -> Guard:
    """Begin to guard this process, unless that is done already."""
    if not _BEGUN:
        _BEGUN.append(Guard(trial["guarded"], trial["scratch"], trial["folder"], trial["typed_in"]))
        sys.addaudithook(_BEGUN[0].heard)  # Python keeps it for good
    return _BEGUN[0]


class Guard:
    """Refuses to write, move or remove what is the person's own: it was there before, below `guarded`, and not in `scratch`."""

    def __init__(self, guarded: str, scratch: str, folder: str, seen_from: str) -> None:
        self._seen_from = os.path.realpath(seen_from)
        self._guarded, self._scratch, self._folder = (
            os.path.join(os.path.realpath(p), "") for p in (guarded, scratch, folder)
        )
        self._made: set[str] = set()

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take in what the interpreter is about to do."""
        if event == "open":
            if _writes(*arguments[1:3]):
                self.check(arguments[0])
        elif event == "os.truncate":
            self.check(arguments[0])
        elif event == "os.mkdir":
            self._check_entry(arguments[0], new=True)
        elif event in _TAKEN:
            for i, seen_from in _TAKEN[event]:
                if len(arguments) <= seen_from or arguments[seen_from] in (None, -1):
                    self._check_entry(arguments[i], new=i == 1)

    def check(self, path: Any) -> None:
        """Refuse to write what `path` leads to, through links."""
        if isinstance(path, (str, bytes, os.PathLike)):
            real = os.path.realpath(os.fsdecode(path))
            self._refuse(real, there=os.path.isfile(real))

    def _check_entry(self, path: Any, *, new: bool) -> None:
        """Refuse to remove or replace the entry `path`; where that is a link, the folder that it stands in is what counts."""
        if isinstance(path, (str, bytes, os.PathLike)):
            parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            real = os.path.join(os.path.realpath(parent), name)
            there = os.path.lexists(real)
            if there or new:
                self._refuse(real, there=there and not (new and os.path.isdir(real)))

    def _refuse(self, real: str, *, there: bool) -> None:
        ours = os.path.join(real, "").startswith((self._scratch, self._folder))
        if ours or not real.startswith(self._guarded) or real in self._made:
            return
        parts = real[len(self._guarded) :].split(os.sep)
        if _CACHES.intersection(parts) or any(part.startswith(_COMPILED) for part in parts):
            return
        if not there:
            self._made.add(real)  # the program's own from here on
            return
        with contextlib.suppress(OSError):
            note = os.path.join(self._folder, "refused.json")
            if not os.path.exists(note):
                found = {"path": os.path.relpath(real, self._seen_from), "line": _line()}
                descriptor = os.open(note, os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(descriptor, json.dumps(found).encode())
                os.close(descriptor)
        raise PermissionError(
            f"{real} is of yours: while a program is diagnosed nothing that was there before is written, moved or removed"
        )


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(c in mode for c in "wa+")
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


def _line() -> str:
    from workbench.instruments.caller import own_line

    return own_line()
