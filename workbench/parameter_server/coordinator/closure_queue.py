"""`ClosureQueue`: closures that wait for a worker, those that run, and the one error that stops them all (behaviours 1 to 14); `WatchDog` and `CoordinatorMetrics`: whether they still end, and what happened so far (behaviours 26, 27)."""

import logging
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from workbench.checks import check_integer, check_number
from workbench.errors import UsageError
from workbench.parameter_server.context import Alive
from workbench.parameter_server.workers.closure import Closure

PAUSE_S = 5.0
"""Without anything to do for longer is a pause of the loop, not its own slowness (rule of thumb: evaluating and saving are shorter)."""


class LoopClock:
    """Told whenever there may be something to do for the workers, or nothing any more; the caller sees that it is told by one thread at a time.

    Time between two functions counts when it is shorter than `PAUSE_S`: a loop that fetches one result after the other, or computes
    between them, keeps its workers waiting.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None  # the newest change
        self._busy = False
        self._seconds = 0.0

    def tell(self, busy: bool) -> None:
        """Note whether any function waits or runs."""
        if busy == self._busy:
            return
        now = self._now()
        if self._since is not None and (self._busy or now - self._since < PAUSE_S):
            self._seconds += now - self._since
        self._since, self._busy = now, busy

    def seconds(self) -> float:
        """Return the time so far, up to the end of the newest function where none runs."""
        return self._seconds + (self._now() - self._since if self._busy and self._since is not None else 0.0)


MAX_WAITING = 256 * 1024  # closures that wait before `put` blocks (rule of thumb: some hundred MB of arguments at most)


class ClosureQueue:
    """Closures in the order in which they were put, shared by one thread a worker and whoever schedules.

    Every closure that is put ends exactly once: finished, failed or cancelled. After a failure whoever calls `put`, `wait` or
    `done` next waits until nothing runs any more, gets the first error, and finds an empty queue that works again (T12).

    Closures with a tag are for one worker alone. They come before all others, and `wait` and `done` take no notice of them.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = check_integer("max_waiting", max_waiting)
        self._waiting: deque[Closure] = deque()
        self._tagged: defaultdict[int | None, deque[Closure]] = defaultdict(deque)  # nothing for None
        self.in_flight = 0  # how many closures run
        self.alive = Alive(0, -1, ())  # which began and have not ended: servers forget what others wrote
        self._error: BaseException | None = None
        self._cancel = threading.Event()
        self._stopped = False
        self._clock, self._waits = LoopClock(), 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for the end, or for room
        self._work = threading.Condition(self._lock)  # for workers, of which one closure wakes one
        self._callers = threading.Lock()  # while somebody waits for the end, nothing new comes in (behaviour 13)

    @property
    def waiting(self) -> int:
        """How many closures wait for any worker."""
        return len(self._waiting)

    @property
    def worked(self) -> tuple[float, int]:
        """How many seconds there was something to do, see `LoopClock`, and how often somebody waited for the end of it all."""
        with self._lock:
            return self._clock.seconds(), self._waits

    def put(self, closure: Closure, tag: int | None = None) -> None:
        """Append a closure, for the worker `tag` alone or for any; blocks while the queue is full.

        Raises:
            Exception: the first error of a closure that failed before; this one is cancelled then.
        """
        closure.tag = tag
        if tag is not None:
            with self._changed:
                self._refuse_if_stopped(closure)
                self._tagged[tag].append(closure)
                self._work.notify_all()
            return
        with self._callers, self._changed:
            self._changed.wait_for(
                lambda: len(self._waiting) < self.max_waiting or self._error is not None or self._stopped
            )
            self._refuse_if_stopped(closure)
            try:
                self._raise_if_error()
            except BaseException:
                closure.mark_cancelled()
                raise
            closure.cancel = self._cancel
            self._waiting.append(closure)
            self._clock.tell(True)
            self._work.notify()

    def get(self, timeout_s: float | None = None, tag: int | None = None) -> Closure | None:
        """Take the next closure: with this tag, else without one. None after `timeout_s`, or when the queue was stopped."""
        with self._work:
            mine = self._tagged[tag]
            self._work.wait_for(lambda: self._stopped or mine or (self._waiting and self._error is None), timeout_s)
            if mine and not self._stopped:
                return self._begun(mine.popleft())
            if self._stopped or not self._waiting or self._error is not None:
                return None
            self.in_flight += 1
            return self._next()

    def more(self, count: int, workers: int) -> list[Closure]:
        """Take up to so many closures that anybody may run, at once: half of an even share of what waits, and nothing that lost a worker."""
        with self._changed:
            if self._stopped or self._error is not None or any(self._tagged.values()):
                return []
            taken: list[Closure] = []
            count = min(count, len(self._waiting) // (2 * workers))
            while len(taken) < count and not self._waiting[0].lost:
                taken.append(self._next())
            self.in_flight += len(taken)
            return taken

    def put_back(self, closure: Closure) -> None:
        """Return a closure that ran without an end, because its worker died: it runs first, or is cancelled after an error."""
        with self._changed:
            if self._stopped or (self._error is not None and closure.tag is None):
                closure.mark_cancelled()
                self._ended(closure)
            else:
                (self._waiting if closure.tag is None else self._tagged[closure.tag]).appendleft(closure)
                self._work.notify()
            self._left_flight(closure)

    def mark_finished(self, closure: Closure) -> None:
        """Count a closure that came to its end."""
        with self._changed:
            self._ended(closure)
            self._left_flight(closure)

    def mark_failed(self, closure: Closure, error: BaseException) -> None:
        """Record that a running closure raised: of those without a tag the first error is reported, and everything else stops."""
        with self._changed:
            closure.output.set_error(error)
            if closure.tag is None:
                self._record(error)
            self._ended(closure)
            self._left_flight(closure)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or runs; False if that took longer than `timeout_s`.

        Raises:
            Exception: the first error of a closure that failed, once nothing runs any more.
        """
        with self._callers, self._changed:
            over = self._changed.wait_for(
                lambda: self._error is not None or self._stopped or not (self._waiting or self.in_flight), timeout_s
            )
            self._raise_if_error()
            self._waits += bool(over)
            return bool(over)

    def done(self) -> bool:
        """Return whether nothing waits or runs; raises as `wait` does."""
        with self._changed:
            self._raise_if_error()
            return not (self._waiting or self.in_flight)

    def fail(self, error: BaseException) -> None:
        """Record an error that belongs to no closure, such as a server that is gone."""
        with self._changed:
            self._record(error)
            self._changed.notify_all()

    def stop(self) -> None:
        """Cancel what waits and let every `get` return None from now on."""
        with self._changed:
            self._stopped = True
            self._cancel.set()
            self._drop_waiting()
            for closures in self._tagged.values():
                for closure in closures:
                    closure.mark_cancelled()
            self._tagged.clear()
            self._changed.notify_all()
            self._work.notify_all()

    def _record(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._cancel.set()

    def _next(self) -> Closure:
        if len(self._waiting) == self.max_waiting:
            self._changed.notify_all()  # there is room again
        return self._begun(self._waiting.popleft())

    def _begun(self, closure: Closure) -> Closure:
        if closure.run is None:
            stamp, newest, closures = self.alive
            closure.run = newest + 1
            self.alive = Alive(stamp + 1, newest + 1, (*closures, newest + 1))
        return closure

    def _ended(self, closure: Closure) -> None:
        stamp, newest, closures = self.alive
        self.alive = Alive(stamp + 1, newest, tuple(each for each in closures if each != closure.run))

    def _left_flight(self, closure: Closure) -> None:
        if closure.tag is not None:
            return
        self.in_flight -= 1
        self._tell_clock()
        if not self.in_flight or self._error is not None:
            self._changed.notify_all()

    def _raise_if_error(self) -> None:
        """Cancel what waits, wait for what runs, then raise the error and forget it; the lock is held."""
        if self._error is None:
            return
        self._drop_waiting()
        self._changed.wait_for(lambda: self.in_flight == 0)
        error = self._take_error()
        if error is None:  # another caller raised it meanwhile
            return
        self._cancel = threading.Event()
        self._changed.notify_all()
        raise error

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    def _drop_waiting(self) -> None:
        for closure in self._waiting:
            closure.mark_cancelled()
            self._ended(closure)
        self._waiting.clear()
        self._tell_clock()

    def _tell_clock(self) -> None:
        self._clock.tell(bool(self._waiting or self.in_flight))

    def _refuse_if_stopped(self, closure: Closure) -> None:
        if self._stopped:
            closure.mark_cancelled()
            raise UsageError("The coordinator was shut down: nothing can be scheduled any more. Make a new one.")


class WatchDog(threading.Thread):
    """A thread that looks whether closures still finish, from its making to `stop`.

    After `timeout_s` without progress while `busy()` it logs the stacks of all threads, calls `on_stall`, and begins to wait anew.
    """

    def __init__(
        self, timeout_s: float, on_stall: Callable[[], object] | None = None, *, busy: Callable[[], bool]
    ) -> None:
        check_number("watchdog_s", timeout_s, below=threading.TIMEOUT_MAX)
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
        self._counts = Counter(closures_executed=0, closures_failed=0, remote_value_fetch=0, worker_failures=0)
        self._busy_s: Counter[int] = Counter()
        self._closures: Counter[int] = Counter()
        self.recovery_s: list[float] = []  # until a worker was back, each time

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

    def report(self) -> dict[str, Any]:
        """Return closures_executed, closures_failed, remote_value_fetch, worker_failures, and by worker closures and busy_s."""
        with self._lock:
            return dict(self._counts) | {
                "closures": dict(self._closures), "busy_s": dict(self._busy_s), "recovery_s": list(self.recovery_s),
            }  # fmt: skip
