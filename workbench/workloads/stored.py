"""`cache_dataset`: preprocessing that is the same in every epoch, done once and stored (P1.5).

A folder holds one NumPy file (.npy) for each part of an item, shape (examples, ...), and items.json, which says how an item is
made of them. The files are mapped into memory, so that worker processes share them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from workbench.errors import DataError, UsageError
from workbench.workloads.tensor_leaves import content_hash, leaves

__all__ = ["StoredDataset", "cache_dataset", "item_arrays"]

_NUMBERS = {"bool": bool, "int": int, "float": float}
_SCHEMA = 1


def cache_dataset(data: Any, folder: str | Path) -> StoredDataset:
    """Store every item of a dataset as it comes out of its preprocessing, and return a dataset that reads them.

    The items are the same bit for bit, so batches are. Preprocessing that draws at random cannot be stored; what comes before it
    can. A folder that holds these items already is read, not written again; its first, middle and last item tell whether it does.

    Args:
        data: a map-style dataset; items are made of dicts, lists and tuples of tensors, arrays and numbers, all of one shape.
        folder: is made.

    Raises:
        DataError: items differ from one reading to the next, in shape from each other, or hold something else.
        UsageError: `folder` holds something else, such as another dataset's items, or `data` has no length.

    Source: P1.5 (offline preprocessing).
    """
    path = Path(folder)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(f"data must be a dataset with __len__ and __getitem__, not {type(data).__name__}.")
    if path.exists():
        return _kept(path, data)
    if not len(data):
        raise DataError("the dataset is empty: there is nothing to store.")
    first = data[0]
    if content_hash(first) != content_hash(data[0]):
        raise DataError(
            "item 0 differs from one reading to the next: random preprocessing cannot be stored. Store what comes before it, and "
            "draw afterwards."
        )
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parts = item_arrays(first)
    kept = [
        np.lib.format.open_memmap(partial / f"part{k}.npy", mode="w+", dtype=part.dtype, shape=(len(data), *part.shape))
        for k, part in enumerate(parts)
    ]
    for index in range(len(data)):
        item = first if index == 0 else data[index]
        for array, part, like in zip(kept, item_arrays(item, index), parts, strict=True):
            if part.shape != like.shape or part.dtype != like.dtype:
                raise DataError(
                    f"item {index} holds {part.dtype}{list(part.shape)} where item 0 holds {like.dtype}{list(like.shape)}: "
                    "pad items to one shape, or store them in files of your own."
                )
            array[index] = part
    for array in kept:
        array.flush()
    meta = {"schema": _SCHEMA, "examples": len(data), "item": _form(first)}
    (partial / "items.json").write_text(json.dumps(meta))
    os.replace(partial, path)
    return StoredDataset(path)


def _kept(path: Path, data: Any) -> StoredDataset:
    """Return what a folder holds, if that is the items of `data`."""
    what = "something else"
    if (path / "items.json").is_file():
        found, length = StoredDataset(path), len(data)
        what = f"{len(found)} items, not {length}"
        if len(found) == length:
            other = [k for k in sorted({0, length // 2, length - 1}) if _bits(found[k]) != _bits(data[k])]
            if not other:
                return found
            what = f"other items: item {other[0]} of it is not that of this {type(data).__name__} (or that is drawn at random)"
    raise UsageError(f"{str(path)!r} is there and holds {what}. Name another folder, or delete it.")


def _bits(item: Any) -> tuple[str, list[tuple[str, tuple[int, ...], bytes]]]:
    parts = [(str(part.dtype), part.shape, part.tobytes()) for part in item_arrays(item)]
    return json.dumps(_form(item)), parts


def item_arrays(item: Any, index: int = 0) -> list[NDArray[Any]]:
    """Return the leaves of an item as arrays; a leaf of another kind is a `DataError` that names it and `index`."""
    found = []
    for path, leaf in leaves(item):
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu().contiguous()
            found.append((values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy())
        elif (isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != object) or type(leaf) in _NUMBERS.values():
            found.append(np.asarray(leaf))
        else:
            raise DataError(
                f"{path!r} of item {index} is {type(leaf).__name__}, but only tensors, arrays and numbers can be stored: leave "
                "it out, or make a number of it."
            )
    return found


class StoredDataset(Dataset[Any]):
    """The items that `cache_dataset` has stored, read from files that are mapped into memory.

    Args:
        folder: that it wrote.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._meta = json.loads((self.folder / "items.json").read_text())
        self._arrays: list[NDArray[Any]] | None = None

    def __len__(self) -> int:
        return int(self._meta["examples"])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} items")
        return self._made(self._meta["item"], [array[index] for array in self._open()])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows = [array[np.asarray(indices)] for array in self._open()]
        return [self._made(self._meta["item"], [part[k] for part in rows]) for k in range(len(indices))]

    def __getstate__(self) -> dict[str, Any]:  # files are opened again by each worker
        return self.__dict__ | {"_arrays": None}

    def _open(self) -> list[NDArray[Any]]:
        if self._arrays is None:
            count = len(list(self.folder.glob("part*.npy")))
            self._arrays = [np.load(self.folder / f"part{k}.npy", mmap_mode="r") for k in range(count)]
        return self._arrays

    def _made(self, form: Any, parts: list[NDArray[Any]]) -> Any:
        if isinstance(form, dict):
            return {key: self._made(part, parts) for key, part in form.items()}
        if form[0] == "list":
            return [self._made(part, parts) for part in form[1:]]
        if form[0] == "tuple":
            return tuple(self._made(part, parts) for part in form[1:])
        kind, place, dtype = form
        if kind == "tensor":
            values = torch.from_numpy(np.array(parts[place]))
            return values.view(torch.bfloat16) if dtype == "torch.bfloat16" else values
        return np.array(parts[place]) if kind == "array" else _NUMBERS[kind](parts[place])


def _form(item: Any, counter: list[int] | None = None) -> Any:
    """Return how an item is made of its leaves, as JSON values."""
    counter = [0] if counter is None else counter
    if isinstance(item, Mapping):
        if not all(isinstance(key, str) for key in item):
            raise DataError("keys of an item must be text to be stored.")
        return {key: _form(part, counter) for key, part in item.items()}
    if isinstance(item, (list, tuple)):
        return ["list" if type(item) is list else "tuple", *(_form(part, counter) for part in item)]
    counter[0] += 1
    kind = "tensor" if isinstance(item, Tensor) else type(item).__name__ if type(item) in _NUMBERS.values() else "array"
    return [kind, counter[0] - 1, str(getattr(item, "dtype", ""))]
