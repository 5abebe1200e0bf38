"""Tasks in several threads: each runs once, errors come out, and torch's settings come back."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from workbench.train.traced.call_runner import CallRunner


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_task_runs_once_without_recording_gradients(threads: int) -> None:
    done: list[tuple[int, bool]] = []
    runner = CallRunner(threads)
    for _ in range(3):
        done.clear()
        runner.run([lambda i=i: done.append((i, torch.is_grad_enabled())) for i in range(20)])  # type: ignore[misc]
        assert sorted(done) == [(i, False) for i in range(20)]
    runner.close()


def test_threads_work_at_the_same_time_on_one_core_each() -> None:
    runner = CallRunner(2)
    meet = threading.Barrier(2, timeout=5)  # breaks unless two tasks wait at it together
    seen: list[tuple[str, int]] = []

    def task() -> None:
        meet.wait()
        seen.append((threading.current_thread().name, torch.get_num_threads()))

    runner.run([task, task])
    runner.close()
    assert len({name for name, _ in seen}) == 2
    assert {count for _, count in seen} == {1}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_ends_the_rest_and_comes_out(threads: int) -> None:
    runner = CallRunner(threads)
    done: list[int] = []

    def fails() -> None:
        raise RuntimeError("no")

    def slow(number: int) -> None:
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(RuntimeError, match="no"):
        runner.run([fails, *(lambda i=i: slow(i) for i in range(100))])  # type: ignore[misc]
    assert len(done) < 3
    runner.run([lambda: done.append(-1)])
    assert done[-1] == -1
    runner.close()


def test_torchs_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        runner = CallRunner(2)
        assert torch.get_num_threads() == 1
        runner.close()
        runner.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
