"""`compare_storage`: bytes on disk against examples per second, for the same examples in plain and compressed files (P1.3)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from workbench.checks import check_integer
from workbench.workloads.items import item_arrays

STORAGES = ("npy", "npz", "npz_compressed")
"""NumPy's formats: one array a file, mapped into memory; an archive as it is; an archive deflated by zlib."""


def compare_storage(
    data: Any,
    folder: str | Path,
    *,
    examples: int = 4096,
    shard_examples: int = 256,
    batch_size: int = 64,
    repeats: int = 5,
) -> pd.DataFrame:
    """Store the same examples in each format and read them back through a `DataLoader`, turn and turn about.

    Files that have just been written are in the system's memory: what is compared is unpacking, not the disk. On a disk or a
    network that gives `read_bytes_per_s` less, the smaller files win.

    Args:
        data: a map-style dataset of tensors, arrays and numbers; where it has fewer `examples`, it is gone through again.
        folder: for the files; made, and what of the same names is there is written again.
        examples: to store.
        repeats: readings of each format; medians are taken.

    Returns:
        One row a format: storage, files, bytes, bytes_per_example, examples_per_s, cpu_us_per_example, and read_bytes_per_s: from
        which speed of the disk on the format, and not the disk, sets the pace.

    Raises:
        ConfigError: a number is below 1.
        DataError: an item holds what cannot be stored.

    Source: P1.3 (a small footprint on disk can slow the input pipeline).
    """
    numbers = {"examples": examples, "shard_examples": shard_examples, "batch_size": batch_size, "repeats": repeats}
    for name, value in numbers.items():
        check_integer(name, value)
    rows = [item_arrays(data[index % len(data)], index) for index in range(examples)]
    stacked = [np.stack([row[k] for row in rows]) for k in range(len(rows[0]))]
    stored = {storage: _store(stacked, storage, Path(folder) / storage, shard_examples) for storage in STORAGES}
    seconds: dict[str, list[tuple[float, float]]] = {storage: [] for storage in STORAGES}
    for _, (storage, files) in itertools.product(range(repeats), stored.items()):
        began, worked = time.perf_counter(), time.process_time()
        read = sum(len(batch[0]) for batch in DataLoader(_Shards(storage, files), batch_size=batch_size))
        seconds[storage].append((time.perf_counter() - began, time.process_time() - worked))
        assert read == examples
    table = []
    for storage, files in stored.items():
        size = sum(file.stat().st_size for file in files)
        wall_s, cpu_s = (float(value) for value in np.median(np.array(seconds[storage]), axis=0))
        rate = examples / wall_s
        table.append(
            {"storage": storage, "files": len(files), "bytes": size, "bytes_per_example": size / examples,
             "examples_per_s": rate, "cpu_us_per_example": 1e6 * cpu_s / examples, "read_bytes_per_s": rate * size / examples}
        )  # fmt: skip
    return pd.DataFrame(table)


def _store(stacked: list[NDArray[Any]], storage: str, folder: Path, shard_examples: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for start in range(0, len(stacked[0]), shard_examples):
        shard = [array[start : start + shard_examples] for array in stacked]
        if storage == "npy":
            for k, array in enumerate(shard):
                files.append(folder / f"{start:08d}.{k}.npy")
                np.save(files[-1], array)
            continue
        files.append(folder / f"{start:08d}.npz")
        save = np.savez if storage == "npz" else np.savez_compressed
        save(files[-1], *shard)
    return files


class _Shards(IterableDataset[Any]):
    """Examples of the files of one format, one file after the other."""

    def __init__(self, storage: str, files: list[Path]) -> None:
        self.storage, self.files = storage, files

    def __iter__(self) -> Iterator[Any]:
        if self.storage == "npy":
            groups = itertools.groupby(self.files, key=lambda file: file.name.partition(".")[0])
            shards = ([np.load(file, mmap_mode="r") for file in group] for _, group in groups)
        else:
            shards = (self._unpacked(file) for file in self.files)
        for arrays in shards:
            yield from zip(*(np.array(array) for array in arrays), strict=True)

    def _unpacked(self, file: Path) -> list[NDArray[Any]]:
        with np.load(file) as archive:
            return [archive[f"arr_{k}"] for k in range(len(archive.files))]
