"""`Forks`: runs of a program that begin where its imports are done, in a process forked from one that has them; where that is not certain to be the same, none. And how any run is ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.programs.fork_server import PID, READY, ROOM

_CODE = "from workbench.programs.fork_server import serve; serve()()"
_ENDED = "the process with its imports has ended"
_LONGEST_PATH = 4096
_LONGEST_RUNS, _LONGEST_S = 10.0, 60.0
"""A forked run may take so many times the longest plain run, and so many seconds more (rule of thumb)."""
_COMPARED = ("loss", "grad_norm")
"""Of the first update, before anything that is changed tells: the same bit for bit in a forked run, or none is forked any more."""

Seed = tuple[Any, ...]
"""Of a run, and which of the program's trainings is observed."""


class NotForked(Exception):
    """The run has to be a process of its own."""


class Forks:
    """Knows from plain runs what a program imports, and forks its other runs from a process that has imported that.

    Attributes:
        server: the process that forks, once there is one.
        why: no run is forked (any more), in a sentence; "" where nothing speaks against it.
    """

    def __init__(self) -> None:
        self.why = ""
        self._start: Mapping[str, Any] = {}
        self._rows: dict[Seed, list[str]] = {}
        self._seconds = 0.0
        self._proved = False
        self.server: subprocess.Popen[bytes] | None = None
        self._asked: socket.socket | None = None
        self._lock = threading.Lock()

    def saw(self, seed: Seed, outcome: Any) -> None:
        """Take in a plain run."""
        start = outcome.facts.get("start")
        if start and outcome.updates:
            self._start = self._start or start
            self._seconds = max(self._seconds, outcome.seconds)
            self._rows.setdefault(seed, _first(outcome))
            self.why = self.why or str(start["why"])

    def can(self, words: Sequence[str], seed: Seed) -> bool:
        """Tell whether a run under this seed can be forked, and will be known to be the same."""
        fits = sys.platform == "linux" and words[0] == sys.executable and len(words) > 1 and (words[1] == "-m" or words[1].endswith(".py"))  # fmt: skip
        return fits and bool(self._start) and not self.why and (self._proved or seed in self._rows)

    def limit_s(self, given: float | None) -> float:
        """Return how long a forked run may take: one that waits for what was lost in the fork never ends by itself."""
        return min(given or math.inf, _LONGEST_RUNS * self._seconds + _LONGEST_S)

    def run(self, words: Sequence[str], twin: Path, trial: Path, streams: Sequence[int], *, environment: Mapping[str, str], folder: Path) -> ForkedRun:  # fmt: skip
        """Begin a run; the first one waits for the imports.

        Raises:
            NotForked: it has to be a process of its own.
        """
        with self._lock:
            if self.server is None and not self.why:
                self._begin(words, environment, folder, trial.parent)
            if self.why or self._asked is None:
                raise NotForked(self.why)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            request = json.dumps({"words": list(words), "folder": str(twin), "trial": str(trial)}).encode()
            try:
                socket.send_fds(self._asked, [request], [theirs.fileno(), *streams])
            except OSError as error:
                ours.close()
                self.end(_ENDED)
                raise NotForked(self.why) from error
            finally:
                theirs.close()
        run = ForkedRun(ours)
        if not run.pid:
            ours.close()
            self.end(_ENDED)
            raise NotForked(self.why)
        return run

    def _begin(self, words: Sequence[str], environment: Mapping[str, str], folder: Path, told: Path) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = told / "start.json"
        beside = folder if words[1] == "-m" else (folder / words[1]).parent
        own = {name: environment.get(name) for name in self._start["set"]}
        path.write_text(json.dumps({**self._start, "path": str(beside.resolve()), "own": own}), encoding="utf-8")
        changed = {**environment, **self._start["set"], ROOM: "-" * _LONGEST_PATH, "WORKBENCH_TRIAL": None}
        known = {name: value for name, value in changed.items() if value is not None}
        with theirs:
            self.server = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), str(path)], cwd=folder, env=known, start_new_session=True, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._asked.settimeout(self.limit_s(None))
        try:
            said = self._asked.recv(1 << 16).decode() or _ENDED
        except TimeoutError:
            said = "its imports did not end in a process of their own"
        if said != READY:
            self.end(said)

    def same(self, seed: Seed, outcome: Any, timeout_s: float | None) -> bool:
        """Tell whether a forked run began as a plain one does, and did not end in a way of its own; where not, none is forked any more."""
        if outcome.code < 0 and not outcome.seconds > (timeout_s or math.inf):
            self.end("a run that was forked was ended by a signal")
        elif not outcome.updates or (seed in self._rows and _first(outcome) != self._rows[seed]):
            self.end("a run that was forked did not begin with the same loss")
        self._proved = self._proved or not self.why
        return not self.why

    def end(self, why: str = "") -> None:
        """End the process that forks; runs that are under way go on."""
        self.why = self.why or why
        if self.server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.server.pid, signal.SIGKILL)
            self.server.wait()
        if self._asked is not None:
            self._asked.close()
            self._asked = None


def _first(outcome: Any) -> list[str]:
    return [repr(values[0]) for name in _COMPARED if (values := outcome.columns.get(name))]


class ForkedRun:
    """A run that is not our own child: like a `subprocess.Popen`, as far as it is asked."""

    def __init__(self, told: socket.socket) -> None:
        self._told, self._lock = told, threading.Lock()
        self.returncode: int | None = None
        said = told.recv(64)
        self.pid = int(said.removeprefix(PID)) if said.startswith(PID) else 0  # else it has ended before it began

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code.

        Raises:
            TimeoutExpired: it has not ended yet.
        """
        with self._lock:
            if self.returncode is None:
                self._told.settimeout(timeout)
                try:
                    self.returncode = int(self._told.recv(64) or -signal.SIGKILL)
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired("a forked run", timeout or 0.0) from None
                self._told.close()
            return self.returncode

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None


Job = subprocess.Popen[bytes] | ForkedRun


def end_run(job: Job, trial: Path) -> None:
    """End what is left of a run: asked first, then killed.

    A run has a process group of its own; launchers such as torchrun give each worker another one, and theirs are known by their environment.
    """
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        strangers = _workers(trial)
        groups = {job.pid} if _alive(job) else set()
        if not groups and not strangers:
            break
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        until = time.monotonic() + seconds
        while time.monotonic() < until and (_alive(job) or (strangers and _workers(trial))):
            time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout=5.0)


def _alive(job: Job) -> bool:
    """Tell whether a run's process group has members. Once its first process was waited for, one with its number is somebody else's."""
    ended = job.poll() is not None
    try:
        os.killpg(job.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    with contextlib.suppress(ProcessLookupError):
        return not (ended and os.getpgid(job.pid))
    return True


def _workers(trial: Path) -> set[int]:
    """Return the processes whose environment names this run; none where the system does not tell (it is Linux that does)."""
    mark, found = f"WORKBENCH_TRIAL={trial}\0".encode(), set()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in place.read_bytes() + b"\0":
                found.add(int(place.parent.name))
    return found - {os.getpid()}
