"""Torch's threads while a trial trains, where torch would split an operation: one, unless steps are faster with all of them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from tests.helpers.hooks import At, Threads
from tests.helpers.workloads import Having, small_workload

CORES = 2


class Clock:
    """A clock that only the forward passes below move, so that what else the machine does is not measured."""

    now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch as it begins on a machine of two cores."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)), raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    monkeypatch.setattr(time, "perf_counter", CLOCK.read)
    yield
    torch.set_num_threads(before)


def slow_with(threads: list[int]) -> wb.Workload:
    """A workload whose batches of 8 take longer with so many threads; of 8 * 4096 numbers, which torch splits."""

    def forward(model: Having, x: Tensor) -> Tensor:
        CLOCK.now += 0.004 if torch.get_num_threads() in threads else 0.001
        hidden: Tensor = model.first(x)
        return hidden[:, :1]

    return small_workload(build_model=lambda: Having(forward, first=nn.Linear(3, 4096)), config={"total_steps": 4, "precision": None})  # fmt: skip


def seen(workload: wb.Workload, out: Path) -> set[int]:
    hook = Threads()
    wb.Trainer(hooks=[hook], gradients="loop").run(workload, out=out)
    assert torch.get_num_threads() == CORES
    return hook.seen


def test_several_threads_are_taken_where_steps_are_faster_with_them(tmp_path: Path) -> None:
    assert seen(slow_with([CORES]), tmp_path / "contended") == {1}
    assert seen(slow_with([1]), tmp_path / "large") == {CORES}


def test_a_trial_goes_on_with_the_number_that_it_began_with(tmp_path: Path) -> None:
    """Another number may change the last digits of every loss."""
    slow = [1]
    workload = slow_with(slow)

    with pytest.raises(KeyboardInterrupt):
        wb.Trainer(hooks=[At(1, KeyboardInterrupt())], gradients="loop").run(workload, out=tmp_path / "run")
    slow[:] = [CORES]
    assert seen(workload, tmp_path / "run") == {CORES}
