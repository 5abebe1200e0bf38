"""Datasets, iterators and variables that each worker has for itself (behaviours 29 to 41)."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.held import held
from workbench.errors import UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.context import (
    get_current_worker_index,
)
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.data.datasets import DatasetCreator
from workbench.parameter_server.errors import ClosureInputError, OutOfRangeError
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.workers.worker import PerWorkerValues


def numbers() -> Iterator[int]:
    k = 0
    while True:
        k += 1
        yield k


def sharded() -> Iterator[int]:
    """This worker's share of 0 to 9, endlessly."""
    while True:
        yield from range(get_current_worker_index(), 10, 3)


def shuffled() -> Iterator[list[int]]:
    order = list(range(50))
    random.shuffle(order)
    while True:
        yield order


def draw(iterator: Iterator[Any]) -> tuple[int, Any]:
    return get_current_worker_index(), next(iterator)


def by_worker(coordinator: ClusterCoordinator, iterators: Any, count: int = 12) -> dict[int, list[Any]]:
    """What each worker drew, in its order; every worker got something."""
    found: dict[int, list[Any]] = {}
    deadline = time.monotonic() + 20
    while len(found) < 3 and time.monotonic() < deadline:
        for worker, item in coordinator.fetch(
            [coordinator.schedule(slow_draw, args=(iterators,)) for _ in range(count)]
        ):
            found.setdefault(worker, []).append(item)
    assert sorted(found) == [0, 1, 2]
    return found


def slow_draw(iterator: Iterator[Any]) -> tuple[int, Any]:
    time.sleep(0.01)
    return draw(iterator)


def test_each_worker_has_its_own_iterator_and_sees_it_alone(coordinator: ClusterCoordinator) -> None:
    """Behaviours 25 and 29, T7.1, T7.2."""
    dataset = coordinator.create_per_worker_dataset(sharded)
    iterators = iter(dataset)
    assert isinstance(iterators, PerWorkerValues)
    assert len(iterators) == 3
    with pytest.raises(UsageError, match="its values are on the workers"):
        next(iterators)
    for worker, items in by_worker(coordinator, iterators).items():
        whole = list(range(worker, 10, 3))
        assert items == (whole * len(items))[: len(items)]


def test_a_dataset_itself_is_copied_to_the_workers(coordinator: ClusterCoordinator) -> None:
    """Behaviour 29: a loader, a map-style dataset, a list."""
    data = TensorDataset(torch.arange(6.0))
    for source in (DataLoader(data, batch_size=2), [torch.tensor([0.0, 1.0])]):
        iterators = iter(coordinator.create_per_worker_dataset(source))
        for items in by_worker(coordinator, iterators, count=3).values():
            first = items[0][0] if isinstance(items[0], (list, tuple)) else items[0]
            assert first.tolist() == [0.0, 1.0]
            del items


def test_each_iter_begins_anew(coordinator: ClusterCoordinator) -> None:
    """Behaviours 30 and 35: two of one dataset in one function."""
    dataset = coordinator.create_per_worker_dataset(numbers)
    one, two = iter(dataset), iter(dataset)

    def both(a: Iterator[int], b: Iterator[int]) -> tuple[int, int, int]:
        return get_current_worker_index(), next(a), next(b)

    first = {}
    for worker, a, b in coordinator.fetch([coordinator.schedule(both, args=(one, two)) for _ in range(12)]):
        first.setdefault(worker, (a, b))
    assert set(first.values()) == {(1, 1)}
    three = iter(dataset)
    mixed = coordinator.fetch([coordinator.schedule(both, args=(one, three)) for _ in range(6)])
    assert {b for _, _, b in mixed} >= {1}
    assert all(a > b if worker in first else a == b for worker, a, b in mixed), "the old one goes on"


@pytest.mark.parametrize("when", ["at once", "on the first step", "a variable"])
def test_a_dataset_function_makes_no_parameters(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, when: str
) -> None:
    """Behaviour 32, T5.4: a layer made outside is used inside."""

    def makes() -> Any:
        if when == "at once":
            nn.Linear(2, 2)
        return [strategy.variable(0.0)] if when == "a variable" else late()

    def late() -> Iterator[Any]:
        yield nn.Linear(2, 2)

    coordinator.schedule(draw, args=(iter(coordinator.create_per_worker_dataset(makes)),))
    with pytest.raises((ClosureInputError, UsageError), match="function made a (parameter|variable)"):
        coordinator.join()
    layer = nn.Linear(2, 2)

    def uses() -> Iterator[Any]:
        while True:
            yield layer(torch.ones(2)).detach()

    assert coordinator.schedule(draw, args=(iter(coordinator.create_per_worker_dataset(uses)),)).fetch()[1].shape == (
        2,
    )


def test_without_a_seed_workers_shuffle_differently(coordinator: ClusterCoordinator) -> None:
    """Behaviour 33, T7.4: equal content, other order."""
    orders = [
        items[0] for items in by_worker(coordinator, iter(coordinator.create_per_worker_dataset(shuffled))).values()
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_a_live_iterator_is_no_dataset(coordinator: ClusterCoordinator) -> None:
    """Behaviour 34, T7.6."""
    live = numbers()
    for source, says in ((live, "under way"), (3, "create_per_worker_dataset got"), (None, "got NoneType")):
        with pytest.raises(UsageError, match=says):
            coordinator.create_per_worker_dataset(source)
    with pytest.raises((ClosureInputError, TypeError), match="iterator|generator"):  # noqa: PT012
        coordinator.schedule(lambda: next(live))
        coordinator.join()


def test_a_name_without_a_value_is_an_error_where_it_is_used(coordinator: ClusterCoordinator) -> None:
    """Python's own, raised on the worker."""
    function = lambda: later  # noqa: E731
    coordinator.schedule(function)
    with pytest.raises(NameError, match="later"):
        coordinator.join()
    later = 1
    assert function() == later


def with_context(context: Any) -> Iterator[int]:
    return itertools.repeat(100 * context.num_input_pipelines + context.input_pipeline_id)


@pytest.mark.parametrize("source", [with_context, DatasetCreator(with_context)], ids=["function", "creator"])
def test_a_function_that_wants_its_context_gets_it(coordinator: ClusterCoordinator, source: Any) -> None:
    """T7.3: as `distribute_datasets_from_function` would have it."""
    found = by_worker(coordinator, iter(coordinator.create_per_worker_dataset(source)))
    assert {items[0] for items in found.values()} == {300, 301, 302}


def test_a_dataset_in_place_of_its_iterator(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(numbers)
    with pytest.raises(UsageError, match=r"iter\(dataset\), or dataset\.build\(\)"):
        coordinator.schedule(next, args=(dataset,))


def test_iterators_come_and_go_without_a_trace(coordinator: ClusterCoordinator) -> None:
    """Behaviour 36."""
    gc.collect()  # what other tests left on this cluster goes now, not in between
    before = held(coordinator)
    for _ in range(10):
        iterators = iter(coordinator.create_per_worker_dataset(numbers))
        assert len(coordinator.fetch([coordinator.schedule(draw, args=(iterators,)) for _ in range(11)])) == 11
    coordinator.join()
    assert held(coordinator) != before
    del iterators
    gc.collect()
    until = time.monotonic() + 5
    while held(coordinator) != before and time.monotonic() < until:
        time.sleep(0.02)
    assert held(coordinator) == before


def test_a_distributed_dataset_needs_a_coordinator(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy
) -> None:
    """Behaviour 37 and T4.3: the function learns which pipeline it is."""

    def source(context: Any) -> Iterator[Any]:
        while True:
            yield context.num_input_pipelines, context.input_pipeline_id

    with pytest.raises(UsageError, match=r"options=\{'prefetch': 2\} would change nothing.*prefetch_factor="):
        strategy.distribute_datasets_from_function(source, {"prefetch": 2})
    distributed = strategy.distribute_datasets_from_function(source)
    with pytest.raises(UsageError, match="without a coordinator"):
        iter(distributed)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="without a coordinator"):
        distributed()
    for worker, items in by_worker(coordinator, iter(coordinator.create_per_worker_dataset(distributed))).items():
        assert set(items) == {(3, worker)}


def test_a_variable_of_each_worker(coordinator: ClusterCoordinator) -> None:
    """Behaviour 38."""
    count = coordinator.per_worker(lambda: torch.zeros(1))

    def add(mine: Any) -> int:
        mine += 1.0
        return get_current_worker_index()

    where = coordinator.fetch([coordinator.schedule(add, args=(count,)) for _ in range(20)])
    found = coordinator.on_every_worker(torch.clone, [count])
    assert [float(value) for value in found] == [where.count(worker) for worker in range(3)]


def test_the_dataset_itself_as_an_argument(coordinator: ClusterCoordinator) -> None:
    """Behaviour 39."""
    built = coordinator.create_per_worker_dataset(lambda: [1, 2, 3]).build()
    assert coordinator.schedule(sum, args=(built,)).fetch() == 6


def test_an_error_in_a_dataset_function_is_told_by_who_needs_it(coordinator: ClusterCoordinator) -> None:
    """Behaviour 40: at join and at fetch, and not at all where nobody uses it."""

    def broken() -> Any:
        raise FileNotFoundError("words.txt")

    unused = iter(coordinator.create_per_worker_dataset(broken))
    coordinator.schedule(int)
    coordinator.join()
    value = coordinator.schedule(draw, args=(unused,))
    with pytest.raises(ClosureInputError, match="words.txt"):
        coordinator.join()
    with pytest.raises(ClosureInputError, match="could not be built on worker"):
        value.fetch(0)


def test_iterators_survive_an_error(coordinator: ClusterCoordinator) -> None:
    """Behaviour 41."""
    iterators = iter(coordinator.create_per_worker_dataset(numbers))
    before = by_worker(coordinator, iterators)
    coordinator.schedule(draw, args=(None,))
    with pytest.raises(TypeError):
        coordinator.join()
    after = by_worker(coordinator, iterators)
    assert all(min(after[worker]) == max(before[worker]) + 1 for worker in before)


def test_a_dataset_that_ends_says_so(coordinator: ClusterCoordinator) -> None:
    """T7.5."""
    iterators = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    for _ in range(4):
        coordinator.schedule(draw, args=(iterators,))
    with pytest.raises(OutOfRangeError, match="ended after 1 batches. Repeat it"):
        coordinator.join()


def kept_and_raised(held: torch.Tensor) -> torch.Tensor:
    held += 1
    return held


def test_a_result_is_what_it_was_when_its_function_ended(lone_cluster: Cluster) -> None:
    """T11.1: a worker that goes on with a tensor does not change what it returned."""
    coordinator = ClusterCoordinator(ParameterServerStrategy(lone_cluster))
    held = coordinator.per_worker(functools.partial(torch.zeros, 2))
    values = [coordinator.schedule(kept_and_raised, args=(held,)) for _ in range(3)]
    assert [value.tolist() for value in coordinator.fetch(values)] == [[1, 1], [2, 2], [3, 3]]
    coordinator.shutdown()
