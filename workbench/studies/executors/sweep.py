"""`Sweep`: chunks to workers, messages to the study, and what happens when a worker is gone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.config import TrainConfig
from workbench.errors import ClusterError
from workbench.ray.cluster import WorkerLost
from workbench.record.write import TrialWriter
from workbench.studies.executors.crew import Crew, Worker
from workbench.studies.executors.inbox import Inbox
from workbench.studies.executors.messages import Ended
from workbench.studies.executors.parcels import pack_chunk
from workbench.studies.executors.shipping import Shipment, packed_configs
from workbench.studies.executors.worker import error_of
from workbench.train.interrupt import StopRequest, catch_interrupt

__all__ = ["RERUNS", "Sweep", "Task"]

RERUNS = 3  # rule of thumb: a chunk that loses more workers than this is the reason for it
STOP_SECONDS = 60.0  # rule of thumb: what finishing a step and saving it may take
TAKE_SECONDS = 1.0  # rule of thumb: a call that is not answered sooner is answered empty


@dataclass
class Task:
    """A chunk of trials on its way to being finished.

    Attributes:
        trials: configs and the places where they are written.
        lost: how many workers it has lost.
    """

    trials: list[tuple[TrainConfig, TrialWriter]]
    lost: int = 0

    @property
    def numbers(self) -> list[int]:
        """Numbers of the trials."""
        return [writer.number for _, writer in self.trials]


@dataclass
class _Running:
    worker: Worker
    task: Task


class Sweep:
    """Brings tasks to their end on a crew of workers; this process alone writes what they find.

    Args:
        crew: who trains.
        shipment: what.
        inbox: where it is written.
        stage: what the trials are for.
    """

    def __init__(self, crew: Crew, shipment: Shipment, inbox: Inbox, stage: str) -> None:
        self._crew, self._inbox, self._stage = crew, inbox, stage
        self._shipped = crew.cluster.share(shipment)
        self._queue: deque[Task] = deque()
        self._running: dict[Any, _Running] = {}
        self._error: Exception | None = None
        self._stop_by: float | None = None

    def run(self, tasks: Sequence[Task]) -> bool:
        """Train until all tasks are done; after an interrupt, until all that runs has stopped.

        Returns:
            Whether it was interrupted.

        Raises:
            ClusterError: a task has lost too many workers.
            Exception: what training raised, after everything else that ran was stopped and saved.
        """
        self._queue.extend(tasks)
        self._crew.begin()
        try:
            with catch_interrupt() as stop:
                while self._queue or self._running:
                    self._round(stop)
        finally:
            for running in self._running.values():  # an error or a second Ctrl-C: nobody listens to them any more
                self._crew.lose(running.worker)
            self._running.clear()
            self._inbox.flush()
        if self._error is not None:
            raise self._error
        return stop.requested

    def _round(self, stop: StopRequest) -> None:
        if stop.requested or self._error is not None:
            self._stop()
        self._crew.ask_for(len(self._queue))
        while self._queue and self._crew.idle:
            self._assign(self._queue.popleft(), self._crew.take())
        starting = self._crew.calls
        for call in self._crew.cluster.ready([*self._running, *starting], timeout_s=TAKE_SECONDS):
            if call in starting:
                self._crew.greet(call)
            else:
                self._listen(call, self._running.pop(call))
        self._crew.check()

    def _assign(self, task: Task, worker: Worker) -> None:
        self._inbox.flush()
        cluster = self._crew.cluster
        configs = packed_configs(cluster.pack, [config for config, _ in task.trials])
        chunk = pack_chunk(self._inbox.study, task.numbers, stage=self._stage, configs=configs)
        self._running[cluster.call(worker.handle, "start", self._shipped, chunk)] = _Running(worker, task)

    def _take(self, running: _Running) -> None:
        call = self._crew.cluster.call(running.worker.handle, "take", TAKE_SECONDS)
        self._running[call] = running

    def _listen(self, call: Any, running: _Running) -> None:
        """Write what a worker told, and ask it again until it has ended its chunk."""
        try:
            messages = self._crew.cluster.result(call)
        except WorkerLost as lost:
            self._lost(running, lost)
            return
        self._running[call] = running  # where writing fails, the worker is still ours to end
        ended = self._inbox.apply(messages or ())
        del self._running[call]
        if ended is None:
            self._take(running)
        else:
            self._crew.rest(running.worker)
            self._ended(ended, running)

    def _ended(self, ended: Ended, running: _Running) -> None:
        if ended.state == "failed" and self._error is None:
            self._error = error_of(ended, running.worker.place)
        elif ended.state == "stopped" and self._stop_by is None:  # asked by another than this process
            self._again(running.task, running.worker, "it was interrupted")

    def _lost(self, running: _Running, lost: WorkerLost) -> None:
        self._crew.lose(running.worker)
        if self._stop_by is None:
            self._again(running.task, running.worker, str(lost))

    def _again(self, task: Task, worker: Worker, why: str) -> None:
        """Run a task again from the newest checkpoints that have arrived, or give it up."""
        task.trials = [(config, writer) for config, writer in task.trials if not writer.finished]
        task.lost += 1
        if not task.trials:
            return
        for _, writer in task.trials:
            writer.event("worker_lost", ray_node=worker.node, pid=worker.pid, why=why)
        if task.lost > RERUNS:
            self._error = self._error or ClusterError(
                f"trials {', '.join(map(str, task.numbers))} lost their worker {task.lost} times (the last one, {worker.place}: "
                f"{why}). All that is finished is kept, and the same call goes on. A worker that is killed again and again is often out "
                "of memory: give the machines more, or fewer CPUs to Ray; executor='local' shows a crash of the code."
            )
            return
        self._queue.append(task)

    def _stop(self) -> None:
        """Ask all that run to stop, once; give up on those that do not in time."""
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_SECONDS
            for running in self._running.values():
                self._crew.cluster.call(running.worker.handle, "stop")
        self._queue.clear()
        if time.monotonic() > self._stop_by:
            for running in self._running.values():
                self._crew.lose(running.worker)
            self._running.clear()
