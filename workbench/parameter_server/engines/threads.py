"""`ThreadEngine`: workers and servers in this process, for tutorials, tests and debugging (T2.1 to T2.3)."""

import contextlib
import io
import pickle
import queue
import threading
import time
import types
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from workbench.checks import check_integer
from workbench.parameter_server.data.datasets import DatasetRecipe, IteratorRecipe
from workbench.parameter_server.engines.ray_task import SendOnce, taken_along
from workbench.parameter_server.errors import CancelledError, Job, UnavailableError, refuse
from workbench.parameter_server.servers.links import DataPlane
from workbench.parameter_server.servers.replicas import forget_replicas
from workbench.parameter_server.servers.server import DirectPlane, ServerRuntime
from workbench.parameter_server.workers.closure import returning
from workbench.parameter_server.workers.worker import Call, WorkerRuntime

POLL_S = 0.02  # how soon a caller sees that its closure was cancelled or its worker killed

Ended = tuple[Any, BaseException | None]  # result of a call, or its error


class _Task:
    """A worker or server, which of its lives this is, and whether it ended."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self.make, self.name = make, name
        self.incarnation = -1
        self.back = threading.Event()
        self.begin()

    def begin(self) -> None:
        """Start a life of it, empty."""
        self.runtime = self.make()
        self.thread = _Thread(self.name) if isinstance(self.runtime, WorkerRuntime) else None
        self.gone = threading.Event()
        self.incarnation += 1
        self.back.set()

    def end(self) -> None:
        """Cut it off; its thread goes on until it looks at a variable, asks for a batch, or comes to the end of a closure."""
        self.back.clear()
        self.gone.set()
        if self.thread is not None:
            self.thread.work.put(None)


class ThreadEngine:
    """Each worker runs its closures in a thread of its own; a server is an object with a lock a block.

    What the coordinator asks of an engine is said here; `RayEngine` has the same methods. Workers and servers are named by their
    index; calls block, and raise `UnavailableError` where the task is gone.

    A task that is killed answers nobody any more; what it was doing goes on in its thread until it looks at a variable or
    asks for a batch, and is thrown away, as the work of a machine that is cut off would be. It stays away until `restart`.

    Args:
        grace_s: how long a cancelled closure may take to notice before its worker is cut off, and another one takes its place.
    """

    name: str = "threads"
    plane: DataPlane

    def __init__(self, num_workers: int, num_servers: int, *, grace_s: float = 1.0) -> None:
        self.num_workers = check_integer("num_workers", num_workers)
        self.num_servers = check_integer("num_ps", num_servers)
        self.grace_s = grace_s
        self._tasks: dict[tuple[Job, int], _Task] = {}
        for k in range(num_workers):
            self._tasks["worker", k] = _Task(lambda k=k: WorkerRuntime(k), f"parameter server worker {k}")  # type: ignore[misc]
        for k in range(num_servers):
            self._tasks["ps", k] = _Task(lambda k=k: ServerRuntime(k), f"ps {k}")  # type: ignore[misc]
        self.id = uuid.uuid4().hex
        self.plane = DirectPlane(lambda server: self._task("ps", server).runtime)
        self._closed = False
        self.sent = SendOnce(_tried, lambda _: None)  # refuses what could not be sent to a worker of another process

    def at_once(self, worker: int) -> int:  # noqa: ARG002
        """Return how many calls a worker is best given at once."""
        return 1

    def execute(self, worker: int, calls: Sequence[Call], cancel: threading.Event) -> list[Ended]:
        """Run calls on a worker, one after the other; when `cancel` is set, ask it to stop, then stop waiting for it.

        Returns:
            Result or error of each that it came to, the first at least: it stops where one fails, or takes its time.

        Raises:
            UnavailableError: the worker is gone.
            CancelledError: it did not stop by itself, and was cut off.
        """
        task = self._task("worker", worker)
        thread, gone, runtime = task.thread, task.gone, task.runtime
        assert thread is not None
        ended: Future[Any] = Future()
        thread.work.put(
            (ended, lambda: _sent_back(runtime.execute(calls[0], lambda: cancel.is_set() or gone.is_set())))
        )
        until: float | None = None
        while not ended.done():
            if wait([ended], POLL_S).done:
                break
            if cancel.is_set():
                until = until or time.monotonic() + self.grace_s
                if time.monotonic() > until and not gone.is_set():
                    self.kill("worker", worker)
                    self.restart("worker", worker)
                    raise CancelledError
            if gone.is_set():
                break
        if gone.is_set():
            raise UnavailableError("worker", worker)
        error = ended.exception()
        return [(None if error else ended.result(), error)]

    def build(self, worker: int, resource: int, make: Callable[[], Any]) -> None:
        """Make a resource on a worker; see `WorkerRuntime.build`. A dataset that cannot be sent is an error of its making."""
        try:
            if isinstance(make, (DatasetRecipe, IteratorRecipe)):
                self.sent.packed(make)
        except TypeError as error:
            make = partial(refuse, error)
        self._task("worker", worker).runtime.build(resource, make)
        self._task("worker", worker)  # it may have been killed meanwhile

    def drop(self, worker: int, resource: int) -> None:
        """Forget a resource on a worker, without waiting; a worker that is gone holds none."""
        self._tasks["worker", worker].runtime.drop(resource)

    def forget(self, cluster: str, name: str) -> None:
        """Drop the replicas of a placed module everywhere."""
        forget_replicas(cluster, name)

    def wait_for_worker(self, worker: int, timeout_s: float) -> bool:
        """Wait until a worker answers (again); a new one holds no resources."""
        return self._tasks["worker", worker].back.wait(timeout_s)

    def check(self, job: Job, index: int) -> UnavailableError | None:
        """Return None where a task is healthy, else what it died of (behaviour 60)."""
        return UnavailableError(job, index) if self._tasks[job, index].gone.is_set() else None

    def incarnation(self, job: Job, index: int) -> int:
        """Return a number that changes whenever a task was started anew (behaviour 64)."""
        return self._tasks[job, index].incarnation

    def kill(self, job: Job, index: int) -> None:
        """End a task at once, as if its machine were gone; for tests of failures."""
        self._tasks[job, index].end()

    def restart(self, job: Job, index: int) -> None:
        """Start a task anew that was killed, empty."""
        task = self._tasks[job, index]
        if task.gone.is_set() and not self._closed:
            task.begin()

    def close(self) -> None:
        """End every task; nothing is left behind."""
        self._closed = True
        for task in self._tasks.values():
            task.end()
        for task in self._tasks.values():
            if task.thread not in (None, threading.current_thread()):
                task.thread.join(self.grace_s)

    def _task(self, job: Job, index: int) -> _Task:
        task = self._tasks[job, index]
        if task.gone.is_set():
            raise UnavailableError(job, index, "the cluster was shut down" if self._closed else "its process is gone")
        return task


_BY_VALUE: tuple[type, ...] = (
    type, types.ModuleType, types.CodeType, type({}.keys()), memoryview, property, staticmethod, classmethod, Tensor, np.ndarray,
)  # fmt: skip


class _Sending(pickle.Pickler):
    """Looks through what Ray sends, functions of a script or notebook included; arrays and tensors are not copied for it."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.FunctionType):
            return dict, (), () if _importable(thing) else taken_along(thing)
        by_value = isinstance(thing, _BY_VALUE) and not (isinstance(thing, np.ndarray) and thing.dtype.hasobject)
        return (dict, ()) if by_value and thing is not dict else NotImplemented


def _importable(function: types.FunctionType) -> bool:
    with contextlib.suppress(Exception):
        return function.__module__ != "__main__" and bool(pickle.dumps(function))
    return False


def _sent_back(value: Any) -> Any:
    with returning():
        _tried(value)
    return value


def _tried(thing: Any) -> bytes:
    _Sending(io.BytesIO()).dump(thing)
    return b""


class _Thread(threading.Thread):
    """Does what is put into `work`, one thing after the other, until that is None."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Work."""
        while (given := self.work.get()) is not None:
            ended, work = given
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)
            del given, ended, work
