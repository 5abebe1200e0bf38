"""`split_sample`: a random part of a split as numbers, small enough to compute with whatever the size of an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.topics.data.rows import fetch_rows, split_item

__all__ = ["SAMPLE_ROWS", "Sample", "is_ids", "split_sample"]

SAMPLE_ROWS = 2000
"""Rows of a split that are looked at, at most: enough for a difference of a tenth of a deviation (rule of thumb)."""
COLUMNS = 1024
"""Columns that are kept of a wide row, drawn at random, the same ones for every split (rule of thumb)."""
AXIS = 64
"""Longest axis of an example along which means are taken (rule of thumb)."""
_SEED = 20_261_123

Floats = NDArray[np.float64]


class Sample(NamedTuple):
    """Random examples of a split.

    Attributes:
        places: of them in the split, in order, shape (rows,).
        inputs: shape (rows, columns), at most `COLUMNS` of a row; None for text and examples of different sizes.
        columns: which places of a flattened row these are.
        outline: mean, deviation and means along each axis of an example, shape (rows, values); without values for flat rows.
        outline_names: of these.
        integers: whether the inputs are.
        ids: whether they are integers that a model looks up.
        targets: shape (rows, values of a target); None where an item has none.
        classes: whether these are integers.
    """

    places: NDArray[np.int64]
    inputs: Floats | None
    columns: NDArray[np.int64]
    outline: Floats
    outline_names: list[str]
    integers: bool
    ids: bool
    targets: Floats | None
    classes: bool


def is_ids(values: NDArray[Any]) -> bool:
    """Tell whether inputs are integers that a model looks up; bytes are pixels."""
    return values.dtype.kind in "iu" and values.dtype.itemsize > 2


def split_sample(data: Any, *, split: str, most: int | None, memory_mb: float, rows: int = SAMPLE_ROWS) -> Sample:
    """Return random rows of a split, in the order of their places; the same ones each time.

    Args:
        data: map-style.
        split: named in errors.
        most: rows of the split to draw from, the first ones; None is all.
        memory_mb: of the rows that are in memory at a time, in units of 1e6 bytes.
        rows: to draw, at most.
    """
    count = len(data) if most is None else min(most, len(data))
    places = np.sort(np.random.default_rng(_SEED).permutation(count)[:rows])
    if not count:
        return Sample(places, None, places, np.empty((0, 0)), [], False, False, None, False)
    first = fetch_rows(data, [0], split=split).inputs
    step = max(1, int(memory_mb * 1e6) // max(1, first.nbytes))
    shape = _shape(data[0], first)
    width = first.shape[1] if first.ndim == 2 else 0
    kept = np.sort(np.random.default_rng(_SEED).permutation(width)[:COLUMNS])
    inputs, outlines, targets, classes, ids = [], [], [], True, is_ids(first)
    for start in range(0, len(places), step):
        block = fetch_rows(data, places[start : start + step].tolist(), split=split)
        if block.inputs.ndim != 2 or block.inputs.shape[1] != width or block.inputs.dtype == object:
            width = 0
        if width:
            values = block.inputs.astype(np.float64)
            outlines.append(_outline(values, shape))
            inputs.append(values[:, kept])
        if block.targets is not None:
            classes &= block.targets.dtype.kind in "iub"
            targets.append(block.targets.astype(np.float64))
    whole = len({t.shape[1] for t in targets}) == 1 and sum(map(len, targets)) == len(places)
    return Sample(
        places=places,
        inputs=np.concatenate(inputs) if width else None,
        columns=kept,
        outline=np.concatenate(outlines) if width else np.empty((len(places), 0)),
        outline_names=_outline_names(shape) if width else [],
        integers=first.dtype.kind in "iu",
        ids=ids,
        targets=np.concatenate(targets) if whole else None,
        classes=classes and whole,
    )


def _shape(item: Any, first: NDArray[Any]) -> tuple[int, ...]:
    """Return the shape of an example's input."""
    value = split_item(item)[0]
    return tuple(value.shape) if isinstance(value, (torch.Tensor, np.ndarray)) else first.shape[1:]


def _axes(shape: Sequence[int]) -> list[int]:
    return [axis for axis, size in enumerate(shape) if 1 < size <= AXIS] if len(shape) > 1 else []


def _outline(values: Floats, shape: tuple[int, ...]) -> Floats:
    if len(shape) < 2:
        return np.empty((len(values), 0))
    examples = values.reshape(-1, *shape)
    parts = [values.mean(1, keepdims=True), values.std(1, keepdims=True)]
    for axis in _axes(shape):
        others = tuple(k + 1 for k in range(len(shape)) if k != axis)
        parts.append(examples.mean(others))
    return np.concatenate(parts, axis=1)


def _outline_names(shape: tuple[int, ...]) -> list[str]:
    if len(shape) < 2:
        return []
    along = [f"the mean at place {k} of axis {axis}" for axis in _axes(shape) for k in range(shape[axis])]
    return ["the mean of an example", "the deviation within an example", *along]
