"""The stream of batches: its order depends on the seed and the step alone, so a resumed run sees the same batches.

Each epoch is shuffled anew and its incomplete last batch dropped; the examples left out differ from epoch to epoch.
An iterable dataset is read in its own order, and by one worker process at most, whatever `num_workers` says: two
would both read all of it, unless it deals its items out among them itself, and nobody can tell from outside. Many hosts
read all of it, each, and keep their shares, for the same reason.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from workbench.config import TrainConfig
from workbench.errors import DataError
from workbench.workloads.base import Workload
from workbench.workloads.items import (
    CountedStream,
    HostShare,
    IndexedDataset,
    in_its_own_order,
    item_error,
    plain_tensors,
)

__all__ = ["eval_batches", "to_device", "train_batches", "train_order"]

GATHER_BYTES = 16 * 2**20  # rule of thumb: tensors are shuffled in chunks of this size, so that memory stays bounded

Batch = tuple[Any, int]


def train_batches(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    *,
    start_step: int = 0,
    rank: int = 0,
    hosts: int = 1,
) -> Iterator[list[Batch]]:
    """Yield for every step from `start_step` on the micro-batches of one update, as (batch, examples) pairs.

    Of many hosts each gets its share of every micro-batch: disjoint, and together what one host alone would read (P7.4).
    Random preprocessing inside the dataset repeats bit for bit on resume with `num_workers=0`; worker processes are
    seeded anew.
    """
    whole = config.batch_size // config.accumulate_steps
    micro = whole // hosts
    share = _Share(whole, slice(rank * micro, (rank + 1) * micro))
    data = workload.train_data
    dtype = _dtype(config.precision)
    first = start_step * config.accumulate_steps
    if in_its_own_order(data):
        stream = CountedStream(data) if hosts == 1 else HostShare(CountedStream(data), share.places, whole)
        batches = _iterable(workload, stream, micro, first, seed=config.per_host_seed)
    elif workload.num_workers == 0 and (tensors := plain_tensors(data, workload.collate)) is not None:
        batches = _tensors(tensors, share, config, first, device)
    else:
        order = _order(len(data), share, config, first)
        seed = config.per_host_seed + 1_000_003 * start_step + 999_983 * rank
        batches = _loader(workload, "train", data, order, seed=seed)
    while True:
        chunk = list(itertools.islice(batches, config.accumulate_steps))
        if len(chunk) < config.accumulate_steps:
            return
        yield [(to_device(batch, device, dtype), micro) for batch in chunk]


def train_order(examples: int, config: TrainConfig, *, start_step: int = 0) -> Iterator[list[int]]:
    """Yield for every step from `start_step` on the indices of its batch, as `train_batches` reads them."""
    share = _Share(config.batch_size, slice(0, config.batch_size))
    return _order(examples, share, config, start_step)


def eval_batches(
    workload: Workload, split: str, batch_size: int, device: torch.device, precision: str | None
) -> Iterator[Batch]:
    """Yield every example of a split once, in order; the last batch may be smaller."""
    data, dtype = workload.data(split), _dtype(precision)
    batches: Iterator[Any]
    if in_its_own_order(data):
        stream = CountedStream(data, split=split, exact=True)
        batches = iter(DataLoader(stream, batch_size=batch_size, collate_fn=workload.collate))
    elif (tensors := plain_tensors(data, workload.collate)) is not None:
        batches = ([t[start : start + batch_size] for t in tensors] for start in range(0, len(data), batch_size))
    else:
        order = (list(range(i, min(i + batch_size, len(data)))) for i in range(0, len(data), batch_size))
        batches = _loader(workload, split, data, order, seed=0)
    left = len(data)
    for batch in batches:
        examples = min(batch_size, left)
        left -= examples
        yield to_device(batch, device, dtype), examples


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move every tensor of a nested batch; floating ones are cast to `dtype` where one is given.

    An object of another kind, such as a graph, is moved by its own `to(device)`, where it has one.
    """
    if isinstance(batch, Tensor):
        cast = dtype if dtype is not None and batch.is_floating_point() else None
        if cast is None and batch.device == device:
            return batch
        return batch.to(device=device, dtype=cast, non_blocking=True)
    if type(batch) is dict:
        return {key: to_device(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # it may be read by attribute as well
        moved = copy.copy(batch)
        moved.update({key: to_device(value, device, dtype) for key, value in batch.items()})
        return moved
    if isinstance(batch, PackedSequence):  # its lengths stay on the host
        cast = dtype if batch.data.is_floating_point() else None
        return batch.to(device=device, dtype=cast)  # type: ignore[call-arg,arg-type]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, dtype) for value in batch)
    return batch.to(device) if callable(getattr(batch, "to", None)) else batch


def _dtype(precision: str | None) -> torch.dtype | None:
    return {"float32": torch.float32, "float64": torch.float64}.get(precision or "")


def _epoch_order(examples: int, config: TrainConfig, epoch: int) -> Tensor:
    if config.batch_size == examples:
        return torch.arange(examples)
    generator = torch.Generator().manual_seed(config.per_host_seed * 1_000_003 + epoch)
    return torch.randperm(examples, generator=generator)


class _Share(NamedTuple):
    """What one host reads of every micro-batch.

    Attributes:
        whole: examples in a micro-batch of all hosts.
        places: which of them are this host's.
    """

    whole: int
    places: slice


def _positions(examples: int, share: _Share, config: TrainConfig, first: int) -> Iterator[Tensor]:
    """Yield for each epoch the examples of this host, shape (micro-batches, examples of one), for ever.

    Args:
        examples: of the dataset.
        share: of the host.
        config: of the trial.
        first: the micro-batch to begin with.
    """
    whole = share.whole
    per_epoch = (examples // config.batch_size) * (config.batch_size // whole)
    epoch, offset = divmod(first, per_epoch)
    while True:
        order = _epoch_order(examples, config, epoch)[: per_epoch * whole].view(-1, whole)
        yield order[offset:, share.places]
        epoch, offset = epoch + 1, 0


def _order(examples: int, share: _Share, config: TrainConfig, first: int) -> Iterator[list[int]]:
    for order in _positions(examples, share, config, first):
        yield from order.tolist()


def _tensors(
    tensors: Sequence[Tensor], share: _Share, config: TrainConfig, first: int, device: torch.device
) -> Iterator[list[Tensor]]:
    """Gather many batches at once and hand out views: one copy of each example per epoch, hardly any calls."""
    micro = share.places.stop - share.places.start
    row_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
    chunk = micro * max(1, GATHER_BYTES // max(1, micro * row_bytes))
    for order in _positions(len(tensors[0]), share, config, first):
        for indices in torch.split(order.reshape(-1), chunk):
            moved = (t[indices.to(t.device)].to(device, non_blocking=True) for t in tensors)
            gathered = [torch.split(t, micro) for t in moved]
            for parts in zip(*gathered, strict=True):
                yield list(parts)


def _loader(workload: Workload, split: str, data: Any, order: Iterator[list[int]], *, seed: int) -> Iterator[Any]:
    data = IndexedDataset(data, split=split)
    yield from _loaded(workload, data, workload.num_workers, seed=seed, batch_sampler=order)


def _iterable(workload: Workload, data: Dataset[Any], micro: int, skip: int, *, seed: int) -> Iterator[Any]:
    """Yield the batches of one epoch after the other, the first `skip` left out."""
    for epoch in itertools.count():
        empty = True
        workers = min(1, workload.num_workers)
        for batch in _loaded(workload, data, workers, seed=seed * 1_000_003 + epoch, batch_size=micro, drop_last=True):
            empty = False
            if skip:
                skip -= 1
            else:
                yield batch
        if empty:
            raise DataError(
                f"train_data of {workload.name!r} yields fewer than one batch of {micro} examples, though its length is "
                f"{len(workload.train_data)}. An iterable dataset must yield as many examples as its __len__ says."
            )


def _loaded(workload: Workload, data: Dataset[Any], workers: int, *, seed: int, **batching: Any) -> Iterator[Any]:
    """Yield what a `DataLoader` does, without touching the global random state or leaving a process behind."""
    generator = torch.Generator().manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(
        data, collate_fn=workload.collate, num_workers=workers, generator=generator, **batching
    )
    batches = iter(loader)
    try:
        yield from batches
    except DataError as error:
        if not workers:
            raise
        raise item_error(error) from error
    finally:  # a traceback may keep the iterator alive, and its worker processes with it
        getattr(batches, "_shutdown_workers", lambda: None)()
