"""`Watchdog`: says where a rank stands, and writes its stack where it stands still."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
from pathlib import Path

from workbench.topics.hosts.audit.state import State

__all__ = ["Watchdog", "stack_path", "status_path"]

BEAT_S = 0.25


def status_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says where it stands."""
    return folder / f"status-{rank}.json"


def stack_path(folder: Path, rank: int) -> Path:
    """Return the file that holds the stacks of a rank that stood still."""
    return folder / f"stack-{rank}.txt"


class Watchdog:
    """A thread that writes the rank's phase down, and a timer of `faulthandler`, which needs no thread, for its stack.

    Args:
        state: of this rank.
        timeout_s: without any progress, until the stack is written.
    """

    def __init__(self, state: State, timeout_s: float) -> None:
        self._state, self._timeout_s = state, timeout_s
        self._rank = state.rank
        self._stacks = stack_path(state.folder, self._rank).open("w", encoding="utf-8")
        self._end = threading.Event()
        faulthandler.dump_traceback_later(timeout_s, file=self._stacks, exit=False)
        self._write("running")
        self._thread = threading.Thread(target=self._watch, name="workbench-watchdog", daemon=True)
        self._thread.start()

    def close(self, said: str = "finished") -> None:
        """End the watch and say how it ended."""
        if self._end.is_set():
            return
        self._end.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join(timeout=2)
        self._stacks.close()
        self._write(said)

    def _watch(self) -> None:
        seen = self._state.progress
        while not self._end.wait(BEAT_S):
            if self._state.progress != seen:
                seen = self._state.progress
                faulthandler.dump_traceback_later(self._timeout_s, file=self._stacks, exit=False)
            self._write("running")

    def _write(self, said: str) -> None:
        path = status_path(self._state.folder, self._rank)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        row = {
            "rank": self._rank,
            "pid": os.getpid(),
            "step": self._state.step,
            "phase": self._state.phase,
            "state": said,
        }
        try:
            part.write_text(json.dumps(row), encoding="utf-8")
            part.replace(path)
        except OSError:
            return  # the folder is gone: nobody listens any more
