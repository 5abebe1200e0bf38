"""`ThreadEngine`: workers and servers in this process, for tutorials, tests and debugging (T2.1 to T2.3)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.errors import CancelledError, Job, UnavailableError
from workbench.parameter_server.servers.plane import DataPlane, DirectPlane
from workbench.parameter_server.servers.server import ServerRuntime
from workbench.parameter_server.workers.worker import Call, WorkerRuntime

POLL_S = 0.02  # how soon a caller sees that its closure was cancelled or its worker killed


class _Task:
    """A worker or server, which of its lives this is, and whether it ended."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.incarnation = 0
        self.gone = threading.Event()
        self.back = threading.Event()
        self.back.set()


class ThreadEngine:
    """Each worker runs its closures in a thread of its own; a server is an object with a lock a block.

    A task that is killed answers nobody any more; what it was doing goes on in its thread until it looks at a variable or
    asks for a batch, and is thrown away, as the work of a machine that is cut off would be. It stays away until `restart`.

    Args:
        num_workers: at least 1.
        num_servers: at least 1.
        grace_s: how long a cancelled closure may take to notice before an exception is raised inside it.
    """

    name: str = "threads"
    plane: DataPlane

    def __init__(self, num_workers: int, num_servers: int, *, grace_s: float = 1.0) -> None:
        for name, count in (("num_workers", num_workers), ("num_ps", num_servers)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"{name}={count!r} must be an integer of at least 1.")
        self.num_workers, self.num_servers, self.grace_s = num_workers, num_servers, grace_s
        self._tasks: dict[tuple[Job, int], _Task] = {
            **{("worker", k): _Task(WorkerRuntime(k)) for k in range(num_workers)},
            **{("ps", k): _Task(ServerRuntime(k)) for k in range(num_servers)},
        }
        self._threads: list[_Hands] = [_Hands(f"worker {k}") for k in range(num_workers)]
        self.plane = DirectPlane(self._server)
        self._closed = False

    def execute(self, worker: int, call: Call, cancel: threading.Event) -> Any:
        """See `Engine`."""
        task = self._task("worker", worker)
        runtime: WorkerRuntime = task.runtime
        return self._threads[worker].run(
            lambda: runtime.execute(call, _Either(cancel, task.gone)),
            cancel=cancel,
            grace_s=self.grace_s,
            gone=task.gone,
            when_gone=lambda: UnavailableError("worker", worker),
        )

    def build(
        self, worker: int, resource: int, recipe: Callable[[], Any], needs: Mapping[str, int] | None = None
    ) -> None:
        """See `Engine`."""
        runtime: WorkerRuntime = self._task("worker", worker).runtime
        runtime.build(resource, recipe, needs)
        self._task("worker", worker)  # it may have been killed meanwhile

    def drop(self, worker: int, resources: Sequence[int]) -> None:
        """See `Engine`."""
        self._tasks["worker", worker].runtime.drop(resources)

    def held(self, worker: int) -> int:
        """See `Engine`."""
        found: int = self._task("worker", worker).runtime.held()
        return found

    def wait_for_worker(self, worker: int, timeout_s: float) -> bool:
        """See `Engine`."""
        return self._tasks["worker", worker].back.wait(timeout_s)

    def check(self, job: Job, index: int) -> UnavailableError | None:
        """See `Engine`."""
        return UnavailableError(job, index) if self._tasks[job, index].gone.is_set() else None

    def incarnation(self, job: Job, index: int) -> int:
        """See `Engine`."""
        return self._tasks[job, index].incarnation

    def kill(self, job: Job, index: int) -> None:
        """See `Engine`."""
        task = self._tasks[job, index]
        task.back.clear()
        task.gone.set()

    def restart(self, job: Job, index: int) -> None:
        """See `Engine`."""
        task = self._tasks[job, index]
        if not task.gone.is_set():
            return
        task.runtime = WorkerRuntime(index) if job == "worker" else ServerRuntime(index)
        task.incarnation += 1
        if job == "worker":
            self._threads[index].leave()
            self._threads[index] = _Hands(f"worker {index}")
        task.gone = threading.Event()
        task.back.set()

    def close(self) -> None:
        """See `Engine`."""
        self._closed = True
        for task in self._tasks.values():
            task.gone.set()
        for hands in self._threads:
            hands.leave()
        for hands in self._threads:
            hands.join(self.grace_s)

    def _task(self, job: Job, index: int) -> _Task:
        task = self._tasks[job, index]
        if task.gone.is_set():
            raise UnavailableError(job, index, "the cluster was shut down" if self._closed else "its process is gone")
        return task

    def _server(self, index: int) -> ServerRuntime:
        found: ServerRuntime = self._task("ps", index).runtime
        return found


class _Either:
    """Set where one of two flags is: a closure stops when it is cancelled, and when its worker is cut off."""

    def __init__(self, *flags: threading.Event) -> None:
        self._flags = flags

    def is_set(self) -> bool:
        """Return whether one of them is."""
        return any(flag.is_set() for flag in self._flags)


class _Hands:
    """A thread that does one thing after the other, and can be told to stop in the middle of one."""

    def __init__(self, name: str) -> None:
        self._wake = threading.Condition()
        self._work: Callable[[], Any] | None = None
        self._ended: threading.Event | None = None
        self._result: tuple[Any, BaseException | None] = (None, None)
        self._left = False
        self._thread = threading.Thread(target=self._loop, name=f"parameter server {name}", daemon=True)
        self._thread.start()

    def run(
        self,
        work: Callable[[], Any],
        *,
        cancel: threading.Event,
        grace_s: float,
        gone: threading.Event,
        when_gone: Callable[[], BaseException],
    ) -> Any:
        """Do `work` and return its result; stop waiting when `gone` is set, and raise inside it `grace_s` after `cancel`."""
        ended = threading.Event()
        with self._wake:
            self._work, self._ended = work, ended
            self._wake.notify()
        waited = 0.0
        while not ended.wait(POLL_S):
            if gone.is_set():
                raise when_gone()
            if cancel.is_set():
                waited += POLL_S
                if waited >= grace_s:
                    waited = 0.0
                    self._raise_inside()
        if gone.is_set():
            raise when_gone()
        (value, error), self._result = self._result, (None, None)  # an error holds the frames of whoever it met
        if error is None:
            return value
        try:
            raise error
        finally:
            del error

    def leave(self) -> None:
        """End the thread, after what it does now."""
        with self._wake:
            self._left = True
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _raise_inside(self) -> None:
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(CancelledError)
            )

    def _loop(self) -> None:
        while True:
            try:
                with self._wake:
                    self._wake.wait_for(lambda: self._work is not None or self._left)
                    if self._work is None:
                        return
                    work, ended = self._work, self._ended
                    self._work = None
            except CancelledError:  # came too late for the closure that it was meant for
                continue
            value, error = None, None
            try:
                value = work()
            except BaseException as caught:
                error = caught
            self._result = (value, error)
            assert ended is not None
            ended.set()
            del work, value, error
