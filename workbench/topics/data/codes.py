"""Numbers that stand for "missing": one and the same value, far from all others of its column, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.topics.data.sample import Sample

__all__ = ["apart", "missing_codes"]

APART = 10.0
"""Deviations of the others that a value lies from the nearest of them (rule of thumb: no tail leaves such a gap and repeats its end)."""
TAIL = 30.0
"""Robust deviations (of the median distance) from their median, from which on the others have a tail towards it, which may be cut off
there (rule of thumb: of 2,000 log-normal values of deviation 1 the largest lies as far)."""
LEAST, MOST = 0.001, 0.2
"""Share of a column's cells that a code makes up (rule of thumb: fewer are single rows, more are a kind of example)."""
_FEWEST = 8
"""Other cells of a column, from which on it has a deviation (rule of thumb)."""


def missing_codes(sample: Sample, *, cells: int = 3, rows: int = 12) -> list[dict[str, Any]]:
    """Return the values that look like codes for missing ones, the most frequent first; of pictures and series, over all places.

    Zero is none: a sensor that is off, and most of a sparse column, are 0. Nor is an end of a scale that others come near.

    Args:
        sample: of the training split.
        cells: fewest that hold a code.
        rows: of those that hold it to name.

    Returns:
        "value", "share" (of the cells of the columns where it stands), "cells", "columns", "deviations" (from the others' mean, the
        smallest of its columns), "places" of rows in the split.
    """
    if sample.inputs is None or sample.ids:
        return []
    flat = not sample.outline_names
    values = sample.inputs if flat else sample.inputs.reshape(-1, 1)
    found: dict[float, list[tuple[int, float]]] = {}
    for column, value, deviations in apart(values):
        found.setdefault(value, []).append((column, deviations))
    codes = []
    for value, known in found.items():
        held = values[:, [column for column, _ in known]] == value
        count, share = int(held.sum()), float(held.mean())
        if count < cells or not LEAST <= share <= MOST:
            continue
        places = np.flatnonzero(held.any(1) if flat else held.reshape(sample.inputs.shape).any(1))[:rows]
        codes.append({
            "value": value, "share": share, "cells": count, "columns": len(known) if flat else None,
            "deviations": min(d for _, d in known), "places": sample.places[places].tolist(),
        })  # fmt: skip
    return sorted(codes, key=lambda code: -code["share"])


def apart(values: NDArray[np.float64]) -> Iterator[tuple[int, float, float]]:
    """Yield the ends of columns that no other value comes near: column, value, deviations from the mean of the others.

    Args:
        values: shape (rows, columns); those that are not finite are left out.
    """
    for column, cells in enumerate(values.T):
        finite = cells[np.isfinite(cells)]
        if not len(finite):
            continue
        ends = (float(finite.min()), float(finite.max()))
        rest = finite[(finite > ends[0]) & (finite < ends[1])]
        if len(rest) < _FEWEST:
            continue
        middle, deviation = float(np.median(rest)), float(rest.std())
        robust = 1.4826 * float(np.median(np.abs(rest - middle)))  # 0 where half of them are equal
        tails = (middle - float(rest.min()), float(rest.max()) - middle)
        gaps = (float(rest.min()) - ends[0], ends[1] - float(rest.max()))
        for end, gap, tail in zip(ends, gaps, tails, strict=True):
            if end != 0 and gap >= APART * deviation and tail <= TAIL * robust and robust > 0:
                yield column, end, abs(end - float(rest.mean())) / deviation
