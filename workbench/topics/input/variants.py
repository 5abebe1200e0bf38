"""Loaders with one thing changed, drained without a step: what each is worth (P1.5 to P1.9); and plain against compressed files (P1.3)."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import DataLoader, Dataset, IterableDataset

from workbench.checks import check_integer
from workbench.topics.data.order import untouched
from workbench.topics.input.loaders import closed, is_stream, timed_loader
from workbench.topics.input.timed_loop import fetch_parts, run_loop
from workbench.workloads.items import content_hash, example_hashes, item_arrays, length_of, without

SHARD_EXAMPLES, READINGS = 256, 5
"""Examples of a file, and readings of each format, of which the median is taken (rule of thumb)."""


def drain(
    loader: DataLoader[Any], variant: dict[str, Any], data: Any, *, seconds: float, timeout_s: float
) -> tuple[dict[str, Any], list[Sequence[Any]]]:
    """Return how fast a variant of a loader gives batches when nobody uses them, and the indices of the first ones where known.

    Returns:
        `variant` with seconds of a batch: "batch_s", "handoff_s" (median until a batch that is ready is here, from another process),
        "cpu_s" (of whoever makes it), "items_s" and "collate_s"; and the indices of the first batches.
    """
    workers = int(variant["workers"])
    lap, ready = max(1, workers), 0.0
    with untouched(loader), closed(spec_loader(loader, variant, data, endless=not is_stream(loader))) as changed:
        found = run_loop(changed, seconds=seconds, least=3 * lap, most=64 * lap, timeout_s=timeout_s)
        if workers:
            pause_s = max(2 * float(np.mean(found.wait_s)), 0.005)
            rest = run_loop(changed, lambda _: time.sleep(pause_s), seconds=seconds / 2, most=10, timeout_s=timeout_s)
            inner = [wait for wait, first in zip(rest.wait_s, rest.first, strict=True) if not first]
            ready = float(np.median(inner)) if inner else 0.0
    gaps = np.array(found.wait_s) + np.array(found.step_s)
    counted = (np.arange(len(gaps)) >= lap) & ~np.array(found.first)
    if workers:  # they deliver in turns, a batch each: whole turns are counted
        counted[lap + (len(gaps) - lap) // lap * lap :] = False
    if not counted.any():  # an epoch is over before every worker has given a batch
        counted[:] = True
    parts = fetch_parts(found.fetched) or {}
    return {
        **variant, "batch_s": float(gaps[counted].mean()), "handoff_s": ready, **{name: parts[name] for name in ("cpu_s", "items_s", "collate_s")},
    }, found.indices[: 16 * lap]  # fmt: skip


def spec_loader(
    loader: DataLoader[Any], variant: dict[str, Any], data: Any = None, *, endless: bool = False
) -> DataLoader[Any]:
    """Return the loader that a variant describes by its "workers", "persistent", and "dropped" paths of features, reading `data`."""
    dropped = variant.get("dropped")
    return timed_loader(
        loader, num_workers=variant.get("workers"), persistent_workers=variant.get("persistent"), dataset=data,
        collate=Dropping(loader.collate_fn, dropped) if dropped else None, endless=endless,
    )  # fmt: skip


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

    def __init__(self, items: Sequence[Any], length: int, indices: Sequence[Any]) -> None:
        self.items, self.length, self.indices = items, length, indices

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.items[index % len(self.items) if isinstance(index, int) else 0]


def cached_items(loader: DataLoader[Any], *, seconds: float, most: int = 64) -> CachedItems:
    """Return a dataset of the first items of a loader's, fetched once, as many as come in some seconds."""
    items, indices, began = list[Any](), list[Any](), time.perf_counter()
    data: Any = loader.dataset
    drawn = loader.sampler if loader.batch_sampler is None else itertools.chain.from_iterable(loader.batch_sampler)
    source = enumerate(data) if is_stream(loader) else ((index, data[index]) for index in drawn)
    for index, item in itertools.islice(source, most):
        items.append(item)
        indices.append(index)
        if time.perf_counter() - began > seconds:
            break
    return CachedItems(items, length_of(data) or len(items), indices)


def items_repeat(data: Any, kept: CachedItems, *, seconds: float, most: int = 16) -> bool | None:
    """Tell whether items that `cached_items` kept are the same when they are asked for again, or drawn at random anew; None of a stream."""
    if isinstance(data, IterableDataset):
        return None
    began = time.perf_counter()
    for index, item in itertools.islice(zip(kept.indices, kept.items, strict=True), most):
        if content_hash(data[index]) != content_hash(item):
            return False
        if time.perf_counter() - began > seconds:
            break
    return True


def draws_alike(loader: DataLoader[Any], *, most: int = 64) -> bool:
    """Tell whether a sampler gives the same order again from the same random state: some have a state of their own."""
    drawn = []
    for _ in range(2):
        with untouched(loader):
            source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            drawn.append([list(d) if isinstance(d, (list, tuple)) else d for d in itertools.islice(source, most)])
    return len(drawn[0]) == len(drawn[1]) and all(bool(np.all(a == b)) for a, b in zip(*drawn, strict=True))


def stream_epochs(loader: DataLoader[Any], *, seconds: float, timeout_s: float) -> dict[str, Any] | None:
    """Return whether a stream gives the same examples without workers and with several; None where nobody can tell.

    Returns:
        "workers" that were tried, examples of an epoch "without" and "with_workers" (None where it did not end), "alike" (batches
        that each worker began with, where all did with the same) and "same".
    """
    if not is_stream(loader):
        return None
    workers = max(2, loader.num_workers)
    counts: list[int | None] = []
    hashes: list[list[tuple[str, ...]]] = []
    for count in (0, workers):
        hashes.append([])
        with untouched(loader), closed(spec_loader(loader, {"workers": count, "persistent": False})) as timed:
            epoch = run_loop(
                timed, lambda batch: hashes[-1].append(tuple(example_hashes(batch))), seconds=seconds, least=max(1, 2 * count),
                most=10_000, timeout_s=timeout_s, epochs=1,
            )  # fmt: skip
        counts.append(epoch.ended[0][1] if epoch.ended else None)
    one, more = counts
    found = {"workers": workers, "without": one, "with_workers": more, "alike": 0, "same": False}
    if one is None or more is None:
        # workers deliver in turns, a batch each; batches that are all one and the same tell nothing
        turns = [hashes[1][k : k + workers] for k in range(0, len(hashes[1]) - workers + 1, workers)]
        differ = len({example for turn in turns for example in turn[0]}) > 1
        alike = all(len(set(turn)) == 1 for turn in turns) and differ
        return found | {"alike": len(turns)} if alike else None
    lost = workers * ((loader.batch_size or 1) - 1) if loader.drop_last else 0  # each may drop an incomplete batch
    return found | {"same": more == one or 0 < one - more <= lost}


def compare_storage(data: Any, folder: str | Path, *, examples: int = 4096) -> pd.DataFrame:
    """Store the same examples as plain and as compressed files, and read them back, turn and turn about.

    Files that have just been written are in the system's memory: what is compared is unpacking, not the disk. On a disk or a
    network that gives `read_bytes_per_s` less, the smaller files win.

    Args:
        data: a map-style dataset of tensors, arrays and numbers; where it has fewer `examples`, it is gone through again.
        folder: for the files; made, and what of the same names is there is written again.
        examples: to store.

    Returns:
        One row a format: storage ("plain", "compressed": NumPy's archive as it is, and deflated by zlib), files, bytes_per_example,
        examples_per_s, and read_bytes_per_s: from which speed of the disk on the format, and not the disk, sets the pace.

    Raises:
        ConfigError: `examples` is below 1.
        DataError: an item holds what cannot be stored.

    Source: P1.3 (a small footprint on disk can slow the input pipeline).
    """
    check_integer("examples", examples)
    items = [item_arrays(data[index % len(data)], index) for index in range(examples)]
    stored: dict[str, list[Path]] = {"plain": [], "compressed": []}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for start in range(0, examples, SHARD_EXAMPLES):
        arrays = [np.stack(column) for column in zip(*items[start : start + SHARD_EXAMPLES], strict=True)]
        for (storage, files), save in zip(stored.items(), (np.savez, np.savez_compressed), strict=True):
            files.append(Path(folder) / f"{storage}-{start:08d}.npz")
            save(files[-1], *arrays)
    seconds: dict[str, list[float]] = {storage: [] for storage in stored}
    for _, (storage, files) in itertools.product(range(READINGS), stored.items()):
        began = time.perf_counter()
        for file in files:
            with np.load(file) as archive:
                _ = [archive[name] for name in archive.files]
        seconds[storage].append(time.perf_counter() - began)
    rows = []
    for storage, files in stored.items():
        each = sum(file.stat().st_size for file in files) / examples
        rate = examples / float(np.median(seconds[storage]))
        rows.append({"storage": storage, "files": len(files), "bytes_per_example": each, "examples_per_s": rate, "read_bytes_per_s": rate * each})  # fmt: skip
    return pd.DataFrame(rows)
