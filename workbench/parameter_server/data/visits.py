"""`count_visits`: how often each example is read by all workers together, and orders of sharding and shuffling (T4.5, T8.5)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.parameter_server.data.datasets import InputContext

DatasetFn = Callable[[InputContext], Iterable[Any]]


def count_visits(dataset_fn: DatasetFn, num_workers: int, *, take: int | None = None) -> dict[Any, int]:
    """Return how often each example comes when every worker reads its own dataset once.

    Args:
        dataset_fn: as for `DatasetCreator`; here its datasets yield examples that can be told apart, such as their ids, or batches
            of them (lists, tuples, tensors).
        num_workers: of the cluster: it is called once for each, with that worker's context.
        take: batches of each worker; None reads to the end, which an endless dataset does not have.

    Returns:
        Example -> visits, in the order of the examples where they have one.

    Raises:
        UsageError: `num_workers` is below 1.

    Source: T4.5.
    """
    visits: Counter[Any] = Counter()
    for worker in range(check_integer("num_workers", num_workers, error=UsageError)):
        for batch in itertools.islice(iter(dataset_fn(InputContext(num_workers, worker))), take):
            examples = batch.tolist() if hasattr(batch, "tolist") else batch
            visits.update(examples if isinstance(examples, (list, tuple)) else [examples])
    try:
        return dict(sorted(visits.items()))
    except TypeError:  # examples of several kinds
        return dict(visits)


def shuffle_then_shard(examples: Sequence[Any], seed: int | None = None) -> DatasetFn:
    """Return a dataset function that shuffles, then takes every n-th: each worker cuts its share out of an order of its own.

    Without a common seed some examples are read by several workers and others by none, anew in each epoch (T4.5).
    """
    return lambda context: _shuffled(examples, seed)[context.input_pipeline_id :: context.num_input_pipelines]


def shard_then_shuffle(examples: Sequence[Any], seed: int | None = None) -> DatasetFn:
    """Return a dataset function that takes every n-th, then shuffles: every example is read once, whatever the seeds."""
    return lambda context: _shuffled(examples[context.input_pipeline_id :: context.num_input_pipelines], seed)


def endless_batches(examples: Sequence[Any], batch_size: int, seed: int | None = None) -> DatasetFn:
    """Return a dataset function that shuffles all examples anew for every pass, without end, on each worker for itself.

    A number of steps that evaluates such data, wherever they run, counts some examples twice and others never (T8.5).
    """

    def dataset_fn(_: InputContext) -> Iterator[list[Any]]:
        while True:
            order = _shuffled(examples, seed)
            yield from (order[at : at + batch_size] for at in range(0, len(order), batch_size))

    return dataset_fn


def _shuffled(examples: Sequence[Any], seed: int | None) -> list[Any]:
    order = list(examples)
    random.Random(seed).shuffle(order)
    return order
