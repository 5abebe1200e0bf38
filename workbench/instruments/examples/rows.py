"""Any map-style dataset as rows of numbers: blocks within a memory limit, hashes of rows, and a random sample."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from workbench.workloads.items import IndexedDataset, plain_tensors

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
NEAR_VALUES = 16  # rows with fewer values are near each other by chance (rule of thumb)
# near hashes of a row, projections of each, and the step these are rounded to, in deviations
TABLES, DIRECTIONS, WIDTH = 4, 8, 0.25
SAMPLE_ROWS = 2000
"""Of a split that are looked at, at most: enough for a difference of a tenth of a deviation (rule of thumb)."""
COLUMNS = 1024  # that are kept of a wide row, drawn at random, the same ones for every split (rule of thumb)
AXIS = 64  # longest axis of an example along which means are taken (rule of thumb)
CERTAIN = 1e6  # bits of rows that never agree by chance
_TARGETS = ("label", "labels", "target", "targets", "y", "class")
_SEED = 20_261_123


class Numbers(bytes):
    """The bytes of a row of numbers, where rows are of different sizes: no text, though bytes."""


class Rows(NamedTuple):
    """Examples `start` to `start + len(inputs)` of a split."""

    start: int
    inputs: NDArray[Any]  # shape (rows, values); of objects where these are text or, as `Numbers`, their sizes differ
    labels: NDArray[Any] | None  # shape (rows,); None where an item has no single label
    # numbers, shape (rows, values of a target); None where an item has none, or they differ in number
    targets: NDArray[Any] | None = None


def read_rows(data: Any, *, memory_mb: float, split: str = "train", first: int | None = None) -> Iterator[Rows]:
    """Yield the rows of a map-style dataset in order, in blocks of at most `memory_mb` times 1e6 bytes."""
    count = len(data) if first is None else min(first, len(data))
    if not count:
        return
    row_bytes = max(1, fetch_rows(data, [0], split=split).inputs.nbytes)
    step = max(1, int(memory_mb * 1e6) // row_bytes)
    for start in range(0, count, step):
        yield fetch_rows(data, range(start, min(start + step, count)), split=split)._replace(start=start)


def fetch_rows(data: Any, indices: Sequence[int], *, split: str = "train") -> Rows:
    """Return the rows of these examples; `start` is the first index."""
    if type(data) in (Subset, TensorDataset):  # others' indices may be keys
        in_a_row = isinstance(indices, range)
        where: Any = slice(indices[0], indices[-1] + 1) if in_a_row else torch.as_tensor(list(indices))
        held = data
        while type(held) is Subset:
            chosen = held.indices[where] if isinstance(where, slice) else [held.indices[int(i)] for i in where]
            held, where = held.dataset, torch.as_tensor(chosen)
        tensors = plain_tensors(held)
        if tensors is not None:
            targets = _flat(tensors[1][where]) if len(tensors) > 1 else None
            return Rows(indices[0], _flat(tensors[0][where]), _single(targets), targets)
    items = [split_item(item) for item in IndexedDataset(data, split=split).__getitems__(list(indices))]
    given = [y for _, y in items]
    found = [a for a in map(_array, given) if a is not None and a.size]
    targets = np.stack(found) if len(found) == len(given) and len({a.size for a in found}) == 1 else None
    texts = np.array(given) if all(isinstance(y, str) for y in given) else None
    return Rows(indices[0], _stack([x for x, _ in items]), texts if targets is None else _single(targets), targets)


def split_item(item: Any) -> tuple[Any, Any]:
    """Return (inputs, label) of an item as datasets have it; the label is None where there is none."""
    if isinstance(item, Mapping):
        label = next((item[key] for key in _TARGETS if key in item), None)
        rest = [value for key, value in item.items() if key not in _TARGETS]
        return (rest[0] if len(rest) == 1 else tuple(rest)), label
    if isinstance(item, (tuple, list)) and item:
        return item[0], item[1] if len(item) > 1 else None
    return item, None


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
    """Return rows as they are kept where their sizes differ, though these are all of one size."""
    if rows.dtype == object:
        return rows
    kept = np.empty(len(rows), dtype=object)
    kept[:] = [Numbers(row.tobytes()) for row in rows]
    return kept


def exact_hashes(rows: NDArray[Any]) -> Words:
    """Return a 64-bit hash of each row, shape (rows,): equal numbers give equal hashes, whatever their type was.

    Numbers are compared as float32, integers above 2**24 as themselves; 0 and -0 are one, so are all NaN. Objects are text,
    bytes or `Numbers`.
    """
    each: Any
    if rows.dtype == object:
        each = [v if isinstance(v, bytes) else str(v).encode("utf-8", "surrogatepass") for v in rows]
    elif is_ids(rows):
        each = np.ascontiguousarray(rows, dtype=np.int64)
    else:
        each = rows.astype(np.float32, order="C") + np.float32(0)  # -0 becomes 0
        each[np.isnan(each)] = np.nan
    return np.frombuffer(b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in each), dtype=np.uint64)


def near_hasher(
    values: int, view: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
) -> Callable[[NDArray[Any]], Words]:
    """Return the function rows -> locality-sensitive hashes, shape (rows, tables): rows that differ little share one of them.

    A row goes through `view`, is standardised by its own mean and deviation, so that brightness, contrast and units fall out, projected
    on random directions and rounded (Datar et al. 2004). Rows of equal values share all.
    """
    rng = np.random.default_rng(_SEED)
    axes = (rng.standard_normal((values, TABLES * DIRECTIONS)) / np.sqrt(values)).astype(np.float32)
    offsets = rng.random(TABLES * DIRECTIONS)

    def hashes(rows: NDArray[Any]) -> Words:
        with np.errstate(all="ignore"):  # rows that are not finite are near none
            cells = np.floor(standardised(view(rows)) @ axes / WIDTH + offsets)
            return np.stack([exact_hashes(part) for part in np.split(cells, TABLES, axis=1)], axis=1)

    return hashes


def standardised(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows of mean 0 and deviation 1, shape (rows, values); rows of equal values become zeros."""
    values = rows.astype(np.result_type(rows.dtype, np.float32))
    mean = values.mean(axis=1, keepdims=True)
    values -= mean
    spread = values.std(axis=1, keepdims=True)
    scaled: NDArray[Any] = np.divide(values, spread, out=np.zeros_like(values), where=spread > 1e-6 * np.abs(mean))
    return scaled


def text_of(value: Any) -> str:
    """Return text without what copies differ in: case, white space, punctuation; rows of numbers keep every digit."""
    if isinstance(value, Numbers):
        return value.hex()
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def is_ids(values: NDArray[Any]) -> bool:
    """Tell whether inputs are integers that a model looks up; bytes are pixels."""
    return values.dtype.kind in "iu" and values.dtype.itemsize > 2


class Sample(NamedTuple):
    """Random examples of a split."""

    places: NDArray[np.int64]  # of them in the split, in order, shape (rows,)
    # shape (rows, columns), at most `COLUMNS` of a row; None for text and examples of different sizes
    inputs: Floats | None
    columns: NDArray[np.int64]  # which places of a flattened row these are
    outline: Floats  # mean, deviation and means along each axis of an example, shape (rows, values); without values for flat rows
    outline_names: list[str]
    integers: bool  # whether the inputs are
    ids: bool  # whether they are integers that a model looks up
    targets: Floats | None  # shape (rows, values of a target); None where an item has none
    classes: bool  # whether these are integers


def split_sample(data: Any, *, split: str, most: int | None, memory_mb: float, rows: int = SAMPLE_ROWS) -> Sample:
    """Return random rows of a map-style split, in the order of their places; the same ones each time."""
    count = len(data) if most is None else min(most, len(data))
    places = np.sort(np.random.default_rng(_SEED).permutation(count)[:rows])
    if not count:
        return Sample(places, None, places, np.empty((0, 0)), [], False, False, None, False)
    first, value = fetch_rows(data, [0], split=split).inputs, split_item(data[0])[0]
    shape = tuple(value.shape) if isinstance(value, (Tensor, np.ndarray)) else first.shape[1:]
    axes = [axis for axis, size in enumerate(shape) if 1 < size <= AXIS] if len(shape) > 1 else []
    width = first.shape[1] if first.ndim == 2 else 0
    columns = np.sort(np.random.default_rng(_SEED).permutation(width)[:COLUMNS])
    inputs, outlines, targets = [], [], []
    step = max(1, int(memory_mb * 1e6) // max(1, first.nbytes))
    for start in range(0, len(places), step):
        block = fetch_rows(data, places[start : start + step].tolist(), split=split)
        if block.targets is not None:
            targets.append(block.targets)
        if not width or block.inputs.dtype == object or block.inputs.shape[1] != width:
            width = 0
            continue
        values = block.inputs.astype(np.float64)
        inputs.append(values[:, columns])
        examples = values.reshape(-1, *shape)
        means = [examples.mean(tuple(k + 1 for k in range(len(shape)) if k != axis)) for axis in axes]
        outlines.append(np.concatenate([values.mean(1, keepdims=True), values.std(1, keepdims=True), *means], axis=1))
    names = ["the mean of an example", "the deviation within an example"]
    names += [f"the mean at place {k} of axis {axis}" for axis in axes for k in range(shape[axis])]
    outlined = bool(width) and len(shape) > 1
    whole = len({t.shape[1] for t in targets}) == 1 and sum(map(len, targets)) == len(places)
    return Sample(
        places=places, inputs=np.concatenate(inputs) if width else None, columns=columns,
        outline=np.concatenate(outlines) if outlined else np.empty((len(places), 0)), outline_names=names if outlined else [],
        integers=first.dtype.kind in "iu", ids=is_ids(first),
        targets=np.concatenate(targets).astype(np.float64) if whole else None,
        classes=whole and all(t.dtype.kind in "iub" for t in targets),
    )  # fmt: skip


def repeats(hashes: Words, labels: NDArray[Any] | None) -> dict[str, Any]:
    """Return JSON facts on equal rows of one split, from their hashes in order and their labels.

    Returns:
        "rows", "repeated" (rows that were there before), "top" (how often the most common row is there, and where first),
        "contradicting" (repeated rows whose label is another than where they were first) and "majority" (repeated rows of the class
        that has the most rows of its own); the last two are None without classes.
    """
    if not len(hashes):
        return {"rows": 0, "repeated": 0, "top": [0, 0], "contradicting": None, "majority": None}
    _, first, which, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    again = np.flatnonzero(first[which] != np.arange(len(hashes)))
    differing = majority = None
    if labels is not None and labels.dtype.kind != "f":
        differing = int((labels[again] != labels[first[which[again]]]).sum())
        values, own = np.unique(labels[first], return_counts=True)
        majority = int((labels[again] == values[own.argmax()]).sum())
    top = [int(counts.max()), int(first[counts.argmax()])]
    return {"rows": len(hashes), "repeated": len(again), "top": top, "contradicting": differing, "majority": majority}


def chance_bits(sample: Sample) -> float | None:
    """Return how many bits tell one row from another, were columns independent; None where rows are no numbers.

    The collision entropy, summed over columns: two rows agree by chance once in 2**bits, or more often where columns depend on each
    other. `CERTAIN` where a column is as good as continuous: its values repeat no more than whole rows do.
    """
    if sample.inputs is None or not len(sample.inputs):
        return None
    rows = np.unique(sample.inputs, axis=0)
    bits = 0.0
    for column in rows.T:
        _, counts = np.unique(column, return_counts=True)
        if len(counts) >= 0.9 * len(rows) and len(counts) > 1 and not sample.ids:
            return CERTAIN
        bits -= float(np.log2(((counts / len(rows)) ** 2).sum()))
    return bits
