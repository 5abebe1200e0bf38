"""`Dispatcher`: one thread a worker that takes closures from the queue, and what happens when a task is gone (T10, behaviours 47 to 64)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench.errors import UsageError
from workbench.parameter_server.coordinator.closure_queue import ClosureQueue
from workbench.parameter_server.data.datasets import refuse_captured
from workbench.parameter_server.engines.threads import Ended, ThreadEngine
from workbench.parameter_server.errors import CancelledError, ClosureInputError, NotHeldError, UnavailableError
from workbench.parameter_server.workers.closure import Closure, map_structure
from workbench.parameter_server.workers.worker import Call, PerWorkerValues, PerWorkerVariable

if TYPE_CHECKING:
    from workbench.parameter_server.engines.ray_engine import RayEngine


class WatchDog(threading.Thread):
    """A thread that looks whether closures still finish, from its making to `stop`.

    After `timeout_s` without progress it logs the stacks of all threads as a warning, calls `on_stall`, and begins to wait anew.

    Args:
        timeout_s: without a closure finished, in seconds.
        on_stall: called in the thread of the watch; what it raises is logged.
        busy: returns whether there is anything to finish; while there is not, no time passes.
    """

    def __init__(
        self, timeout_s: float, on_stall: Callable[[], object] | None = None, *, busy: Callable[[], bool]
    ) -> None:
        if isinstance(timeout_s, bool) or not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"timeout_s={timeout_s!r} of the watchdog must be a number of seconds above 0. Leave the watchdog out to "
                "have none."
            )
        super().__init__(name="workbench-watchdog", daemon=True)
        self._timeout_s, self._on_stall, self._busy = timeout_s, on_stall, busy
        self._progress_at = time.monotonic()
        self._end = threading.Event()
        self.start()

    def report_progress(self) -> None:
        """Say that a closure finished."""
        self._progress_at = time.monotonic()

    def stop(self) -> None:
        """End the watch, however often this is called."""
        self._end.set()
        if self is not threading.current_thread():
            self.join(timeout=5.0)

    def run(self) -> None:
        """Look, sleep for what is left of the time, and look again."""
        log = logging.getLogger(__name__)
        while not self._end.wait(max(0.0, self._progress_at + self._timeout_s - time.monotonic())):
            if time.monotonic() < self._progress_at + self._timeout_s:
                continue
            self.report_progress()
            if not self._busy():
                continue
            try:
                log.warning("No closure finished for %g s. Where all threads stand:\n%s", self._timeout_s, _stacks())
                if self._on_stall is not None:
                    self._on_stall()
            except Exception:
                log.exception("what the watchdog does about a stall failed; it goes on watching")


def _stacks() -> str:
    """Return where each thread of this process stands, by its name, the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, 'unknown')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )


class CoordinatorMetrics:
    """Counts that threads add to, and one report of them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._busy_s: Counter[int] = Counter()
        self._closures: Counter[int] = Counter()
        self._recovery_s: list[float] = []

    def count(self, name: str) -> None:
        """Add one."""
        with self._lock:
            self._counts[name] += 1

    def ended(self, worker: int, seconds: float, *, failed: bool = False) -> None:
        """Note a closure that ended on a worker."""
        with self._lock:
            self._counts["closures_failed" if failed else "closures_executed"] += 1
            self._closures[worker] += 1
            self._busy_s[worker] += seconds  # type: ignore[assignment]

    def recovered(self, seconds: float) -> None:
        """Note a worker that is back."""
        with self._lock:
            self._recovery_s.append(seconds)

    def report(self) -> dict[str, Any]:
        """Return closures_executed, closures_failed, remote_value_fetch, worker_failures, and by worker closures and busy_s."""
        names = ("closures_executed", "closures_failed", "remote_value_fetch", "worker_failures")
        with self._lock:
            return {name: self._counts[name] for name in names} | {
                "closures": dict(self._closures), "busy_s": dict(self._busy_s), "recovery_s": list(self._recovery_s),
            }  # fmt: skip


START_DELAY_ENV = "WORKBENCH_PS_START_DELAY_S"
"""Worker k takes its first closure after k times as many seconds, so that not all begin at once (behaviour 24)."""
START_DELAY_MAX_ENV = "WORKBENCH_PS_START_DELAY_MAX_S"

TRANSIENT_FAILURES = 3  # of a server that is healthy when it is asked, before it counts as gone (behaviour 57)
RECOVERY_S = 1.0  # how long a thread waits for its worker before it looks at the servers again
HEALTH_S = 0.5  # how often the servers are looked at, which bounds how late their death is told (T10.2)
_LOOPS, _RESOURCES = itertools.count(), itertools.count()  # of all coordinators here: they may have the same workers


@dataclass(eq=False)
class _OwnWork(Closure):
    """What the dispatcher asks of one worker itself."""


class Dispatcher:
    """Owns the queue, the resources and the threads; holds nothing that would keep the coordinator alive (behaviour 28)."""

    def __init__(
        self,
        engine: ThreadEngine | RayEngine,
        *,
        max_waiting: int,
        watchdog_s: float | None = None,
        on_stall: Callable[[], object] | None = None,
    ) -> None:
        delays = _start_delays(engine.num_workers)
        self.engine = engine
        self.queue = ClosureQueue(max_waiting)
        self.resources: dict[int, Callable[[], Any]] = {}  # in the order in which they were made
        self.metrics = CoordinatorMetrics()
        self._loop = next(_LOOPS)
        self._stopped = threading.Event()
        queue = self.queue
        busy = lambda: bool(queue.in_flight or queue.waiting)  # noqa: E731 - not a method: the watch must not hold this
        self._watchdog = None if watchdog_s is None else WatchDog(watchdog_s, on_stall, busy=busy)
        self._transient: dict[int, int] = {}
        self._servers = {k: engine.incarnation("ps", k) for k in range(engine.num_servers)}
        self._told: set[tuple[int, int]] = set()
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
            self.queue.put(_OwnWork(self._build, [worker, resource]), tag=worker)
        return resource

    def on_every_worker(self, call: Call) -> list[Any]:
        """Run a call once on each worker and return the results by the workers' indices."""
        call = replace(call, loop=self._loop)
        closures = [_OwnWork(self._execute, [worker, call]) for worker in range(self.engine.num_workers)]
        for worker, closure in enumerate(closures):
            self.queue.put(closure, tag=worker)
        return [closure.output.fetch() for closure in closures]

    def forget(self, resource: int) -> None:
        """Let the workers forget a resource that nobody holds any more."""
        self.resources.pop(resource, None)
        if not self._stopped.is_set():
            for worker in range(self.engine.num_workers):
                with contextlib.suppress(UnavailableError):
                    self.engine.drop(worker, [resource])

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
            if isinstance(closure, _OwnWork):
                self._run_own(worker, closure)
            else:
                count = self.engine.at_once(worker)  # as long as enough stay for the other workers
                more = self.queue.more(count - 1, count * self.engine.num_workers) if count > 1 else []
                self._run(worker, [closure, *more])
                del more
            del closure

    def _run_own(self, worker: int, closure: Closure) -> None:
        """Run what the dispatcher asked of one worker itself; it is asked again when the worker is back."""
        while not self._stopped.is_set():
            try:
                closure.output.set_value(closure.function(*closure.args))
            except UnavailableError as error:
                if error.job == "worker" and self._recover(worker):
                    continue
                closure.output.set_error(error)
            except NotHeldError as error:
                if error.resource in self.resources and self._recover(worker):
                    continue
                closure.output.set_error(error)
            except Exception as error:
                closure.output.set_error(error)
            return
        closure.mark_cancelled()

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
        if closures[0].cancel.is_set():
            return [(None, CancelledError())]
        try:
            return self.engine.execute(worker, [self._call(closure) for closure in closures], closures[0].cancel)
        except ClosureInputError as error:
            return self._outcomes(worker, closures[:1]) if len(closures) > 1 else [(None, error)]
        except BaseException as error:
            return [(None, error)]

    def _call(self, closure: Closure) -> Call:
        refuse_captured(closure.function)
        args = map_structure(referred, list(closure.args))
        kwargs = map_structure(referred, dict(closure.kwargs))
        return Call(closure.function, args, kwargs, closure.number, self._loop)

    def _task_gone(self, worker: int, closure: Closure, error: UnavailableError) -> None:
        if error.job == "worker":
            self.queue.put_back(closure)
            self._recover(worker)
            return
        gone = self.engine.check("ps", error.index)
        same = self.engine.incarnation("ps", error.index) == self._servers[error.index]
        self._transient[error.index] = self._transient.get(error.index, 0) + 1
        if gone is None and same and self._transient[error.index] <= TRANSIENT_FAILURES:
            self.queue.put_back(closure)
            return
        self._told.add((error.index, self.engine.incarnation("ps", error.index)))
        self.queue.mark_failed(closure, error)

    def _recover(self, worker: int) -> bool:
        """Wait for a worker to come back and let it make its resources again; False if everything ended before."""
        begun = time.perf_counter()
        self.metrics.count("worker_failures")
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
            self.metrics.recovered(time.perf_counter() - begun)
            return True
        return False

    def _watch_servers(self) -> None:
        """Tell of a server's death, once for each of its lives, also where no closure asks it anything (behaviours 61 to 63)."""
        while not self._stopped.wait(HEALTH_S):
            self._look_at_servers()

    def _look_at_servers(self) -> None:
        for index, first in self._servers.items():
            gone = self.engine.check("ps", index)
            life = self.engine.incarnation("ps", index)
            if gone is None and life != first:
                gone = UnavailableError("ps", index, "it was started anew, empty")
            if gone is not None and (index, life) not in self._told:
                self._told.add((index, life))
                self.queue.fail(gone)

    def _build(self, worker: int, resource: int) -> None:
        make = self.resources.get(resource)
        if make is not None:
            self.engine.build(worker, resource, make)

    def _execute(self, worker: int, call: Call) -> Any:
        ((value, error),) = self.engine.execute(worker, [call], threading.Event())
        if error is not None:
            raise error
        return value


def referred(value: Any) -> Any:
    """Return what stands for a container of per-worker values in a call; anything else is itself."""
    return value.ref if isinstance(value, (PerWorkerValues, PerWorkerVariable)) else value


def _start_delays(workers: int) -> list[float]:
    delay, most = (_env_seconds(name) for name in (START_DELAY_ENV, START_DELAY_MAX_ENV))
    return [min(worker * (delay or 0.0), math.inf if most is None else most) for worker in range(workers)]


def _env_seconds(name: str) -> float | None:
    given = os.environ.get(name)
    try:
        found = None if given is None else float(given)
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found < math.inf:
        raise UsageError(
            f"{name}={given!r} must be a number of seconds of at least 0. Unset it, or set it to such as 0.5."
        )
    return found
