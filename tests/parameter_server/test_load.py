"""What workers say about their own time in a loop of one's own, on both engines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.trials.load import time_facts

NAP, FUNCTIONS = 0.02, 12


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
    """T13.5: waiting for the iterator, reading and writing variables, and all the rest."""
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
    assert sums["pull_s"] > 0
    assert sums["push_s"] > 0
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
