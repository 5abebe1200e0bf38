"""`KnownTask`: a worker or server of a Ray cluster, as the engine knows it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

from workbench.parameter_server.engines.ray_tasks import Hello
from workbench.parameter_server.errors import Job
from workbench.parameter_server.links.shared_memory import Witness, machine

__all__ = ["KnownTask", "lives"]


class KnownTask:
    """A worker or server as the engine knows it.

    Args:
        job: of it.
        index: among those of its job.
        actor: by which Ray calls it.
    """

    def __init__(self, job: Job, index: int, actor: Any) -> None:
        self.job, self.index, self.actor = job, index, actor
        self.hello: Hello | None = None
        self.witness: Witness | None = None  # of its process, where that is on this machine
        self.incarnation = 0
        self.free = threading.Event()  # not held down
        self.free.set()
        self.known: set[int] = set()  # what this life of a worker keeps
        self.drop: deque[int] = deque()
        self.seconds = float("inf")  # that a worker's last call took there
        self.asked: tuple[Any, float] | None = None  # whether it is well, and when
        self.lock = threading.Lock()

    @property
    def life(self) -> str:
        """Which life of the task it knows."""
        return "" if self.hello is None else self.hello.life

    def met(self, hello: Hello) -> None:
        """Note who answers; a new life knows nothing."""
        if self.hello is None or self.hello.life != hello.life:
            if self.hello is not None:
                self.incarnation += 1
            self.known.clear()
            self.drop.clear()
            self.hello = hello
            self.witness = None
            if hello.machine == machine():
                with contextlib.suppress(OSError):  # it has ended since, or cannot be seen: Ray will tell
                    self.witness = Witness(hello.pid)

    def gone(self) -> bool:
        """Whether the life that it knows is seen to have ended, which Ray may take seconds to notice."""
        witness = self.witness
        return witness is not None and witness.gone()

    def taken_drop(self) -> list[int]:
        """Empty `drop`, to which others append."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self.drop.popleft())
        return found


def lives(pid: int) -> bool:
    """Return whether a process of this machine is there, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
