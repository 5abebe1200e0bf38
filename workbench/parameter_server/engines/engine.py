"""`Engine`: what the coordinator asks of whatever runs workers and servers; threads in one process, or actors of a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from workbench.parameter_server.errors import Job, UnavailableError
from workbench.parameter_server.servers.plane import DataPlane
from workbench.parameter_server.workers.worker import Call


class Engine(Protocol):
    """Workers and servers by index; calls block, and raise `UnavailableError` where the task is gone."""

    name: str
    num_workers: int
    num_servers: int
    plane: DataPlane

    def execute(self, worker: int, call: Call, cancel: threading.Event) -> Any:
        """Run a call on a worker and return its result; when `cancel` is set, ask it to stop, then stop waiting for it.

        Raises:
            UnavailableError: the worker, or a server that the call needed, is gone.
            CancelledError: it was cancelled.
            Exception: what the function raised.
        """
        ...

    def build(
        self, worker: int, resource: int, recipe: Callable[[], Any], needs: Mapping[str, int] | None = None
    ) -> None:
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
