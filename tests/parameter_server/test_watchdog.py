"""The watch over closures: a clock that the test moves, and a thread that is really there."""

from __future__ import annotations

import gc
import io
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workbench.errors import UsageError
from workbench.parameter_server.coordinator.watchdog import WatchDog, all_stacks

SOON_S = 30.0  # how long a test waits before it gives up; it takes milliseconds


class Sleeper:
    """A clock that stands still, but for the sleep of the watch; after each sleep a line of the script is run."""

    def __init__(self, *script: Callable[[], Any] | None) -> None:
        self.now, self.slept = 100.0, list[float]()
        self._script = iter(script)
        self.ended, self.begin = threading.Event(), threading.Event()

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        assert self.begin.wait(SOON_S)
        self.slept.append(seconds)
        self.now += seconds
        for line in self._script:
            if line is not None:
                line()
            return False
        self.ended.set()
        return True


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def run(sleeper: Sleeper, on_stall: Callable[[], object] | None = None, stream: Any = None) -> WatchDog:
    """Run the script to its end with a limit of 10 s."""
    dog = WatchDog(10, on_stall, stream=stream, clock=sleeper.clock, wait=sleeper.wait)
    sleeper.begin.set()
    assert sleeper.ended.wait(SOON_S)
    dog.stop()
    return dog


def test_it_barks_after_the_time_and_again_after_each_such_time() -> None:
    """Behaviour 26: callback and stacks, repeated every T."""
    stream, calls = io.StringIO(), list[float]()
    sleeper = Sleeper(None, None, None)
    dog = run(sleeper, lambda: calls.append(sleeper.now), stream)
    assert calls == [110, 120, 130]
    assert sleeper.slept == [10, 10, 10, 10]
    assert dog.stalls == 3
    said = stream.getvalue()
    assert said.count("No closure finished for 10 s") == 3
    assert "Thread MainThread" in said
    assert "test_watchdog.py" in said


def test_progress_puts_it_off() -> None:
    """Behaviour 26: it resets on progress."""
    calls: list[float] = []

    def finish_early() -> None:
        sleeper.now -= 4  # only 6 s have gone by
        dog.report_progress()

    sleeper = Sleeper(finish_early, None, None)
    dog = WatchDog(10, lambda: calls.append(sleeper.now), stream=io.StringIO(), clock=sleeper.clock, wait=sleeper.wait)
    sleeper.begin.set()
    assert sleeper.ended.wait(SOON_S)
    dog.stop()
    assert calls == [116, 126]


def test_steady_progress_never_barks() -> None:
    """Behaviour 26."""

    def finish() -> None:
        dog.report_progress()

    sleeper, stream = Sleeper(*[finish] * 50), io.StringIO()
    dog = WatchDog(10, stream=stream, clock=sleeper.clock, wait=sleeper.wait)
    sleeper.begin.set()
    assert sleeper.ended.wait(SOON_S)
    dog.stop()
    assert (dog.stalls, stream.getvalue()) == (0, "")
    assert sleeper.now == 100 + 51 * 10


def test_it_wakes_when_it_is_due_and_no_later() -> None:
    """Behaviour 26: an early wake sleeps for the rest only."""

    def wake_early() -> None:
        sleeper.now -= 7

    sleeper = Sleeper(wake_early, None, wake_early, None, None)
    assert run(sleeper, stream=io.StringIO()).stalls == 3
    assert sleeper.slept == [10, 7, 10, 7, 10, 10]


def test_a_failing_callback_is_logged_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("planted")

    with caplog.at_level(logging.WARNING, "workbench.parameter_server.coordinator.watchdog"):
        assert run(Sleeper(None, None), fail, io.StringIO()).stalls == 2
    assert len(calls) == 2
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "planted" in caplog.text


def test_without_a_stream_it_is_a_warning_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "workbench.parameter_server.coordinator.watchdog"):
        run(Sleeper(None))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Where all threads stand:" in record.getMessage()


def test_the_real_clock() -> None:
    """Behaviour 26: it barks twice without help, in a daemon thread, and stops."""
    twice = threading.Semaphore(0)
    dog = WatchDog(0.01, twice.release, stream=io.StringIO())
    thread = dog._thread
    assert thread.daemon
    assert twice.acquire(timeout=SOON_S)
    assert twice.acquire(timeout=SOON_S)
    dog.stop()
    assert not thread.is_alive()
    stalls = dog.stalls
    dog.stop()
    assert dog.stalls == stalls


def test_a_long_sleep_ends_at_once() -> None:
    dog = WatchDog(3600)
    dog.stop()  # the fixture sees that the thread is gone
    assert dog.stalls == 0


def test_it_may_be_stopped_by_its_callback() -> None:
    made, done = threading.Event(), threading.Event()

    def stop() -> None:
        assert made.wait(SOON_S)
        dog.stop()
        done.set()

    dog = WatchDog(0.01, stop, stream=io.StringIO())
    made.set()
    assert done.wait(SOON_S)
    dog._thread.join(SOON_S)
    assert not dog._thread.is_alive()
    assert dog.stalls == 1


def test_an_owner_that_is_forgotten_takes_it_along() -> None:
    """Behaviour 28: the thread holds neither its owner nor what the owner wanted called."""

    class Owner:
        def __init__(self) -> None:
            self.dog = WatchDog(3600, self.stalled)

        def stalled(self) -> None:
            pass

    owner = Owner()
    thread = owner.dog._thread
    del owner
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), True])
def test_a_limit_is_a_positive_time(timeout_s: float) -> None:
    with pytest.raises(UsageError, match=r"timeout_s=.* of the watchdog must be a number of seconds above 0. Leave"):
        WatchDog(timeout_s)


def test_all_threads_are_named_with_where_they_stand() -> None:
    """Behaviour 26."""
    inside, end = threading.Event(), threading.Event()

    def stand_here() -> None:
        inside.set()
        end.wait(SOON_S)

    thread = threading.Thread(target=stand_here, name="planted")
    thread.start()
    assert inside.wait(SOON_S)
    said = all_stacks()
    end.set()
    thread.join(SOON_S)
    (block,) = [part for part in said.split("Thread ") if part.startswith("planted (")]
    assert "in stand_here" in block
    assert "MainThread" in said
