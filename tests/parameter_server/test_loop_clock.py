"""The time that a loop has worked, on a clock that the test turns."""

from __future__ import annotations

import threading

import pytest

from workbench.parameter_server.coordinator.closure_queue import PAUSE_S, ClosureQueue, LoopClock
from workbench.parameter_server.workers.closure import Closure


def told(*changes: tuple[float, bool]) -> tuple[LoopClock, list[float]]:
    now = [0.0]
    clock = LoopClock(lambda: now[0])
    for at, busy in changes:
        now[0] = at
        clock.tell(busy)
    return clock, now


def test_work_and_short_gaps_count_and_pauses_do_not() -> None:
    clock, now = told((10, True), (12, False), (13, True), (14, False), (14 + PAUSE_S, True), (15 + PAUSE_S, False))
    assert clock.seconds() == 2 + 1 + 1 + 1
    now[0] = 1e6
    assert clock.seconds() == 5, "it stands still while there is nothing to do"


def test_it_runs_while_there_is_something_to_do() -> None:
    clock, now = told((10, True))
    now[0] = 13
    assert clock.seconds() == 3
    clock.tell(True)
    now[0] = 14
    clock.tell(False)
    assert clock.seconds() == 4, "the same news twice changes nothing"


def test_before_the_first_function_there_is_no_time() -> None:
    clock, now = told((4, False))
    now[0] = 9
    assert clock.seconds() == 0
    clock.tell(True)
    assert clock.seconds() == 0


@pytest.mark.parametrize("how", ["finished", "failed", "cancelled"])
def test_a_queue_tells_it_when_the_last_one_ended(how: str) -> None:
    """However it ended: afterwards the clock stands."""
    queue = ClosureQueue()
    for _ in range(2):
        queue.put(Closure(print))
    first = queue.get()
    assert first is not None
    if how == "finished":
        queue.mark_finished(first)
        second = queue.get()
        assert second is not None
        queue.mark_finished(second)
        queue.wait()
    elif how == "failed":
        queue.mark_failed(first, ValueError("planted"))
        with pytest.raises(ValueError, match="planted"):
            queue.wait()
    else:
        queue.stop()
        queue.put_back(first)
    stands, joins = queue.worked
    threading.Event().wait(0.01)
    assert queue.worked[0] == stands > 0
    assert joins == (how == "finished")
