"""`Engine`: what the coordinator asks of whatever runs workers and servers; threads in one process, or actors of a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from workbench.parameter_server.errors import Job, UnavailableError
from workbench.parameter_server.servers.plane import DataPlane
from workbench.parameter_server.workers.closure import Closure
from workbench.parameter_server.workers.worker import Call

Ended = tuple[Any, BaseException | None]
"""Result of a call, or its error."""


class Engine(Protocol):
    """Workers and servers by index; calls block, and raise `UnavailableError` where the task is gone."""

    name: str
    num_workers: int
    num_servers: int
    plane: DataPlane

    def check_sendable(self, closure: Closure) -> None:
        """Refuse a closure that cannot be sent to a worker (behaviour 20); raises `TypeError`."""
        ...

    def at_once(self, worker: int) -> int:
        """Return how many calls a worker is best given at once."""
        ...

    def execute(self, worker: int, calls: Sequence[Call], cancel: threading.Event) -> list[Ended]:
        """Run calls on a worker, one after the other; when `cancel` is set, ask it to stop, then stop waiting for it.

        Returns:
            Result or error of each that it came to: it stops where one fails, or takes its time.

        Raises:
            UnavailableError: the worker is gone.
            CancelledError: it did not stop by itself, and was cut off.
        """
        ...

    def build(self, worker: int, resource: int, make: Callable[[], Any]) -> None:
        """Make a resource on a worker; see `WorkerRuntime.build`."""
        ...

    def drop(self, worker: int, resources: Sequence[int]) -> None:
        """Forget resources on a worker, without waiting; a worker that is gone holds none."""
        ...

    def held(self, worker: int) -> int:
        """Return how many resources a worker holds."""
        ...

    def wait_for_worker(self, worker: int, timeout_s: float) -> bool:
        """Wait until a worker answers (again); a new one holds no resources."""
        ...

    def check(self, job: Job, index: int) -> UnavailableError | None:
        """Return None where a task is healthy, else what it died of (behaviour 60)."""
        ...

    def incarnation(self, job: Job, index: int) -> int:
        """Return a number that changes whenever a task was started anew (behaviour 64)."""
        ...

    def kill(self, job: Job, index: int) -> None:
        """End a task at once, as if its machine were gone; for tests of failures."""
        ...

    def restart(self, job: Job, index: int) -> None:
        """Start a task anew that was killed, empty."""
        ...

    def close(self) -> None:
        """End every task; nothing is left behind."""
        ...
