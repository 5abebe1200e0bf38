"""What a worker takes its batches from: a dataset by indices that come with each step, a stream of its own, or shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from workbench.errors import DataError, UsageError
from workbench.parameter_server.context import current_worker
from workbench.parameter_server.data.datasets import DatasetRecipe
from workbench.parameter_server.data.input_context import DatasetCreator, InputContext
from workbench.parameter_server.workers.worker import WorkerIterator
from workbench.workloads.items import IndexedDataset, plain_tensors

__all__ = ["Batching", "IndexedBatches", "Shards", "Stream"]


class IndexedBatches:
    """A copy of a map-style dataset; which examples a step reads is decided on the coordinator, so that each is read once an epoch.

    Args:
        dataset: map-style.
        collate: list of items -> batch; None is PyTorch's default.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._tensors = plain_tensors(dataset, collate)
        self._items = IndexedDataset(dataset)
        self._collate = collate or default_collate

    def take(self, plan: Sequence[int]) -> Any:
        """Return the batch of these examples."""
        if self._tensors is not None:
            rows = torch.as_tensor(plan)
            return [tensor[rows] for tensor in self._tensors]
        return self._collate(self._items.__getitems__(list(plan)))

    def batches(self, plan: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield the batches of these lists of examples."""
        return map(self.take, plan)


class Batching:
    """Cuts a torch dataset of examples into shuffled batches; anything else is taken for batches as it is.

    Args:
        batch_size: examples.
        collate: list of items -> batch; None is PyTorch's default.
        seed: mixed with the worker's index; None keeps the order and the incomplete last batch.
    """

    def __init__(self, batch_size: int, collate: Callable[[list[Any]], Any] | None, seed: int | None) -> None:
        self._batch_size, self._collate, self._seed = batch_size, collate, seed

    def __call__(self, made: Any) -> Iterable[Any]:
        """Return something to iterate over, batch by batch."""
        if not isinstance(made, Dataset):
            found: Iterable[Any] = made
            return found
        shuffles = self._seed is not None and not isinstance(made, IterableDataset)
        here = current_worker()
        seed = 0 if self._seed is None else self._seed * 1_000_003 + (0 if here is None else here.index)
        return DataLoader(
            made, self._batch_size, shuffle=shuffles or None, drop_last=self._seed is not None, collate_fn=self._collate,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip


class Stream:
    """Batches of a dataset that the worker makes itself, begun anew where it ends (T7.5).

    Args:
        recipe: makes the dataset; what it makes is iterated over again and again, unless it is an iterator.
        batching: of what it makes.
        share: takes every n-th batch alone, of n workers; None takes all.
    """

    def __init__(self, recipe: DatasetRecipe, batching: Batching, share: int | None = None) -> None:
        here = current_worker()
        first = 0 if here is None or share is None else here.index
        self._items = WorkerIterator(_endless(batching(recipe()), first, share or 1))

    def take(self, plan: Any) -> Any:  # noqa: ARG002
        """Return the next batch."""
        return next(self._items)

    def batches(self, plan: Any) -> Iterator[Any]:
        """Yield the next batch alone."""
        yield self.take(plan)


def _endless(data: Iterable[Any], first: int, every: int) -> Iterator[Any]:
    while True:
        empty = True
        for batch in itertools.islice(data, first, None, every):
            empty = False
            yield batch
        if isinstance(data, Iterator):
            return
        if empty and every == 1:
            raise DataError(
                "The dataset has no batch. Look at the filter that it was made with, and at the batch size."
            )
        if empty:  # fewer batches than workers: all read all
            first, every = 0, 1


class Shards:
    """A finite dataset that is made for each share of it.

    Args:
        source: a `DatasetCreator`, asked for its share by an `InputContext`; or how to make all of it, as one share.
        batching: of what it makes.
    """

    def __init__(self, source: DatasetCreator | DatasetRecipe, batching: Batching) -> None:
        self._source, self._batching = source, batching

    def batches(self, plan: InputContext) -> Iterator[Any]:
        """Yield the batches of a share.

        Raises:
            UsageError: the dataset has no length, so that nobody knows whether it ends (behaviour 87).
        """
        recipe = self._source if isinstance(self._source, DatasetRecipe) else DatasetRecipe(partial(self._source, plan))
        made = self._batching(recipe())
        return itertools.islice(iter(made), finite_length(made))


def finite_length(data: Any) -> int:
    """Return `len(data)`; what has none is refused, because an evaluation of each example needs an end (behaviour 87)."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"Evaluation with each example exactly once takes a dataset with a length; {type(data).__name__} has none, and may be "
            "endless. Leave out its repeat and give it a __len__ (a list of batches has one), or give steps= (validation_steps= of fit), "
            "which counts batches and promises nothing about examples."
        ) from None
