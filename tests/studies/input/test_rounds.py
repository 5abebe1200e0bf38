"""Rounds of a loop in numbers that can be checked by hand, and the time limit that leaves no trace of itself."""

from __future__ import annotations

import math
import signal
import time

import pytest

from workbench.topics.input.loaders import TimedOut, time_limit
from workbench.topics.input.loop import Loop, as_round

LOOP = Loop(
    wait_s=[1.0, 0.010, 0.020, 0.5, 0.030], queued_s=[0.9, 0.004, 0.002, 0.1, 0.0], step_s=[0.1] * 5, step_queued_s=[0.05, 0.0, 0.03, 0.05, 0.06],
    first=[True, False, False, True, False], total_s=2.06,
)  # fmt: skip


def test_time_that_other_programs_had_is_no_wait_and_first_batches_stand_apart() -> None:
    found = as_round(LOOP, ahead=False)
    assert found["wait_s"] == pytest.approx((0.006 + 0.018 + 0.030) / 3)
    assert found["steady_s"] == pytest.approx((2.06 - 1.1 - 0.6) / 3)
    assert found["queued_s"] == pytest.approx((0.006 + 0.03 + 0.06) / 3)
    assert (found["steps"], found["step_s"], found["starts"]) == (5, pytest.approx(0.1), [1.0, 0.5])


def test_behind_a_device_all_its_work_is_shared_out() -> None:
    assert as_round(LOOP, ahead=True)["steady_s"] == pytest.approx((2.06 - 1.5) / 5)


def test_a_loop_without_a_batch_has_no_times() -> None:
    assert all(math.isnan(as_round(Loop(), ahead=False)[name]) for name in ("steady_s", "wait_s", "step_s"))


def test_the_time_limit_gives_the_alarm_back() -> None:
    def own(*_: object) -> None:
        raise AssertionError("the alarm of somebody else")

    before = signal.signal(signal.SIGALRM, own)
    try:
        with (
            pytest.raises(TimedOut, match=r"nothing came for 0.05 s.*test_rounds.py"),
            time_limit(0.05, "nothing came"),
        ):
            time.sleep(5)
        assert signal.getsignal(signal.SIGALRM) is own
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        with time_limit(0.2, "nothing came"):
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGALRM, before)
