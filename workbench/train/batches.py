"""Batches: their order depends on the seed and the step alone, so a resumed run sees the same ones; and the device they go to.

Each epoch is shuffled anew and its incomplete last batch dropped; the examples left out differ from epoch to epoch. An iterable
dataset is read in its own order, by one worker process at most: two would both read all of it. Of many processes that train
together each reads all of it and keeps its share, for the same reason.
"""

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, default_collate

from workbench.config import TrainConfig
from workbench.errors import DataError, DeviceError
from workbench.train.forward import MicroBatches
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all
from workbench.workloads.base import Workload
from workbench.workloads.items import (
    CountedStream,
    HostShare,
    IndexedDataset,
    in_its_own_order,
    item_error,
    plain_tensors,
)

GATHER_BYTES = 16 * 2**20  # rule of thumb: tensors are shuffled in chunks of this size, so that memory stays bounded

Batch = tuple[Any, int]


def resolve_device(device: str) -> torch.device:
    """Return the device of a name; "auto" is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            f"device={device!r} is not known. Allowed: 'auto', 'cpu', 'cuda', 'mps', or one of several, as 'cuda:1'."
        ) from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device={device!r} was asked for, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices "
            "here. Use device='cpu' or device='auto', or install a CUDA build of torch."
        )
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(
            f"device={device!r} was asked for, but torch {torch.__version__} has none here. Use device='cpu' or device='auto'."
        )
    return resolved


class DataStream:
    """Batches of one trial by step, loaded and moved once however many lanes read them.

    What augmentation draws has random state of its own, which depends on `per_host_seed` and rank (P7.6).
    """

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        device: torch.device,
        *,
        start_step: int = 0,
        state: Mapping[str, Tensor] | None = None,
        rank: int = 0,
        hosts: int = 1,
    ) -> None:
        self._draws = plain_tensors(workload.train_data, workload.collate) is None
        self._state: dict[str, Tensor] = {}
        if self._draws:
            with isolated_rng():
                # unlike the words that seed the model's initialisation and dropout
                seed_all(config.per_host_seed, 0, rank)
                self._state = capture_rng()
            self._state |= state or {}
        self._batches = train_batches(workload, config, device, start_step=start_step, rank=rank, hosts=hosts)
        self._ahead: deque[tuple[MicroBatches, dict[str, Tensor]]] = deque()
        self.wait_s = 0.0

    def next(self) -> MicroBatches:
        """Return the micro-batches of the next update."""
        start = time.perf_counter()
        batches, self._state = self._ahead.popleft() if self._ahead else self._draw(self._state)
        self.wait_s = time.perf_counter() - start
        return batches

    def peek(self, count: int) -> list[MicroBatches]:
        """Return the next batches without taking them: `next` will return them again."""
        while len(self._ahead) < count:
            self._ahead.append(self._draw(self._ahead[-1][1] if self._ahead else self._state))
        return [batches for batches, _ in list(self._ahead)[:count]]

    def state(self) -> dict[str, Tensor]:
        """Return the random state that the next batch begins with; empty where nothing is ever drawn."""
        return dict(self._state)

    def _draw(self, state: dict[str, Tensor]) -> tuple[MicroBatches, dict[str, Tensor]]:
        if not self._draws:
            return next(self._batches), {}
        with isolated_rng():
            restore_rng(state)
            return next(self._batches), capture_rng()


def train_batches(
    workload: Workload, config: TrainConfig, device: torch.device, *, start_step: int = 0, rank: int = 0, hosts: int = 1
) -> Iterator[list[Batch]]:
    """Yield for every step from `start_step` on the micro-batches of one update, as (batch, examples) pairs.

    Each of many processes gets its share of every micro-batch: disjoint, and together what one alone would read (P7.4). Random
    preprocessing inside the dataset repeats bit for bit on resume with `num_workers=0`; worker processes are seeded anew.
    """
    whole = config.batch_size // config.accumulate_steps
    micro = whole // hosts
    places = slice(rank * micro, (rank + 1) * micro)
    data, dtype = workload.train_data, _dtype(config.precision)
    first = start_step * config.accumulate_steps
    if in_its_own_order(data):
        stream = CountedStream(data) if hosts == 1 else HostShare(CountedStream(data), places, whole)
        batches = _iterable(workload, stream, micro, first, seed=config.per_host_seed)
    elif workload.num_workers == 0 and (tensors := plain_tensors(data, workload.collate)) is not None:
        batches = _gathered(tensors, _positions(len(data), config, whole, first, places), micro, device)
    else:
        order = (row for rows in _positions(len(data), config, whole, first, places) for row in rows.tolist())
        seed = config.per_host_seed + 1_000_003 * start_step + 999_983 * rank
        indexed = IndexedDataset(data, split="train")
        batches = _loaded(workload, indexed, "train", workload.num_workers, seed=seed, batch_sampler=order)
    while True:
        chunk = list(itertools.islice(batches, config.accumulate_steps))
        if len(chunk) < config.accumulate_steps:
            return
        yield [(to_device(batch, device, dtype), micro) for batch in chunk]


def train_order(examples: int, config: TrainConfig, *, start_step: int = 0) -> Iterator[list[int]]:
    """Yield for every step from `start_step` on the indices of its batch, as `train_batches` reads them."""
    for rows in _positions(examples, config, config.batch_size, start_step):
        yield from rows.tolist()


def eval_batches(
    workload: Workload, split: str, batch_size: int, device: torch.device, precision: str | None
) -> Iterator[Batch]:
    """Yield every example of a split once, in order; the last batch may be smaller."""
    data, dtype = workload.data(split), _dtype(precision)
    batches: Iterator[Any]
    if in_its_own_order(data):
        stream = CountedStream(data, split=split, exact=True)
        batches = iter(DataLoader(stream, batch_size=batch_size, collate_fn=Collate(workload.collate, split)))
    elif (tensors := plain_tensors(data, workload.collate)) is not None:
        batches = ([t[start : start + batch_size] for t in tensors] for start in range(0, len(data), batch_size))
    else:
        order = (list(range(i, min(i + batch_size, len(data)))) for i in range(0, len(data), batch_size))
        indexed = IndexedDataset(data, split=split)
        batches = _loaded(workload, indexed, split, workload.num_workers, seed=0, batch_sampler=order)
    left = len(data)
    for batch in batches:
        yield to_device(batch, device, dtype), min(batch_size, left)
        left -= batch_size


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move every tensor of a nested batch; floating ones are cast to `dtype` where one is given."""
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


def _positions(
    examples: int, config: TrainConfig, whole: int, first: int, places: slice = slice(None)
) -> Iterator[Tensor]:
    """Yield for each epoch the examples of every micro-batch, shape (micro-batches, examples of one), for ever."""
    per_epoch = (examples // config.batch_size) * (config.batch_size // whole)
    epoch, offset = divmod(first, per_epoch)
    while True:
        generator = torch.Generator().manual_seed(config.per_host_seed * 1_000_003 + epoch)
        one_batch = config.batch_size == examples
        order = torch.arange(examples) if one_batch else torch.randperm(examples, generator=generator)
        yield order[: per_epoch * whole].view(-1, whole)[offset:, places]
        epoch, offset = epoch + 1, 0


def _gathered(
    tensors: Sequence[Tensor], positions: Iterator[Tensor], micro: int, device: torch.device
) -> Iterator[list[Tensor]]:
    """Gather many batches at once and hand out views: one copy of each example per epoch, hardly any calls."""
    row_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
    chunk = micro * max(1, GATHER_BYTES // max(1, micro * row_bytes))
    for order in positions:
        for indices in torch.split(order.reshape(-1), chunk):
            moved = (t[indices.to(t.device)].to(device, non_blocking=True) for t in tensors)
            yield from map(list, zip(*(torch.split(t, micro) for t in moved), strict=True))


def _iterable(workload: Workload, data: Dataset[Any], micro: int, skip: int, *, seed: int) -> Iterator[Any]:
    for epoch in itertools.count():
        empty = True
        workers = min(1, workload.num_workers)
        seed_now = seed * 1_000_003 + epoch
        for batch in _loaded(workload, data, "train", workers, seed=seed_now, batch_size=micro, drop_last=True):
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


def _loaded(
    workload: Workload, data: Dataset[Any], split: str, workers: int, *, seed: int, **batching: Any
) -> Iterator[Any]:
    """Yield what a `DataLoader` does, without touching the global random state or leaving a process behind."""
    generator = torch.Generator().manual_seed(seed)
    collate = Collate(workload.collate, split)
    loader: DataLoader[Any] = DataLoader(data, collate_fn=collate, num_workers=workers, generator=generator, **batching)
    batches = iter(loader)
    try:
        yield from batches
    except DataError as error:
        if not workers:
            raise
        raise item_error(error) from error
    except (RuntimeError, OSError, EOFError) as error:
        if not workers or (type(error) is RuntimeError and "DataLoader worker" not in str(error)):
            raise
        raise DataError(
            f"a worker process that reads the {split} split ended without a word (num_workers={workers}; {type(error).__name__}: "
            f"{error}). It was killed, often for memory or shared memory, or the dataset's code ended it: num_workers=0 shows which item does."
        ) from error
    finally:  # a traceback may keep the iterator alive, and its worker processes with it
        getattr(batches, "_shutdown_workers", lambda: None)()


class Collate:
    """Makes a batch of items; an error says of which split, by which function, and what the items are. None is `default_collate`."""

    def __init__(self, collate: Callable[..., Any] | None, split: str) -> None:
        self.collate, self.split = collate or default_collate, split

    def __call__(self, items: Any) -> Any:
        """Return the batch of these items."""
        try:
            return self.collate(items)
        except DataError:
            raise
        except Exception as error:
            kinds = (
                list(dict.fromkeys(kind_of(item) for item in items)) if isinstance(items, list) else [kind_of(items)]
            )
            by = getattr(self.collate, "__name__", type(self.collate).__name__)
            raise DataError(
                f"{by} could not make a batch of the {self.split} split ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Its items "
                f"are {', '.join(kinds[:3])}. Let the dataset return tensors, arrays and numbers of one shape, or give the workload collate=..."
            ) from error


def kind_of(item: Any) -> str:
    """Return what an item or a batch is made of: "(Tensor[32, 3], int)"."""
    if isinstance(item, Mapping):
        parts = [f"{key!r}: {kind_of(part)}" for key, part in itertools.islice(item.items(), 4)]
        return f"{{{', '.join(parts)}{', ...' * (len(item) > 4)}}}"
    if isinstance(item, (tuple, list)):
        return f"({', '.join(kind_of(part) for part in item[:4])}{', ...' * (len(item) > 4)})"
    shape = getattr(item, "shape", None)
    return "None" if item is None else type(item).__name__ + ("" if shape is None else str(list(shape)))
