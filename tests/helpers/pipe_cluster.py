"""A stand-in for a Ray cluster: real processes over pipes, which can be killed, and start in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import cloudpickle

from workbench.ray.cluster import WorkerLost, node_of_this_worker

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["workbench.studies.executors.worker", "tests.helpers.workloads"])


class PipeCluster:
    """Has the methods of `RayCluster` that an executor calls; its machines have one CPU each, a worker is a process here.

    Attributes:
        room: how many machines it has.
        placed: how many workers were started.
    """

    def __init__(self, room: int = 2) -> None:
        self.room, self.placed = room, 0
        self.tasks: list[Task] = []

    def machines(self, resource: str) -> list[int]:
        return [1] * self.room if resource == "CPU" else []

    def submit(self, function: Callable[..., Any], *arguments: Any, cpus: int = 1, gpus: int = 0) -> Task:
        self.tasks.append(Task(function, arguments))
        self._start()
        return self.tasks[-1]

    def ready(self, calls: list[Task], timeout_s: float) -> list[Task]:
        self._start()
        connection.wait([call.pipe for call in calls if call.process is not None], timeout_s)
        return [call for call in calls if call.process is not None and call.pipe.poll()]

    def result(self, call: Task) -> Any:
        try:
            return call.pipe.recv()
        except (EOFError, OSError):
            raise WorkerLost("the process is gone") from None
        finally:
            call.end()

    def cancel(self, call: Task) -> None:
        call.end()

    def pack(self, value: Any) -> bytes:
        blob: bytes = cloudpickle.dumps(value)
        return blob

    def share(self, value: Any) -> Any:
        return value

    def begin(self, kind: type) -> PipeCalls:
        self.listener = connection.Listener()
        threading.Thread(target=self._serve, args=(kind(),), daemon=True).start()
        return PipeCalls(self.listener.address)

    def kill(self, worker: PipeCalls) -> None:
        with connection.Client(worker.address) as pipe:  # closing alone wakes nobody who waits for a call
            pipe.send(None)
        self.listener.close()

    def close(self) -> None:
        for task in self.tasks:
            task.end()

    def alive(self) -> bool:
        """Whether a worker is left."""
        return any(task.process is not None and task.process.is_alive() for task in self.tasks)

    def _start(self) -> None:
        busy = sum(task.process is not None and not task.ended for task in self.tasks)
        for task in [t for t in self.tasks if t.process is None and not t.ended][: max(0, self.room - busy)]:
            task.start()
            self.placed += 1

    def _serve(self, held: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self.listener.accept() as pipe, contextlib.suppress(EOFError):
                    asked = pipe.recv()
                    if asked is None:
                        return
                    method, arguments = asked
                    pipe.send(getattr(held, method)(*arguments))


class PipeCalls:
    """Calls an object in the process of the cluster."""

    def __init__(self, address: Any) -> None:
        self.address, self.worker = address, self

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments: self._ask(method, arguments)

    def _ask(self, method: str, arguments: Any) -> Any:
        with connection.Client(self.address) as pipe:
            pipe.send((method, arguments))
            return pipe.recv()


class Task:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.given, self.process, self.ended = (function, arguments), None, False
        self.pipe, self.theirs = _context.Pipe(duplex=False)

    def start(self) -> None:
        self.process: Any = _context.Process(target=_run, args=(self.theirs, *self.given), daemon=True)
        self.process.start()
        self.theirs.close()

    def end(self) -> None:
        self.ended = True
        if self.process is not None:
            self.process.kill()
            self.process.join()


def node() -> str:
    return f"machine-of-{os.getpid()}"


def _run(pipe: connection.Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*[node if argument is node_of_this_worker else argument for argument in arguments]))
