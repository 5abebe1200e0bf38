"""What tests of processes may leave behind, and must not: processes, threads, ports, shared memory, folders.

Memory without a name is not looked for: it ends with its processes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_sharer
from pathlib import Path

from tests.helpers.killed_programs import descendants

LISTENS = "0A"
KEPT: set[str] = set()
"""Ports that torch keeps until this process ends: the caches of `DTensor` hold the process group of a mesh."""


def processes() -> set[str]:
    """Processes that this one, or one of them, has started; without those that multiprocessing keeps until this one ends."""
    return {f"process {pid}: {command}" for pid in descendants() if "multiprocessing" not in (command := _command(pid))}


def threads() -> set[str]:
    """Threads of this process that Python knows, by name and number; without the one that tqdm keeps for all of its bars."""
    there = [each for each in threading.enumerate() if each.name != "tqdm_monitor"]
    return {f"thread {each.name!r}, {each.native_id}" for each in there}


def ports() -> set[str]:
    """Ports on which this process listens."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {
        f"port {int(row[1].rpartition(':')[2], 16)}"
        for row in rows
        if row[3] == LISTENS and f"socket:[{row[9]}]" in own
    } - KEPT


def files() -> set[str]:
    """Files of shared memory."""
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def folders() -> set[str]:
    """Temporary folders of clusters that this process started."""
    pid, place = os.getpid(), Path(tempfile.gettempdir())
    return {str(path) for pattern in (f"workbench-{pid}-*", f"ray/session_*_{pid}") for path in place.glob(pattern)}


KINDS: tuple[Callable[[], set[str]], ...] = (processes, threads, ports, files, folders)


class Leftovers:
    """Remembers what is there, to tell later what is there besides."""

    def __init__(self) -> None:
        self._before = {kind: kind() for kind in KINDS}

    def found(self, within_s: float = 60.0) -> list[str]:
        """What was left; what ends takes its time, which it is given."""
        until = time.monotonic() + within_s
        resource_sharer.stop()  # Python's own thread, which hands open files to other processes and never ends by itself
        while True:
            gc.collect()  # what nobody holds any more ends
            left = sorted(each for kind in KINDS for each in kind() - self._before[kind])
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.1)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "multiprocessing: gone"
