"""Loaders with one thing changed, drained without a step: what each change is worth, and what workers change (P1.5 to P1.9)."""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from workbench.topics.data.order import probe_workers, untouched
from workbench.topics.input.loaders import closed, is_stream, timed_loader
from workbench.topics.input.loop import Device, run_loop
from workbench.workloads.items import content_hash, example_hashes, without

_TRANSFORMS = ("transform", "transforms", "target_transform")
_IDLE = Device(wait=lambda: None, ahead=False)
_VISITS = 4 * 20
"""Items that `probe_workers` asks for in all, by two workers in two epochs."""


def drain(
    loader: DataLoader[Any], variant: dict[str, Any], data: Any, *, seconds: float, timeout_s: float
) -> dict[str, Any]:
    """Return how fast a variant of a loader gives batches when nobody uses them.

    The first batch of each worker is left out, and where a stream begins again. `data` is what the variant reads, None the loader's own.

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
    """Return the loader that a variant describes by its "workers", "persistent", and "dropped" paths of features, reading `data`."""
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
    """A collate function that gets items without the features at some paths."""

    def __init__(self, collate: Any, paths: Sequence[str]) -> None:
        self.collate, self.paths = collate, frozenset(paths)

    def __call__(self, items: Any) -> Any:
        """Drop and collate."""
        if isinstance(items, list):
            return self.collate([without(item, self.paths) for item in items])
        return self.collate(without(items, self.paths))


class CachedItems(Dataset[Any]):
    """Items that are in memory already, given in turn in the place of all items of a dataset; `indices` are theirs in it."""

    def __init__(self, items: Sequence[Any], length: int, indices: Sequence[Any] = ()) -> None:
        self.items, self.length, self.indices = items, length, indices

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.items[index % len(self.items) if isinstance(index, int) else 0]


class CachedStream(IterableDataset[Any]):
    """Items that are in memory already, in turn, as an iterable dataset of some length."""

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
    """Tell whether items that `cached_items` kept are the same when they are asked for again, or drawn at random anew; None of a stream."""
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


def worker_draws(
    loader: DataLoader[Any], indices: Sequence[Any], *, item_s: float, seconds: float, timeout_s: float
) -> dict[str, Any] | None:
    """Return whether workers draw random numbers of their own; None where that would take too long, or cannot be asked.

    Args:
        indices: some that its sampler gives.
        item_s: that an item takes.
        seconds: that asking may take.
        timeout_s: for a batch.
    """
    if is_stream(loader) or (loader.num_workers and item_s * _VISITS > seconds):
        return None
    return probe_workers(
        loader.dataset, indices=indices, num_workers=loader.num_workers, timeout_s=timeout_s, worker_init_fn=loader.worker_init_fn,
        context=loader.multiprocessing_context, persistent=loader.persistent_workers,
    )  # fmt: skip


def stream_epochs(loader: DataLoader[Any], *, seconds: float, timeout_s: float) -> dict[str, Any] | None:
    """Return whether a stream gives the same examples without workers and with several; None where nobody can tell.

    Where an epoch takes longer than `seconds` to count, workers that begin with the same batches tell that they repeat each other's.

    Returns:
        "workers" that were tried, examples of an epoch "without" and "with_workers" (None where it did not end), "alike" (batches
        that each worker began with, where all did with the same), "same" and "same_contents".
    """
    if not is_stream(loader):
        return None
    workers = max(2, loader.num_workers)
    counts: dict[int, int | None] = {}
    batches: dict[int, list[tuple[str, ...]]] = {0: [], workers: []}
    for count, into in batches.items():
        with untouched(loader), closed(spec_loader(loader, {"workers": count, "persistent": False}, None)) as timed:
            epoch = run_loop(
                timed, lambda batch, into=into: into.append(tuple(example_hashes(batch))), Device(lambda: None, ahead=False),  # type: ignore[misc]
                seconds=seconds, least=max(1, 2 * count), most=10_000, timeout_s=timeout_s, epochs=1,
            )  # fmt: skip
        counts[count] = epoch.ended[0][1] if epoch.ended else None
    one, more = counts[0], counts[workers]
    if one is None or more is None:
        alike = _begin_alike(batches[workers], workers)
        found = {"workers": workers, "without": one, "with_workers": more, "alike": alike}
        return {**found, "same": False, "same_contents": False} if alike else None
    contents = {count: Counter(h for batch in given for h in batch) for count, given in batches.items()}
    lost = workers * ((loader.batch_size or 1) - 1) if loader.drop_last else 0  # each may drop an incomplete batch
    return {
        "workers": workers, "without": one, "with_workers": more, "alike": 0, "same": more == one or 0 < one - more <= lost,
        "same_contents": contents[0] == contents[workers],
    }  # fmt: skip


def _begin_alike(batches: Sequence[tuple[str, ...]], workers: int) -> int:
    """Return how many batches each worker began with, where all of them did with the same ones; 0 where they did not.

    Workers deliver in turns, a batch each. Batches that are all one and the same tell nothing.
    """
    turns = [batches[k : k + workers] for k in range(0, len(batches) - workers + 1, workers)]
    alike = all(len(set(turn)) == 1 for turn in turns)
    return len(turns) if alike and len({example for turn in turns for example in turn[0]}) > 1 else 0


def dataset_length(data: Any) -> int | None:
    """Return the length of a dataset, None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
