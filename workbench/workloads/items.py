"""Datasets and their items: read by index or in order, the leaves of an item and their hash, items stored (P1.5) or delayed (P1.4)."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from workbench.errors import ConfigError, DataError, UsageError


def in_its_own_order(data: Any) -> bool:
    """Tell whether a dataset can only be read from its beginning on, not by index."""
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def plain_tensors(data: Any, collate: Callable[..., Any] | None = None) -> tuple[Tensor, ...] | None:
    """Return the tensors whose rows are the items of a dataset; None where items, or batches by `collate`, may be anything else."""
    return data.tensors if type(data) is TensorDataset and collate is None else None


class IndexedDataset(Dataset[Any]):
    """A map-style dataset that names the index, and the split, of an item that raises; `split` is None where it is no split of a workload."""

    def __init__(self, data: Any, *, split: str | None = "train") -> None:
        self.data, self.split = data, split

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.data[index]
        except Exception as error:
            length = len(self) if hasattr(self.data, "__len__") else None
            if isinstance(error, IndexError) and length is not None and not -length <= index < length:
                raise  # past the end, as for any sequence
            size = "" if length is None else f", {length} examples"
            raise DataError(
                f"item {index} of {_named(self.split, self.data, size)} raised {type(error).__name__}: {error}. "
                f"Look at it alone: {_variable(self.split)}[{index}]."
            ) from error

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of `indices`, in one call where the wrapped dataset takes one; a `DataError` names the first that raises alone."""
        fetch = getattr(self.data, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in indices]
        try:
            items: list[Any] = fetch(indices)
        except Exception as error:
            for index in indices:
                self[index]
            raise DataError(
                f"items {list(indices)} of {_named(self.split, self.data)} raised "
                f"{type(error).__name__}: {error}, together but not one by one. Look at its __getitems__."
            ) from error
        return items


def _named(split: str | None, data: Any, size: str = "") -> str:
    owner = "loader's dataset" if split is None else f"{split} split"
    return f"the {owner} ({type(data).__name__}{size})"


def _variable(split: str | None) -> str:
    return "loader.dataset" if split is None else f"{split}_data"


class HostShare(IterableDataset[Any]):
    """One process's share of an iterable dataset; all of it has to be read to know which items those are."""

    def __init__(self, data: Any, share: slice, whole: int) -> None:
        self.data, self.share, self.whole = data, share, whole

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for item in self.data:
            waiting.append(item)
            if len(waiting) == self.whole:
                yield from waiting[self.share]
                waiting.clear()


class CountedStream(IterableDataset[Any]):
    """An iterable dataset that names the place of an item that raises.

    With `exact` it must yield as many items as its length says: a split is evaluated whole, or not at all.
    """

    def __init__(self, data: Any, *, split: str | None = "train", exact: bool = False) -> None:
        self.data, self.split, self.exact = data, split, exact

    def __iter__(self) -> Iterator[Any]:
        place, more = 0, False
        try:
            for item in self.data:
                more = self.exact and place == len(self.data)
                if more:
                    break
                yield item
                place += 1
        except Exception as error:
            raise DataError(
                f"item {place} of {_named(self.split, self.data, ', in its own order')} raised {type(error).__name__}: {error}. "
                f"Look at it alone: iterate over {_variable(self.split)}."
            ) from error
        if self.exact and (more or place < len(self.data)):
            raise DataError(
                f"the {self.split} split ({type(self.data).__name__}, in its own order) yields {'more than ' * more}{place} examples, "
                f"though its length is {len(self.data)}. An iterable dataset must yield as many examples as its __len__ says, each "
                "once: a metric over another number is a metric of other data."
            )


def item_error(error: DataError) -> DataError:
    """Return the error of a worker process without what the loader wrapped it in."""
    return DataError(str(error).rsplit(f"{DataError.__module__}.{DataError.__qualname__}: ", 1)[-1].strip())


class Delayed(Dataset[Any]):
    """A map-style dataset each of whose items comes `latency_s` seconds later: what would it cost to keep the data elsewhere (P1.4)?

    Raises:
        ConfigError: `latency_s` is no finite number of at least 0.
        UsageError: `data` is no map-style dataset.
    """

    def __init__(self, data: Any, latency_s: float) -> None:
        if isinstance(latency_s, bool) or not isinstance(latency_s, (int, float)) or not 0 <= latency_s < math.inf:
            raise ConfigError(f"latency_s={latency_s!r} must be a finite number of seconds of at least 0.")
        _check_map_style(data)
        self.data, self.latency_s = data, float(latency_s)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.latency_s)
        return self.data[index]


def _check_map_style(data: Any) -> None:
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(f"data must be a dataset with __len__ and __getitem__, not {type(data).__name__}.")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, lists and tuples, each with its path: "image", "meta/file", "0"."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)) and not _is_column(value):
        parts = [(str(place), part) for place, part in enumerate(value)]
    else:
        yield path or "item", value
        return
    for name, part in parts:
        yield from leaves(part, f"{path}/{name}" if path else name)


def without(value: Any, dropped: frozenset[str], path: str = "") -> Any:
    """Return nested mappings without the leaves of these paths; a tuple keeps its places, with 0 where a leaf was."""
    if isinstance(value, Mapping):
        kept = {key: f"{path}/{key}" if path else str(key) for key in value}
        return {key: without(value[key], dropped, at) for key, at in kept.items() if at not in dropped}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(without(part, dropped, f"{path}/{name}" if path else name) for name, part in named))
    if isinstance(value, (list, tuple)) and not _is_column(value):
        return type(value)(without(p, dropped, f"{path}/{i}" if path else str(i)) for i, p in enumerate(value))
    return 0 if path in dropped else value


def fresh_containers(value: Any) -> Any:
    """Return the same leaves in containers of their own."""
    if type(value) is dict:
        return {key: fresh_containers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return value if _is_column(value) else type(value)(fresh_containers(part) for part in value)
    return copy.copy(value) if isinstance(value, MutableMapping) else value


def _is_column(value: Any) -> bool:
    """Tell whether a list is one feature of many examples: what the default collate makes of text."""
    return isinstance(value, list) and len(value) > 0 and all(isinstance(part, (str, bytes)) for part in value)


def leaf_bytes(value: Any) -> int:
    """Return the bytes of one leaf: of the numbers of a tensor or an array, of encoded text; 8 for a single number."""
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value)
    if isinstance(value, list):
        return sum(leaf_bytes(part) for part in value)
    return 0 if value is None else int(getattr(value, "nbytes", 8))


def content_hash(value: Any) -> str:
    """Return a hash of names and contents of an item or a batch: equal for equal bits, shapes and types alone (P1.8)."""
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(value):
        found.update(f"|{path}|".encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            found.update(np.ascontiguousarray(leaf).tobytes())
        else:
            found.update(f"{type(leaf).__name__}:{leaf!r}".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def example_hashes(batch: Any) -> list[str]:
    """Return a hash of each example of a collated batch; of the batch where its leaves do not have one row an example."""
    parts = [leaf for _, leaf in leaves(batch)]
    rows = {
        len(part) if isinstance(part, list) else (part.shape[0] if getattr(part, "ndim", 0) else -1) for part in parts
    }
    if len(rows) != 1 or -1 in rows:
        return [content_hash(batch)]
    return [content_hash([part[row] for part in parts]) for row in range(rows.pop())]


_NUMBERS = {"bool": bool, "int": int, "float": float}
_SCHEMA = 1


def cache_dataset(data: Any, folder: str | Path) -> StoredDataset:
    """Store every item of a dataset as its preprocessing returns it, and return a dataset that reads them (P1.5).

    The items are the same bit for bit; random preprocessing cannot be stored. A folder that holds these items already is read, not
    written again; its first, middle and last item tell whether it does. It holds one NumPy file for each part of an item, shape
    (examples, ...), and items.json, which says how an item is made of them.

    Args:
        data: a map-style dataset; items are made of dicts, lists and tuples of tensors, arrays and numbers, all of one shape.

    Raises:
        DataError: items differ from one reading to the next, in shape from each other, or hold something else.
        UsageError: `folder` holds something else, such as another dataset's items, or `data` has no length.
    """
    path = Path(folder)
    _check_map_style(data)
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
    return json.dumps(_form(item)), [(str(part.dtype), part.shape, part.tobytes()) for part in item_arrays(item)]


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
    """The items that `cache_dataset` has stored in `folder`, read from files that are mapped into memory and so shared by workers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._meta = json.loads((self.folder / "items.json").read_text())
        self._arrays: list[NDArray[Any]] | None = None

    def __len__(self) -> int:
        return int(self._meta["examples"])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} items")
        return _made(self._meta["item"], [array[index] for array in self._open()])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows = [array[np.asarray(indices)] for array in self._open()]
        return [_made(self._meta["item"], [part[k] for part in rows]) for k in range(len(indices))]

    def __getstate__(self) -> dict[str, Any]:  # files are opened again by each worker
        return self.__dict__ | {"_arrays": None}

    def _open(self) -> list[NDArray[Any]]:
        if self._arrays is None:
            count = len(list(self.folder.glob("part*.npy")))
            self._arrays = [np.load(self.folder / f"part{k}.npy", mmap_mode="r") for k in range(count)]
        return self._arrays


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


def _made(form: Any, parts: list[NDArray[Any]]) -> Any:
    if isinstance(form, dict):
        return {key: _made(part, parts) for key, part in form.items()}
    if form[0] in ("list", "tuple"):
        made = [_made(part, parts) for part in form[1:]]
        return made if form[0] == "list" else tuple(made)
    kind, place, dtype = form
    if kind == "tensor":
        values = torch.from_numpy(np.array(parts[place]))
        return values.view(torch.bfloat16) if dtype == "torch.bfloat16" else values
    return np.array(parts[place]) if kind == "array" else _NUMBERS[kind](parts[place])


def length_of(data: Any) -> int | None:
    """Return the length of a dataset or loader, None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
