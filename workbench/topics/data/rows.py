"""Any map-style dataset as blocks of rows: inputs flattened to an array, one label each, memory bounded by a setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from workbench.topics.data.hashing import Numbers
from workbench.workloads.items import IndexedDataset, plain_tensors

__all__ = ["Rows", "as_objects", "fetch_rows", "read_rows", "split_item"]

_TARGETS = ("label", "labels", "target", "targets", "y", "class")


class Rows(NamedTuple):
    """Examples `start` to `start + len(inputs)` of a split.

    Attributes:
        start: index of the first one.
        inputs: shape (rows, values); of type object where inputs are text or, as `Numbers`, their sizes differ.
        labels: shape (rows,); None where an item has no single label.
        targets: numbers, shape (rows, values of a target), one or more; None where an item has none, or they differ in number.
    """

    start: int
    inputs: NDArray[Any]
    labels: NDArray[Any] | None
    targets: NDArray[Any] | None = None


def read_rows(data: Any, *, memory_mb: float, split: str = "train", first: int | None = None) -> Iterator[Rows]:
    """Yield the rows of a split in order, each block within `memory_mb`.

    Tensors are sliced; everything else is read item by item, as a loader would.

    Args:
        data: a map-style dataset; an item is a tensor, (inputs, label, ...), or a mapping with a key such as "label".
        memory_mb: size of a block, in units of 1e6 bytes.
        split: named in errors.
        first: how many rows at most.
    """
    count = len(data) if first is None else min(first, len(data))
    if not count:
        return
    row_bytes = max(1, fetch_rows(data, [0], split=split).inputs.nbytes)
    step = max(1, int(memory_mb * 1e6) // row_bytes)
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield fetch_rows(data, range(start, stop), split=split)._replace(start=start)


def fetch_rows(data: Any, indices: Sequence[int], *, split: str = "train") -> Rows:
    """Return the rows of these examples; `start` is the first index."""
    tensors, where = _tensors(data, indices)
    if tensors is not None:
        inputs = _flat(tensors[0][where])
        labels = tensors[1][where] if len(tensors) > 1 else None
        targets = None if labels is None else _flat(labels)
        return Rows(indices[0], inputs, _single(targets), targets)
    items = [split_item(item) for item in IndexedDataset(data, split=split).__getitems__(list(indices))]
    values, given = [x for x, _ in items], [y for _, y in items]
    targets = _stack_targets(given)
    texts = np.array(given) if all(isinstance(y, str) for y in given) else None
    return Rows(indices[0], _stack(values), texts if targets is None else _single(targets), targets)


def split_item(item: Any) -> tuple[Any, Any]:
    """Return (inputs, label) of an item as datasets have it; the label is None where there is none."""
    if isinstance(item, Mapping):
        label = next((item[key] for key in _TARGETS if key in item), None)
        rest = [value for key, value in item.items() if key not in _TARGETS]
        return (rest[0] if len(rest) == 1 else tuple(rest)), label
    if isinstance(item, (tuple, list)) and item:
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _tensors(data: Any, indices: Sequence[int]) -> tuple[tuple[Tensor, ...] | None, Any]:
    """Return the tensors behind a dataset and what selects the rows in them; None where it is no `TensorDataset`."""
    if type(data) not in (Subset, TensorDataset):  # its indices may be keys
        return None, None
    where: Any = slice(indices[0], indices[-1] + 1) if isinstance(indices, range) else torch.as_tensor(list(indices))
    while type(data) is Subset:
        chosen = data.indices[where] if isinstance(where, slice) else [data.indices[int(i)] for i in where]
        data, where = data.dataset, torch.as_tensor(chosen)
    return plain_tensors(data), where


def _flat(tensor: Tensor) -> NDArray[Any]:
    values = tensor.detach().cpu()
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    flat: NDArray[Any] = values.reshape(len(values), -1).numpy()
    return flat


def _single(targets: NDArray[Any] | None) -> NDArray[Any] | None:
    return targets[:, 0] if targets is not None and targets.shape[1] == 1 else None


def _array(value: Any) -> NDArray[Any] | None:
    """Return the numbers of one input as a flat array; None for text and other things."""
    if isinstance(value, Tensor):
        return _flat(value.reshape(1, -1)).ravel()
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, (Tensor, np.ndarray)) for v in value):
        parts = [_array(v) for v in value]
        return np.concatenate([p for p in parts if p is not None])
    if isinstance(value, (str, bytes)):
        return None
    try:
        found = np.asarray(value)
    except ValueError:  # ragged
        return None
    return found.reshape(-1) if found.dtype.kind in "fiub" else None


def _stack(values: list[Any]) -> NDArray[Any]:
    arrays = [_array(value) for value in values]
    flat = [a for a in arrays if a is not None]
    if len(flat) == len(values) and len({a.shape for a in flat}) == 1:
        return np.stack(flat)
    kept = np.empty(len(values), dtype=object)
    kept[:] = [value if a is None else Numbers(a.tobytes()) for value, a in zip(values, arrays, strict=True)]
    return kept


def as_objects(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows as `_stack` keeps them where their sizes differ, though these are all of one size."""
    if rows.dtype == object:
        return rows
    kept = np.empty(len(rows), dtype=object)
    kept[:] = [Numbers(row.tobytes()) for row in rows]
    return kept


def _stack_targets(values: list[Any]) -> NDArray[Any] | None:
    found = [_array(value) for value in values]
    flat = [a for a in found if a is not None and a.size]
    return np.stack(flat) if len(flat) == len(values) and len({a.size for a in flat}) == 1 else None
