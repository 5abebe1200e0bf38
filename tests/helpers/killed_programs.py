"""Programs that tests kill with SIGKILL and start again: each life is a process of its own, forked from one that has everything imported."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "workbench.parameter_server.training.strategy_model", "workbench.parameter_server.training.sidecar",
     "tests.helpers.workloads", "tests.parameter_server.conftest"]
)  # fmt: skip


def wait_until(
    condition: Callable[[], bool], timeout_s: float = 120.0, what: str = "it", poll_s: float = 0.005
) -> None:
    """Wait for a condition; the limit only keeps a test that fails from hanging."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen in time"
        time.sleep(poll_s)


class Diary:
    """Lines that survive the SIGKILL of the process that wrote them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every entry so far, with the last one only where it is whole."""
        content = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def life(program: Callable[..., None], *args: Any) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that runs `program(*args)`; it is dead after the block."""
    process = _context.Process(target=program, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def killed(process: multiprocessing.process.BaseProcess) -> bool:
    """SIGKILL a process; returns whether it was that which ended it."""
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def lives(pid: int) -> bool:
    """Whether a process is there, and is more than its parent's memory of it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marked(name: str, value: str) -> list[int]:
    """Processes with this variable in their environment, which those that they start inherit."""
    found, entry = [], f"{name}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def descendants() -> list[int]:
    """Processes that this one, or one of them, has started and that are there."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, todo = [], [os.getpid()]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


def shared_memory() -> set[str]:
    """Memory without a name that processes of this test hold, by its inode."""
    found: set[str] = set()
    for pid in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found |= {line.split()[4] for line in maps if "/memfd:workbench" in line}
    return found


def sigkill(engine: Any, job: str, index: int) -> None:
    """End a task of a cluster from outside; an engine of processes is told nothing, one of threads has nothing else to kill."""
    if engine.name == "ray":
        os.kill(engine._tasks[job, index].pid, signal.SIGKILL)
    else:
        engine.kill(job, index)
