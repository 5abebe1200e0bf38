"""`RayTask`: a worker or server as the coordinator knows it: who answers, whether it lives, and what it was sent (behaviours 60, 64)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from workbench import __version__
from workbench.errors import ClusterError
from workbench.parameter_server.engines.ray_actors import Hello
from workbench.parameter_server.engines.sendable import Dropped
from workbench.parameter_server.errors import Job, UnavailableError
from workbench.parameter_server.servers.links import CONTROL
from workbench.parameter_server.servers.shared_memory import Witness, machine
from workbench.ray.cluster import NotYet, RayCluster, WorkerLost

START_S = 120.0  # until every task has answered for the first time; importing torch takes seconds where others compute
POLL_S = 0.05  # how soon it is seen that a closure was cancelled or its worker killed
SILENT_S = 10.0  # without an answer before a task counts as gone (rule of thumb)


class RayTask:
    """An actor, and which life of it is known."""

    def __init__(self, ray: RayCluster, job: Job, index: int, actor: Any) -> None:
        self._ray, self.job, self.index, self.actor = ray, job, index, actor
        self.hello: Hello | None = None
        self.incarnation = 0
        self.released = threading.Event()  # cleared while it was killed and is to stay away
        self.released.set()
        self.known: set[int] = set()  # numbers of what this life of a worker keeps
        self.seconds = float("inf")  # that a worker's last call took there
        self.drop: deque[Dropped] = deque()
        self._witness: Witness | None = None  # of its process, where that is on this machine
        self._asked: tuple[Any, float] | None = None  # whether it is well, and when
        self._lock = threading.Lock()

    @property
    def life(self) -> str:
        """Which life of the task is known."""
        return "" if self.hello is None else self.hello.life

    @property
    def local(self) -> bool:
        """Whether its process is on this machine."""
        return self.hello is not None and self.hello.machine == machine()

    @property
    def pid(self) -> int:
        """Its process, on its machine."""
        if self.hello is None:
            raise self.unavailable()
        return self.hello.pid

    @property
    def silent(self) -> bool:
        """Whether it has not answered yet what `meet` asked: it is busy, or its machine is cut off."""
        return self._asked is not None

    def unavailable(self, why: str = "its process is gone") -> UnavailableError:
        """Return the error that names it."""
        return UnavailableError(self.job, self.index, why)

    def meet_first(self) -> None:
        """Wait until it has introduced itself.

        Raises:
            ClusterError: it cannot be started, or has another version of this package.
        """
        try:
            hello = self._ray.answer(self._ray.call(self.actor, "hello"), START_S)
        except (WorkerLost, TimeoutError) as error:
            raise ClusterError(f"{self.job} {self.index} cannot be started: {error}") from error
        if hello.version != __version__:
            raise ClusterError(
                f"{self.job} {self.index} runs workbench {hello.version}, and this process {__version__}: install the same "
                "version on every machine of the cluster."
            )
        self._met(hello)

    def meet(self, timeout_s: float) -> UnavailableError | None:
        """Ask whether it is well, and return None where it answers, or is busy; one that has not answered yet is asked no second time."""
        with self._lock:
            if self._asked is None:
                self._asked = (self._ray.call(self.actor, "hello", group=CONTROL), time.monotonic())
            call, since = self._asked
            until = time.monotonic() + timeout_s
            while True:
                try:
                    hello = self._ray.answer(call, max(0.0, min(POLL_S, until - time.monotonic())))
                except WorkerLost:
                    self._asked = None
                    return self.unavailable()
                except NotYet:
                    now = time.monotonic()
                    if now - since > SILENT_S:
                        self._asked = None
                        return self.unavailable(f"no answer within {SILENT_S:g} s")
                    if self.gone():
                        return self.unavailable()
                    if now > until:
                        return None
                else:
                    self._asked = None
                    self._met(hello)
                    return None

    def wait(self, call: Any, between: Callable[[], object] | None = None) -> Any:
        """Return the answer to a call; `between` is called now and then until it is there.

        Raises:
            UnavailableError: the task was killed, or ended.
        """
        while True:
            try:
                return self._ray.answer(call, POLL_S)
            except WorkerLost:
                raise self.unavailable() from None
            except NotYet:
                if not self.released.is_set() or self.gone():
                    raise self.unavailable() from None
                if between is not None:
                    between()

    def kill(self) -> None:
        """End it, and let it stay away until `released` is set: by SIGKILL where it is on this machine, else through Ray."""
        self.released.clear()
        if self.local:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            self._ray.kill(self.actor, for_good=False)

    def take_drop(self) -> list[Dropped]:
        """Empty `drop`, to which others append."""
        found: list[Dropped] = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self.drop.popleft())
        return found

    def _met(self, hello: Hello) -> None:
        """Note who answers; a new life knows nothing."""
        if self.life == hello.life:
            return
        self.incarnation += self.hello is not None
        self.known.clear()
        self.drop.clear()
        self.hello, self._witness = hello, None
        if self.local:
            with contextlib.suppress(OSError):  # it has ended since, or cannot be seen: Ray will tell
                self._witness = Witness(hello.pid)

    def gone(self) -> bool:
        """Return whether the life that is known is seen to have ended, which Ray may take seconds to notice."""
        witness = self._witness
        return witness is not None and witness.gone()
