"""`training_feed` and `evaluation_feed`: whatever data `fit` is given, as one source a worker and one plan a step (T14.11)."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from workbench.config import TrainConfig
from workbench.errors import DataError, UsageError
from workbench.parameter_server.context import current_worker
from workbench.parameter_server.data.datasets import (
    DatasetCreator,
    DatasetRecipe,
    DistributedDataset,
    InputContext,
    as_dataset_recipe,
    takes_context,
)
from workbench.parameter_server.workers.worker import WorkerIterator
from workbench.train.batches import train_order
from workbench.workloads.items import IndexedDataset, in_its_own_order, length_of, plain_tensors

Collate = Callable[[list[Any]], Any]  # list of items -> batch
SHARDS_PER_WORKER = 5
"""Shards of an evaluation: few enough to cost little, enough that a lost worker costs little (TensorFlow's number)."""


@dataclass(frozen=True)
class Feed:
    """Batches for the workers."""

    make: Callable[[], Any]  # called on each worker, returns its source
    plans: Callable[[int], Iterator[Any]]  # what goes with each step, from a step on, or with each share
    steps_per_epoch: int | None = None  # where the data's length says it


class IndexedBatches:
    """A copy of a map-style dataset; which examples a step reads is decided on the coordinator, so that each is read once an epoch."""

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self._tensors = plain_tensors(dataset, collate)
        self._items, self._collate = IndexedDataset(dataset), collate or default_collate

    def take(self, plan: Sequence[int]) -> Any:
        """Return the batch of these examples."""
        if self._tensors is not None:
            rows = torch.as_tensor(plan)
            return [tensor[rows] for tensor in self._tensors]
        return self._collate(self._items.__getitems__(list(plan)))

    def batches(self, plan: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield the batches of these lists of examples."""
        return map(self.take, plan)


@dataclass(frozen=True)
class Batching:
    """Cuts a torch dataset of examples into shuffled batches; anything else is taken for batches as it is."""

    batch_size: int
    collate: Collate | None
    seed: int | None  # mixed with the worker's index; None keeps the order and the incomplete last batch

    def __call__(self, made: Any) -> Iterable[Any]:
        """Return something to iterate over, batch by batch."""
        if not isinstance(made, Dataset):
            found: Iterable[Any] = made
            return found
        trains, here = self.seed is not None, current_worker()
        seed = (self.seed or 0) * 1_000_003 + (here.index if trains and here is not None else 0)
        return DataLoader(
            made, self.batch_size, shuffle=(trains and not isinstance(made, IterableDataset)) or None, drop_last=trains,
            collate_fn=self.collate, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip


class Stream:
    """Batches of a dataset that the worker makes itself, begun anew where it ends (T7.5); with `share` workers every so many-th alone."""

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
            raise DataError("The dataset has no batch. Look at the filter that it was made with, and the batch size.")
        if empty:  # fewer batches than workers: all read all
            first, every = 0, 1


class Shards:
    """A finite dataset that is made for each share of it: a `DatasetCreator` is asked by an `InputContext`, a recipe makes all as one share."""

    def __init__(self, source: DatasetCreator | DatasetRecipe, batching: Batching) -> None:
        self._source, self._batching = source, batching

    def batches(self, plan: InputContext) -> Iterator[Any]:
        """Yield the batches of a share; raises `UsageError` where nobody knows whether it ends (behaviour 87)."""
        recipe = self._source if isinstance(self._source, DatasetRecipe) else DatasetRecipe(partial(self._source, plan))
        made = self._batching(recipe())
        return itertools.islice(iter(made), _finite_length(made))


def _finite_length(data: Any) -> int:
    """Return `len(data)`; what has none is refused, because an evaluation of each example needs an end (behaviour 87)."""
    length = length_of(data)
    if length is None:
        raise UsageError(
            f"Evaluation with each example exactly once takes a dataset with a length; {type(data).__name__} has none, and may be "
            "endless. Leave out its repeat and give it a __len__ (a list of batches has one), or give steps= (validation_steps= of fit), "
            "which counts batches and promises nothing about examples."
        )
    return length


def as_data(data: Any, y: Any = None, *, precision: str | None = None) -> Any:
    """Return arrays and tensors, alone, in pairs or as x and y, as a dataset, and a function as a recipe; other data as it is.

    Floating NumPy arrays become float64 for that precision, and torch's default dtype for any other.
    """
    columns = [data] if y is None else [data, y]
    if y is None and isinstance(data, tuple) and data and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        columns = list(data)
    if all(isinstance(column, (Tensor, np.ndarray)) for column in columns):
        dtype = torch.float64 if precision == "float64" else torch.get_default_dtype()
        tensors = [
            torch.as_tensor(c).to(dtype) if isinstance(c, np.ndarray) and c.dtype.kind == "f" else torch.as_tensor(c)
            for c in columns
        ]
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise UsageError(f"x and y have {lengths} examples; they have to have the same number.")
        return TensorDataset(*tensors)
    if y is not None:
        raise UsageError(
            f"y= goes with x as an array or a tensor; given: {type(data).__name__} and {type(y).__name__}. Make arrays of them by "
            "numpy.asarray; a dataset holds both."
        )
    if isinstance(data, Mapping) and 0 not in data:
        raise UsageError(
            f"data is a dict with the keys {[*data][:4]}; its columns are no examples. Give arrays, fit(x, y), or a dataset whose items are "
            "dicts, such as [{name: column[k] for name, column in data.items()} for k in range(examples)]."
        )
    if hasattr(data, "iloc"):
        raise UsageError(
            f"data is a {type(data).__name__}, whose items are columns and no examples. Give arrays: "
            "fit(frame[features].to_numpy(), frame[target].to_numpy())."
        )
    known = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if isinstance(data, DatasetCreator) or (known and not isinstance(data, type)):
        if isinstance(data, Iterator):
            as_dataset_recipe(data)  # which refuses it
        return data
    if callable(data):
        return DatasetCreator(data) if takes_context(data) else as_dataset_recipe(data)
    raise UsageError(
        f"data={data!r} is no data. Allowed: a DatasetCreator, a function that makes a dataset, a DataLoader, a dataset, arrays."
    )


def training_feed(data: Any, config: TrainConfig, collate: Collate | None, *, num_workers: int) -> Feed:
    """Return batches without end for training.

    A dataset with indices is read once an epoch by all workers together: the coordinator draws the order, as the trainer does. A
    stream that is given as it is, is shared out batch by batch. What a function makes, each worker reads for itself (T7.4).
    """
    batching = Batching(config.batch_size, collate, config.per_host_seed)
    if not _indexed(data):
        length = None if isinstance(data, (DatasetCreator, DatasetRecipe)) else length_of(data)
        if length is not None and isinstance(data, Dataset):
            length //= config.batch_size
        return _stream(data, batching, num_workers, length=length)
    if isinstance(data, DataLoader):
        return Feed(partial(IndexedBatches, data.dataset, data.collate_fn), partial(_loader_order, data), len(data))
    if len(data) < config.batch_size:
        raise DataError(
            f"batch_size={config.batch_size} is more than the {len(data)} examples of the dataset. Give at most that."
        )
    order = partial(train_order, len(data), config)
    return Feed(
        partial(IndexedBatches, data, collate), lambda step: order(start_step=step), len(data) // config.batch_size
    )


def evaluation_feed(
    data: Any, batch_size: int, collate: Collate | None, *, num_workers: int, shards: int | None, steps: int | None
) -> Feed:
    """Return the shares of a finite dataset, 5 a worker or so many, that hold each example once; or `steps` batches of whatever the data gives."""
    batching = Batching(batch_size, collate, None)
    shards = shards or SHARDS_PER_WORKER * num_workers
    if not _indexed(data):
        if steps is not None:
            return _stream(data, batching, num_workers, times=(steps,))
        if isinstance(data, DatasetCreator):
            contexts = [InputContext(shards, shard) for shard in range(shards)]
            return Feed(partial(Shards, data, batching), lambda _: iter(contexts))
        if not isinstance(data, DatasetRecipe):
            _finite_length(data)
            data = DatasetRecipe(data)
        return Feed(partial(Shards, data, batching), lambda _: iter([None]))
    if isinstance(data, DataLoader):
        batches = [list(each) for each in data.batch_sampler or []]
        data, collate = data.dataset, data.collate_fn
    else:
        examples = range(_finite_length(data))
        batches = [list(examples[at : at + batch_size]) for at in range(0, len(examples), batch_size)]
    if not batches:
        raise DataError("The dataset to evaluate has no examples. Look at the filter or path that it was made with.")
    if steps is not None and steps > len(batches):
        raise UsageError(f"steps={steps} is more than the {len(batches)} batches of the dataset.")
    batches = batches[:steps]
    edges = [len(batches) * shard // shards for shard in range(shards + 1)]
    shares = [batches[begin:end] for begin, end in itertools.pairwise(edges) if end > begin]
    return Feed(partial(IndexedBatches, data, collate), lambda _: iter(shares))


def _indexed(data: Any) -> bool:
    """Whether examples can be read by their indices, so that the coordinator says which."""
    if isinstance(data, DataLoader):
        stream = isinstance(data.dataset, IterableDataset)
        return data.batch_sampler is not None and not stream and length_of(data) is not None
    return not isinstance(data, (DatasetCreator, DatasetRecipe)) and not in_its_own_order(data)


def _stream(
    data: Any, batching: Batching, num_workers: int, *, times: tuple[int, ...] = (), length: int | None = None
) -> Feed:
    """Return what the workers make themselves, each for itself, or share out where it is a dataset; without end, or so many times."""
    share = None if isinstance(data, (DatasetCreator, DatasetRecipe)) else num_workers
    if isinstance(data, DatasetCreator):
        data = DistributedDataset(data, num_workers)
    recipe = data if isinstance(data, DatasetRecipe) else DatasetRecipe(data)
    return Feed(partial(Stream, recipe, batching, share), lambda _: itertools.repeat(None, *times), length)


def _loader_order(loader: DataLoader[Any], start_step: int) -> Iterator[list[int]]:
    """Yield the loader's batches of indices for ever; where it shuffles, a resumed run sees another order."""
    skip = start_step % len(loader)
    while True:
        for batch in itertools.islice(loader.batch_sampler or [], skip, None):
            yield list(batch)
        skip = 0
