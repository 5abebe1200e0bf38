"""A stand-in for a Ray cluster: real processes over pipes, which can be killed, and start in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from collections import deque
from multiprocessing import connection
from typing import Any

import cloudpickle

from workbench.ray.cluster import WorkerLost

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["workbench.studies.executors.worker", "tests.helpers.workloads"])


class _Process:
    def __init__(self, kind: type) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(kind, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.asked: deque[_Call] = deque()


class _Call:
    def __init__(self, worker: _Process) -> None:
        self.worker = worker
        self.answer: tuple[bool, Any] | None = None


class PipeCluster:
    """Has the methods of `RayCluster`; its machines have one CPU each, and a worker is a process on this one.

    Attributes:
        room: how many machines it has.
        placed: how many were started.
    """

    def __init__(self, room: int = 2) -> None:
        self.room, self.placed = room, 0
        self.workers: list[_Process] = []
        self.closed = False

    def total(self, resource: str) -> int:
        return self.room if resource == "CPU" else 0

    def free(self, resource: str) -> dict[str, int]:
        alive = sum(worker.process.is_alive() for worker in self.workers)
        return {f"machine-{n}": 1 for n in range(self.total(resource) - alive)}

    def place(self, kind: type, *arguments: Any, node: str | None = None, cpus: int = 1, gpus: int = 0) -> _Process:
        worker = _Process(kind)
        self.placed += 1
        self.workers.append(worker)
        return worker

    def call(self, worker: _Process, method: str, *arguments: Any) -> _Call:
        call = _Call(worker)
        worker.asked.append(call)
        with contextlib.suppress(OSError):  # it is gone, as the answer will say
            worker.pipe.send_bytes(pickle.dumps((method, arguments)))
        return call

    def ready(self, calls: list[_Call], timeout_s: float) -> list[_Call]:
        waiting = {call.worker.pipe for call in calls if call.answer is None}
        if len(waiting) == len({call.worker.pipe for call in calls}):
            connection.wait(list(waiting), timeout_s)
        for worker in {call.worker for call in calls}:
            while worker.asked and worker.pipe.poll():
                try:
                    answer: tuple[bool, Any] = (True, worker.pipe.recv())
                except (EOFError, OSError):
                    for call in worker.asked:
                        call.answer = (False, "the process is gone")
                    worker.asked.clear()
                    break
                worker.asked.popleft().answer = answer
        return [call for call in calls if call.answer is not None]

    def result(self, call: _Call) -> Any:
        while call.answer is None:
            self.ready([call], 1.0)
        done, value = call.answer
        if not done:
            raise WorkerLost(value)
        return value

    def pack(self, value: Any) -> bytes:
        blob: bytes = cloudpickle.dumps(value)
        return blob

    def share(self, value: Any) -> Any:
        return value

    def kill(self, worker: _Process) -> None:
        worker.process.kill()
        worker.process.join()

    def close(self) -> None:
        for worker in self.workers:
            self.kill(worker)
            worker.pipe.close()
        self.closed = True


def node() -> str:
    return f"machine-of-{os.getpid()}"


def _serve(kind: type, pipe: connection.Connection) -> None:
    worker = kind(node)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, arguments = pickle.loads(pipe.recv_bytes())
            pipe.send(getattr(worker, method)(*arguments))
