"""What workers do with their time, and which loads belong to which module: by hand, and on both engines (T13.5)."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.parameter_server.context import PARTS
from workbench.parameter_server.coordinator.closure_queue import PAUSE_S, ClosureQueue, LoopClock
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.load import load_facts, time_facts
from workbench.parameter_server.training.work_time import WorkTime
from workbench.parameter_server.workers.closure import Closure

NAP, FUNCTIONS = 0.02, 12


def update(worker: int, *spent: float) -> tuple[int, dict[str, float]]:
    return worker, dict(zip(PARTS, spent, strict=True))


def test_sums_and_what_is_left_of_the_workers_time() -> None:
    spent = WorkTime(3)
    assert (spent.updates, spent.step_s) == (0, [])
    assert math.isnan(spent.dispatch_s)
    spent.add(1.0, 2, [update(0, 0.1, 0.1, 0.2, 0.1), update(1, 0.0, 0.0, 0.4, 0.1)])
    spent.add(0.5, 1, [update(0, 0.0, 0.1, 0.3, 0.1)])
    assert spent.step_s == pytest.approx([0.5, 0.5])
    assert spent.dispatch_s == pytest.approx((3 * 1.5 - 1.5) / 3)
    found = spent.to_dict()
    assert (found["training_s"], found["closures_timed"], found["stretches"], found["updates"]) == (1.5, 3, 2, 3)
    assert found["work"][0] == pytest.approx(
        {"data_wait_s": 0.1, "pull_s": 0.2, "compute_s": 0.5, "push_s": 0.2, "updates": 2}
    )
    assert found["work"][2]["updates"] == 0


def test_the_ages_of_gradients_are_those_of_the_module_in_question(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    fields = TrainConfig(peak_lr=0.1, total_steps=9, batch_size=1, optimizer="sgd")
    modules = {pushes: strategy.place(nn.Linear(2, 2), fields) for pushes in (3, 5)}
    for pushes, placed in modules.items():
        for _ in range(pushes):
            with placed.step() as module:
                module(torch.ones(1, 2)).sum().backward()
    for pushes, placed in modules.items():
        facts = load_facts(coordinator, placed, seconds=1.0)
        assert facts["steps"] == pushes
        assert facts["staleness_steps"] == [{"0": pushes}, {"0": pushes}]
        placed.delete()
    coordinator.shutdown()


def batches() -> Any:
    while True:
        time.sleep(NAP)
        yield 1.0


def step(variable: Any, iterator: Any) -> None:
    variable.assign_add(next(iterator))
    variable.read()
    time.sleep(2 * NAP)


def test_parts_of_a_function_s_time_are_told_apart(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy
) -> None:
    """Waiting for the iterator, reading and writing variables, and all the rest."""
    variable = strategy.variable(0.0)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    begun = time.perf_counter()
    for _ in range(FUNCTIONS):
        coordinator.schedule(step, args=(variable, iterator))
    coordinator.join()
    passed = time.perf_counter() - begun
    facts = time_facts(coordinator, seconds=float("nan"), updates=2 * FUNCTIONS)
    sums = {part: sum(mine[part] for mine in facts["work"]) for part in facts["work"][0]}
    assert FUNCTIONS * NAP <= sums["data_wait_s"] < 3 * passed
    assert 2 * FUNCTIONS * NAP <= sums["compute_s"] < 3 * passed - sums["data_wait_s"]
    assert min(sums["pull_s"], sums["push_s"]) > 0
    assert sums["updates"] == pytest.approx(2 * FUNCTIONS)
    assert (facts["closures_timed"], facts["stretches"]) == (FUNCTIONS, 1)
    assert 0 < facts["training_s"] <= passed


def test_a_loop_has_its_own_time_alone(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """Neither what another coordinator of the cluster scheduled, nor what was asked of every worker."""
    coordinator.schedule(time.sleep, args=(5 * NAP,)).fetch()
    coordinator.on_every_worker(time.sleep, (5 * NAP,))
    other = ClusterCoordinator(ParameterServerStrategy(strategy.cluster))
    other.schedule(float).fetch()
    first, second = (time_facts(each, seconds=1.0, updates=1) for each in (coordinator, other))
    other.shutdown()
    computed = [sum(mine["compute_s"] for mine in facts["work"]) for facts in (first, second)]
    assert [facts["closures_timed"] for facts in (first, second)] == [1, 1]
    assert computed[0] >= 5 * NAP
    assert computed[1] < computed[0]


@pytest.mark.parametrize(
    ("changes", "later", "seconds"),
    [
        ([(10, True), (12, False), (13, True), (14, False), (14 + PAUSE_S, True), (15 + PAUSE_S, False)], 1e6, 5),
        ([(10, True)], 13, 3),  # it runs while there is something to do
        ([(10, True), (13, True), (14, False)], 20, 4),  # the same news twice
        ([(4, False)], 9, 0),  # before the first function
    ],
)
def test_work_and_short_gaps_count_and_pauses_do_not(changes: Any, later: float, seconds: float) -> None:
    now = [0.0]
    clock = LoopClock(lambda: now[0])
    for at, busy in changes:
        now[0] = at
        clock.tell(busy)
    now[0] = later
    assert clock.seconds() == seconds


@pytest.mark.parametrize("how", ["finished", "failed", "cancelled"])
def test_a_queue_tells_the_clock_when_the_last_one_ended(how: str) -> None:
    """However it ended: afterwards the clock stands."""
    queue = ClosureQueue()
    queue.put(Closure(print))
    first = queue.get()
    assert first is not None
    if how == "finished":
        queue.mark_finished(first)
        queue.wait()
    elif how == "failed":
        queue.mark_failed(first, ValueError("planted"))
        with pytest.raises(ValueError, match="planted"):
            queue.wait()
    else:
        queue.stop()
        queue.put_back(first)
    stands, joins = queue.worked
    time.sleep(0.01)
    assert queue.worked[0] == stands > 0
    assert joins == (how == "finished")
