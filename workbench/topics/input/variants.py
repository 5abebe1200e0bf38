"""Loaders with one thing changed, drained without a step: what each change is worth (P1.5, P1.7, P1.8, P1.9)."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from workbench.topics.data.order import untouched
from workbench.topics.input.described import dataset_length
from workbench.topics.input.loaders import closed, is_stream, timed_loader
from workbench.topics.input.loop import Device, run_loop
from workbench.workloads.items import content_hash, without

__all__ = [
    "CachedItems",
    "CachedStream",
    "Dropping",
    "cached_items",
    "drain",
    "draws_alike",
    "items_repeat",
    "null_transform",
    "spec_loader",
]

_TRANSFORMS = ("transform", "transforms", "target_transform")
_IDLE = Device(wait=lambda: None, ahead=False)


def drain(
    loader: DataLoader[Any], variant: dict[str, Any], data: Any, *, seconds: float, timeout_s: float
) -> dict[str, Any]:
    """Return how fast a variant of a loader gives batches when nobody uses them.

    The first batch of each worker is left out, and where a stream begins again.

    Args:
        loader: the person's own.
        variant: "change", "value" and the settings of `spec_loader`.
        data: what the variant reads, None the loader's own dataset.
        seconds: to go on for.
        timeout_s: for a batch.

    Returns:
        `variant`, "batch_s", "handoff_s" (until a batch that is ready is here, from another process), "cpu_s" (of
        whoever makes it), "batches", and "indices" of the first ones where they are known.
    """
    workers = int(variant["workers"])
    lap = max(1, workers)
    with untouched(loader), closed(spec_loader(loader, variant, data, endless=not is_stream(loader))) as changed:
        found = run_loop(changed, None, _IDLE, seconds=seconds, least=3 * lap, most=64 * lap, timeout_s=timeout_s)
        ready = _ready(changed, 2 * float(np.mean(found.wait_s)), seconds, timeout_s) if workers else 0.0
    gaps, first = np.array(found.wait_s) + np.array(found.step_s), np.array(found.first)
    counted = np.arange(len(gaps)) >= lap
    counted &= ~first
    if workers:  # they deliver in turns, a batch each: whole turns are counted
        counted[lap + (len(gaps) - lap) // lap * lap :] = False
    if not counted.any():  # an epoch is over before every worker has given a batch
        counted[:] = True
    cpu = [items.cpu_s + collate.cpu_s for items, collate in found.fetched]
    return {
        **variant,
        "batch_s": float(gaps[counted].mean()),
        "handoff_s": ready,
        "cpu_s": float(np.mean(cpu)),
        "items_s": float(np.mean([items.wall_s for items, _ in found.fetched])),
        "collate_s": float(np.mean([collate.wall_s for _, collate in found.fetched])),
        "batches": int(counted.sum()),
        "examples": float(np.mean([len(i) for i in found.indices])),
        "indices": found.indices[: 16 * lap],
    }


def _ready(loader: Any, pause_s: float, seconds: float, timeout_s: float) -> float:
    """Return the median seconds until a batch is here that a worker has had ready for a while."""
    pause_s = max(pause_s, 0.005)
    found = run_loop(
        loader, lambda _: time.sleep(pause_s), _IDLE, seconds=seconds / 2, least=4, most=10, timeout_s=timeout_s
    )
    inner = [wait for wait, first in zip(found.wait_s, found.first, strict=True) if not first]
    return float(np.median(inner)) if inner else 0.0


def spec_loader(
    loader: DataLoader[Any], variant: dict[str, Any], data: Any, *, endless: bool = False
) -> DataLoader[Any]:
    """Return the loader that a variant describes: "workers", "persistent", and "dropped" paths of features.

    Args:
        loader: the person's own.
        variant: its settings; those that are missing are the loader's.
        data: what it reads, None the loader's own dataset.
        endless: begin the sampler again when it is through.
    """
    dropped = variant.get("dropped")
    return timed_loader(
        loader,
        num_workers=variant.get("workers"),
        persistent_workers=variant.get("persistent"),
        dataset=data,
        collate=Dropping(loader.collate_fn, dropped) if dropped else None,
        endless=endless,
    )


class Dropping:
    """A collate function that gets items without some of their features.

    Args:
        collate: the loader's own.
        paths: of the features.
    """

    def __init__(self, collate: Any, paths: Sequence[str]) -> None:
        self.collate, self.paths = collate, frozenset(paths)

    def __call__(self, items: Any) -> Any:
        """Drop and collate."""
        if isinstance(items, list):
            return self.collate([without(item, self.paths) for item in items])
        return self.collate(without(items, self.paths))


class CachedItems(Dataset[Any]):
    """Items that are in memory already, in the place of all items of a dataset.

    Args:
        items: given in turn.
        length: of the dataset that they stand for.
        indices: of these items in that dataset.
    """

    def __init__(self, items: Sequence[Any], length: int, indices: Sequence[Any] = ()) -> None:
        self.items, self.length, self.indices = items, length, indices

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.items[index % len(self.items) if isinstance(index, int) else 0]


class CachedStream(IterableDataset[Any]):
    """Items that are in memory already, as an iterable dataset of some length.

    Args:
        items: given in turn.
        length: how many to give.
    """

    def __init__(self, items: Sequence[Any], length: int) -> None:
        self.items, self.length = items, length

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.items), self.length)


def cached_items(loader: DataLoader[Any], *, seconds: float, most: int = 64) -> Any:
    """Return a dataset of the first items of a loader's, fetched once, as many as come in some seconds."""
    items: list[Any] = []
    indices: list[Any] = []
    began = time.perf_counter()
    data: Any = loader.dataset
    if is_stream(loader):
        source: Iterator[Any] = enumerate(data)
    else:
        source = ((index, data[index]) for index in _indices(loader))
    for index, item in itertools.islice(source, most):
        items.append(item)
        indices.append(index)
        if time.perf_counter() - began > seconds:
            break
    if is_stream(loader):
        return CachedStream(items, 100_000)
    return CachedItems(items, dataset_length(data) or len(items), indices)


def items_repeat(data: Any, kept: Any, *, seconds: float, most: int = 16) -> bool | None:
    """Tell whether items are the same when they are asked for again, or drawn at random anew; None of a stream.

    Args:
        data: the dataset.
        kept: the items that `cached_items` got of it.
        seconds: to go on for; one item is asked for all the same.
        most: items to ask for.
    """
    if not isinstance(kept, CachedItems):
        return None
    began = time.perf_counter()
    for index, item in itertools.islice(zip(kept.indices, kept.items, strict=True), most):
        if content_hash(data[index]) != content_hash(item):
            return False
        if time.perf_counter() - began > seconds:
            break
    return True


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    if loader.batch_sampler is None:
        return iter(loader.sampler)
    return itertools.chain.from_iterable(loader.batch_sampler)


def draws_alike(loader: DataLoader[Any], *, most: int = 64) -> bool:
    """Tell whether a sampler gives the same order again from the same random state: some have a state of their own."""
    drawn = []
    for _ in range(2):
        with untouched(loader):
            source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            drawn.append([list(d) if isinstance(d, (list, tuple)) else d for d in itertools.islice(source, most)])
    return len(drawn[0]) == len(drawn[1]) and all(bool(np.all(a == b)) for a, b in zip(*drawn, strict=True))


def null_transform(data: Any) -> tuple[Any, list[str]]:
    """Return a shallow copy of a dataset whose transforms do nothing, and their names; (None, []) where it has none."""
    names = [name for name in _TRANSFORMS if callable(getattr(data, name, None))]
    if not names:
        return None, []
    plain = copy.copy(data)
    for name in names:
        setattr(plain, name, _unchanged)
    return plain, [f"{name}={type(getattr(data, name)).__name__}" for name in names]


def _unchanged(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values
