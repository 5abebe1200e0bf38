"""`Dispatcher`: one thread a worker that takes closures from the queue, and what happens when a task is gone (T10, behaviours 47 to 64)."""

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.parameter_server.context import Run
from workbench.parameter_server.coordinator.closure_queue import ClosureQueue, CoordinatorMetrics, WatchDog
from workbench.parameter_server.data.datasets import refuse_captured
from workbench.parameter_server.engines.ray_engine import RayEngine
from workbench.parameter_server.engines.threads import Ended, ThreadEngine
from workbench.parameter_server.errors import (
    CancelledError,
    ClosureInputError,
    GivenUpError,
    NotHeldError,
    UnavailableError,
    refuse,
)
from workbench.parameter_server.workers.closure import Closure, map_structure
from workbench.parameter_server.workers.worker import Call, PerWorkerValues

START_DELAY_ENV = "WORKBENCH_PS_START_DELAY_S"
"""Worker k takes its first closure after k times as many seconds, so that not all begin at once (behaviour 24)."""
START_DELAY_MAX_ENV = "WORKBENCH_PS_START_DELAY_MAX_S"

MAX_ATTEMPTS = 4  # workers that a closure may cost before it is given up (as Spark's spark.task.maxFailures)
BACK_S = 300.0  # that a server which died may take to come back (rule of thumb: as tasks may at the start)
TRANSIENT_FAILURES = 3  # of a server that is healthy when it is asked, before it counts as gone (behaviour 57)
TRANSIENT_S = 600.0  # within so long; what was longer ago is forgotten (rule of thumb)
RECOVERY_S = 1.0  # how long a thread waits for its worker before it looks at the servers again
HEALTH_S = 0.5  # how often the servers are looked at, which bounds how late their death is told (T10.2)
_LOOPS, _RESOURCES = itertools.count(), itertools.count()  # of all coordinators here: they may have the same workers


@dataclass(eq=False)
class _Build(Closure):
    """Lets a worker make a resource; its function runs here, in the thread of that worker."""


class Dispatcher:
    """Owns the queue, the resources and the threads; holds nothing that would keep the coordinator alive (behaviour 28)."""

    def __init__(
        self,
        engine: ThreadEngine | RayEngine,
        *,
        max_waiting: int,
        max_attempts: int = MAX_ATTEMPTS,
        watchdog_s: float | None = None,
        on_stall: Callable[[], object] | None = None,
        sweep: Callable[[], object] = lambda: None,
    ) -> None:
        delays = _start_delays(engine.num_workers)
        self.engine = engine
        self.queue = ClosureQueue(max_waiting)
        self.resources: dict[int, Callable[[], Any]] = {}  # in the order in which they were made
        self.metrics = CoordinatorMetrics()
        self._max_attempts = check_integer("max_attempts", max_attempts)
        self._loop = next(_LOOPS)
        self._stopped, self._sweep = threading.Event(), sweep
        queue = self.queue
        busy = lambda: bool(queue.in_flight or queue.waiting)  # noqa: E731 - not a method: the watch must not hold this
        self._watchdog = None if watchdog_s is None else WatchDog(watchdog_s, on_stall, busy=busy)
        self._transient: dict[int, list[float]] = {}
        self._servers = {k: engine.incarnation("ps", k) for k in range(engine.num_servers)}
        self._told: set[tuple[int, int]] = set()
        self._looking = threading.Lock()  # at the servers
        threads = [threading.Thread(target=self._serve, args=(k, delays[k]), name=f"worker {k} of the coordinator", daemon=True)
                   for k in range(engine.num_workers)]  # fmt: skip
        threads.append(threading.Thread(target=self._watch_servers, name="health of the servers", daemon=True))
        self.threads = threads
        for thread in threads:
            thread.start()

    def build_everywhere(self, make: Callable[[], Any]) -> int:
        """Let every worker make a resource, before any closure that is scheduled from now on; returns its id."""
        resource = next(_RESOURCES)
        self.resources[resource] = make
        for worker in range(self.engine.num_workers):
            self.queue.put(_Build(self._build, [worker, resource]), tag=worker)
        return resource

    def on_every_worker(self, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Run a function once on each worker and return the results by the workers' indices."""
        closures = [Closure(function, args) for _ in range(self.engine.num_workers)]
        for worker, closure in enumerate(closures):
            self.queue.put(closure, tag=worker)
        return [closure.output.fetch() for closure in closures]

    def forget(self, resource: int) -> None:
        """Let the workers forget a resource that nobody holds any more."""
        self.resources.pop(resource, None)
        if not self._stopped.is_set():
            for worker in range(self.engine.num_workers):
                self.engine.drop(worker, resource)

    def report(self) -> dict[str, Any]:
        """Return the metrics, with what waits and runs now, and how long the loop has worked."""
        worked_s, joins = self.queue.worked
        return self.metrics.report() | {
            "queued": self.queue.waiting, "in_flight": self.queue.in_flight, "worked_s": worked_s, "joins": joins,
        }  # fmt: skip

    def stop(self) -> None:
        """End the threads; what waits is cancelled."""
        self._stopped.set()
        self.queue.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
        here = threading.current_thread()
        for thread in self.threads:
            if thread is not here:
                thread.join(timeout=5.0)

    def _serve(self, worker: int, delay_s: float) -> None:
        if self._stopped.wait(delay_s):
            return
        while (closure := self.queue.get(tag=worker)) is not None:
            # as long as enough stay for the other workers; what a worker died of runs alone
            count = 1 if closure.lost or closure.tag is not None else self.engine.at_once(worker)
            more = self.queue.more(count - 1, self.engine.num_workers) if count > 1 else []
            self._run(worker, [closure, *more])
            del closure, more

    def _run(self, worker: int, closures: list[Closure]) -> None:
        """Run closures; those that the worker did not come to go back."""
        begun = time.perf_counter()
        outcomes = self._outcomes(worker, closures)
        for closure in reversed(closures[len(outcomes) :]):
            self.queue.put_back(closure)
        seconds = (time.perf_counter() - begun) / len(outcomes)
        for closure, (value, error) in zip(closures, outcomes, strict=False):
            if isinstance(error, UnavailableError):
                self._task_gone(worker, closure, error)
            elif isinstance(error, NotHeldError) and error.resource in self.resources:
                self.queue.put_back(closure)  # started anew while nobody asked it anything
                self._recover(worker)
            else:
                if closure.tag is None:
                    self.metrics.ended(worker, seconds, failed=error is not None)
                if self._watchdog is not None:
                    self._watchdog.report_progress()
                if error is None:
                    closure.output.set_value(value)
                    self.queue.mark_finished(closure)
                else:
                    self.queue.mark_failed(closure, error)

    def _outcomes(self, worker: int, closures: list[Closure]) -> list[Ended]:
        """Return result or error of those that came to an end, the first at least."""
        first = closures[0]
        if first.cancel.is_set():
            return [(None, CancelledError())]
        try:
            if isinstance(first, _Build):
                return [(first.function(*first.args), None)]
            return self.engine.execute(worker, [self._call(closure) for closure in closures], first.cancel)
        except ClosureInputError as error:
            return self._outcomes(worker, closures[:1]) if len(closures) > 1 else [(None, error)]
        except BaseException as error:
            return [(None, error)]

    def _call(self, closure: Closure) -> Call:
        refuse_captured(closure.function)
        args = map_structure(_referred, list(closure.args))
        kwargs = map_structure(_referred, dict(closure.kwargs))
        assert closure.run is not None
        run = Run(self._loop, closure.run, self.queue.alive)
        return Call(closure.function, args, kwargs, run, scheduled=closure.tag is None)

    def _task_gone(self, worker: int, closure: Closure, error: UnavailableError) -> None:
        if error.job == "worker":
            closure.lost.append(worker)
            if len(closure.lost) < self._max_attempts:
                self.queue.put_back(closure)
            else:
                self.queue.mark_failed(closure, GivenUpError(closure.name, closure.lost))
            self._recover(worker)
            return
        gone = self.engine.check("ps", error.index)
        same = self.engine.incarnation("ps", error.index) == self._servers[error.index]
        now = time.monotonic()
        recent = [*(at for at in self._transient.get(error.index, []) if now - at < TRANSIENT_S), now]
        self._transient[error.index] = recent
        if gone is None and same and len(recent) <= TRANSIENT_FAILURES:
            self.queue.put_back(closure)
            return
        if closure.tag is None:  # else whoever schedules does not hear of it
            self._told.add((error.index, self.engine.incarnation("ps", error.index)))
        self.queue.mark_failed(closure, error)

    def _recover(self, worker: int) -> None:
        """Wait for a worker to come back and let it make its resources again."""
        begun = time.perf_counter()
        self.metrics.count("worker_failures")
        lost: Counter[int] = Counter()
        resource = -1
        while not self._stopped.is_set():
            if not self.engine.wait_for_worker(worker, RECOVERY_S):
                continue
            try:
                for resource in list(self.resources):
                    self._build(worker, resource)
            except UnavailableError as error:
                if error.job == "ps":
                    self.queue.fail(error)
                    continue
                lost[resource] += 1
                if lost[resource] >= self._max_attempts and (make := self.resources.get(resource)) is not None:
                    given_up = GivenUpError(getattr(make, "__qualname__", repr(make)), [worker] * lost[resource])
                    self.resources[resource] = partial(refuse, given_up)  # whoever needs it is told
                continue
            self.metrics.recovery_s.append(time.perf_counter() - begun)
            return

    def _watch_servers(self) -> None:
        """Tell of a server's death, once for each of its lives, also where no closure asks it anything (behaviours 61 to 63)."""
        while not self._stopped.wait(HEALTH_S):
            self._look_at_servers()
            with contextlib.suppress(Exception):  # what could not be freed costs memory; deaths are still to be told
                self._sweep()

    def _look_at_servers(self) -> None:
        with self._looking:
            for index, first in self._servers.items():
                gone = self.engine.check("ps", index)
                life = self.engine.incarnation("ps", index)
                if gone is None and life != first:
                    gone = UnavailableError("ps", index, "it was started anew, empty")
                if gone is not None and (index, life) not in self._told:
                    self._told.add((index, life))
                    self.queue.fail(gone)

    def meet_servers(self, make: Callable[[], object], wait_s: float) -> None:
        """Wait until every server is there and holds what `make` makes; their deaths until then are told no more."""
        until, told = time.monotonic() + wait_s, ""
        with self._looking:
            while True:
                with contextlib.suppress(UnavailableError):
                    self.queue.wait()
                try:
                    for index in self._servers:
                        if (gone := self.engine.check("ps", index)) is not None:
                            raise gone
                        self.engine.plane.ask(index, "load_report")  # one that says nothing may be cut off
                        self._servers[index] = self.engine.incarnation("ps", index)
                    make()
                    break
                except UnavailableError as error:
                    if time.monotonic() > until:
                        raise
                    if str(error) != told:
                        logging.getLogger(__name__).warning(
                            "%s\nWaiting up to %g s for it to come back.", error, wait_s
                        )
                    told = str(error)
                    time.sleep(HEALTH_S)
            self._transient.clear()

    def _build(self, worker: int, resource: int) -> None:
        make = self.resources.get(resource)
        if make is not None:
            self.engine.build(worker, resource, make)


def _referred(value: Any) -> Any:
    """Return what stands for a container of per-worker values in a call; anything else is itself."""
    return value.ref if isinstance(value, PerWorkerValues) else value


def _start_delays(workers: int) -> list[float]:
    seconds = []
    for name, without in ((START_DELAY_ENV, 0.0), (START_DELAY_MAX_ENV, math.inf)):
        given = os.environ.get(name)
        try:
            seconds.append(without if given is None else float(given))
        except ValueError:
            seconds.append(-1.0)
        if given is not None and not 0 <= seconds[-1] < math.inf:
            raise UsageError(
                f"{name}={given!r} must be a number of seconds of at least 0. Unset it, or set it to such as 0.5."
            )
    return [min(worker * seconds[0], seconds[1]) for worker in range(workers)]
