"""The queue: nothing lost, nothing twice, one error that stops all, and a queue that works again (behaviours 1 to 14)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from workbench.errors import UsageError
from workbench.parameter_server.coordinator.closure_queue import ClosureQueue
from workbench.parameter_server.errors import CancelledError
from workbench.parameter_server.workers.closure import Closure, RemoteValue


@pytest.fixture(params=[256 * 1024, 2])
def queue(request: pytest.FixtureRequest) -> ClosureQueue:
    """Behaviour 12: all of it holds for a queue of two, too."""
    return ClosureQueue(request.param)


def closure() -> Closure:
    return Closure(int)


def taken(queue: ClosureQueue, tag: int | None = None) -> Closure:
    found = queue.get(timeout_s=5.0, tag=tag)
    assert found is not None
    return found


def background(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def ended(thread: threading.Thread) -> bool:
    thread.join(5.0)
    return not thread.is_alive()


def test_what_is_put_comes_out_and_counts_until_it_is_finished(queue: ClosureQueue) -> None:
    """Behaviours 1, 3: a wait that comes late returns at once."""
    one = closure()
    queue.put(one)
    assert not queue.done()
    assert taken(queue) is one
    assert not queue.done()
    queue.put_back(one)
    assert taken(queue) is one
    queue.mark_finished(one)
    assert queue.done()
    assert queue.wait(0.0)


def test_two_consumers_that_put_back_their_first_run_everything_once(queue: ClosureQueue) -> None:
    """Behaviour 2."""
    ran: list[Closure] = []

    def consume() -> None:
        first = True
        while (found := queue.get()) is not None:
            if first:
                queue.put_back(found)
                first = False
                continue
            ran.append(found)
            queue.mark_finished(found)

    consumers = [threading.Thread(target=consume, daemon=True) for _ in range(2)]
    for each in consumers:
        each.start()
    closures = [closure() for _ in range(10)]
    for each in closures:
        queue.put(each)
    assert queue.wait(5.0)
    assert queue.wait(5.0)
    assert sorted(map(id, ran)) == sorted(map(id, closures))
    queue.stop()
    assert all(ended(each) for each in consumers)


def test_a_failure_wakes_whoever_waits(queue: ClosureQueue) -> None:
    """Behaviour 4."""
    queue.put(closure())
    found = taken(queue)
    thread, errors = background(queue.wait)
    time.sleep(0.02)
    assert thread.is_alive()
    failure = ValueError("planted")
    queue.mark_failed(found, failure)
    assert ended(thread)
    assert errors == [failure]
    assert queue.done()


@pytest.mark.parametrize("raises", ["put", "wait", "done"])
def test_an_error_is_raised_once_and_what_waited_is_cancelled(queue: ClosureQueue, raises: str) -> None:
    """Behaviours 5, 6, 7, 14: what is put back after it is cancelled, too."""
    queue.put(closure())
    queue.put(closure())
    found, back = taken(queue), taken(queue)
    waiting, late = closure(), closure()
    queue.put(waiting)
    queue.mark_failed(found, ValueError("planted"))
    queue.put_back(back)
    calls: dict[str, Callable[[], object]] = {"put": lambda: queue.put(late), "wait": queue.wait, "done": queue.done}
    with pytest.raises(ValueError, match="planted"):
        calls[raises]()
    for each in (waiting, back):
        with pytest.raises(CancelledError, match="Schedule it again"):
            each.output.fetch(0)
    if raises == "put":
        with pytest.raises(CancelledError):
            late.output.fetch(0)
    assert queue.wait(0.0)
    assert queue.done()
    queue.put(closure())
    queue.mark_finished(taken(queue))
    assert queue.wait(0.0)


@pytest.mark.parametrize("raises", ["put", "wait"])
def test_the_call_that_raises_waits_for_what_runs_and_names_the_first_error(queue: ClosureQueue, raises: str) -> None:
    """Behaviours 8, 9."""
    for _ in range(2):
        queue.put(closure())
    first, second = taken(queue), taken(queue)
    waiting, late = closure(), closure()
    queue.put(waiting)
    assert not first.cancel.is_set()
    before = first.cancel
    failure, derived = ValueError("first"), CancelledError("mid-flight")
    queue.mark_failed(first, failure)
    assert second.cancel.is_set(), "what runs is asked to stop"
    thread, errors = background(queue.wait if raises == "wait" else lambda: queue.put(late))
    time.sleep(0.03)
    assert thread.is_alive(), "one of them still runs"
    queue.mark_failed(second, derived)
    assert ended(thread)
    assert errors == [failure]
    for each, kind, words in (
        (first, ValueError, "first"),
        (second, CancelledError, "mid-flight"),
        (waiting, CancelledError, "again"),
    ):
        with pytest.raises(kind, match=words):
            each.output.fetch(0)
    if raises == "put":
        with pytest.raises(CancelledError):
            late.output.fetch(0)
    assert (queue.waiting, queue.in_flight, queue.done()) == (0, 0, True)
    fresh = closure()
    queue.put(fresh)
    assert fresh.cancel is not before
    assert not fresh.cancel.is_set()


def test_many_threads_do_not_lock_each_other_out(queue: ClosureQueue) -> None:
    """Behaviour 10."""

    def work() -> None:
        for _ in range(20):
            queue.put_back(taken(queue))
            queue.mark_finished(taken(queue))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(10)]
    for each in threads:
        each.start()
    for _ in range(200):
        queue.put(closure())
    assert all(ended(each) for each in threads)
    assert queue.done()


def test_a_tag_is_for_one_worker_and_comes_first(queue: ClosureQueue) -> None:
    """Behaviour 11; 58: what a worker has to build comes before ordinary closures."""
    plain, tagged = closure(), closure()
    queue.put(plain)
    queue.put(tagged, tag=2)
    assert queue.get(timeout_s=0.0, tag=1) is plain
    queue.mark_finished(plain)
    assert queue.wait(0.0), "tagged closures hold nobody up"
    assert queue.get(timeout_s=0.0) is None
    assert queue.get(timeout_s=0.0, tag=1) is None
    assert queue.in_flight == 0
    queue.put(closure())
    assert queue.get(timeout_s=0.0, tag=2) is tagged
    assert queue.in_flight == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_full_queue_lets_put_wait(fails: bool) -> None:
    """Behaviour 12: for room, or for the failure of what runs."""
    queue = ClosureQueue(2)
    queue.put(closure())
    found = taken(queue)
    queue.put(closure())
    queue.put(closure())
    thread, errors = background(lambda: queue.put(closure()))
    time.sleep(0.03)
    assert thread.is_alive()
    if fails:
        queue.mark_failed(found, ValueError("planted"))
    else:
        taken(queue)
    assert ended(thread)
    assert [str(each) for each in errors] == ["planted"] * fails


def test_nothing_slips_in_while_somebody_waits(queue: ClosureQueue) -> None:
    """Behaviour 13."""
    queue.put(closure())
    found = taken(queue)
    waiter, _ = background(queue.wait)
    time.sleep(0.02)
    putter, _ = background(lambda: queue.put(closure()))
    time.sleep(0.02)
    assert queue.waiting == 0
    queue.mark_finished(found)
    assert ended(waiter)
    assert ended(putter)
    assert queue.waiting == 1


def test_what_is_put_back_runs_before_what_waits() -> None:
    """Behaviour 48: the oldest is not overtaken because its worker died."""
    queue, (first, second) = ClosureQueue(), (closure(), closure())
    queue.put(first)
    queue.put(second)
    queue.put_back(taken(queue))
    assert [taken(queue), taken(queue)] == [first, second]


def test_a_worker_waits_while_an_error_is_not_yet_told() -> None:
    """It neither gets what will be cancelled nor goes away: it takes what is put next."""
    queue, found = ClosureQueue(), []
    for _ in range(2):
        queue.put(closure())
    queue.mark_failed(taken(queue), ValueError("planted"))
    thread, _ = background(lambda: found.append(queue.get()))
    with pytest.raises(ValueError, match="planted"):
        queue.wait()
    new = closure()
    queue.put(new)
    assert ended(thread)
    assert found == [new]


def test_a_stopped_queue_wakes_everybody_and_takes_nothing(queue: ClosureQueue) -> None:
    waiting = closure()
    queue.put(waiting)
    queue.put(closure(), tag=0)
    queue.stop()
    assert queue.get() is None
    assert queue.get(tag=0) is None
    with pytest.raises(CancelledError):
        waiting.output.fetch(0)
    with pytest.raises(UsageError, match="shut down"):
        queue.put(closure())
    with pytest.raises(UsageError, match="max_waiting=0"):
        ClosureQueue(0)


def test_a_value_is_waited_for_and_the_first_end_stays() -> None:
    value: RemoteValue[int] = RemoteValue()
    assert not value.done()
    with pytest.raises(TimeoutError, match="has not ended"):
        value.fetch(0.01)
    value.set_value(3)
    value.set_error(ValueError())
    value.set_value(4)
    assert value.fetch() == 3
    assert value.done()


def test_a_callback_that_fails_is_told_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    value: RemoteValue[int] = RemoteValue()
    called: list[int] = []
    for callback in (lambda: 1 / 0, lambda: called.append(1)):
        value.add_done_callback(callback)
    value.set_value(3)
    assert (value.fetch(), called) == (3, [1])
    assert "ZeroDivisionError" in caplog.text


def test_more_leaves_enough_for_others_and_nothing_after_an_error() -> None:
    queue = ClosureQueue()
    closures = [Closure(int) for _ in range(10)]
    for closure in closures:
        queue.put(closure)
    assert queue.get() is closures[0]
    assert queue.more(3, workers=1) == closures[1:4]
    assert queue.in_flight == 4
    assert queue.more(7, workers=1) == closures[4:7]
    assert queue.more(7, workers=2) == []
    queue.put(Closure(int), tag=1)
    assert queue.more(7, workers=1) == [], "what is for one worker alone comes first"
    assert queue.get(tag=1) is not None
    queue.mark_failed(closures[0], ValueError("planted"))
    assert queue.more(7, workers=1) == []
