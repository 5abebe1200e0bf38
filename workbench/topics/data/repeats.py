"""`repeats`: rows that a split holds more than once, and whether chance makes as many; `closer_than_chance` for near copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.topics.data.hashing import standardised
from workbench.topics.data.sample import Sample

__all__ = ["by_column", "chance_bits", "closer_than_chance", "comparable", "repeats"]

NEIGHBOURS = (10, 20)
"""By the distances to which of the nearest rows it is told in how many directions rows vary."""
CLOSE = 0.1
"""Of the distance at which chance has the nearest row: closer ones are copies (rule of thumb)."""

LARGE = 10.0
"""A column that is as many times larger than three quarters of the columns hides what rows differ by (rule of thumb)."""
LARGEST = 1e100
"""Numbers beyond it are as good as infinite: their squares would be."""
CERTAIN = 1e6
"""Bits of rows that never agree by chance."""

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


def repeats(hashes: Words, labels: NDArray[Any] | None) -> dict[str, Any]:
    """Return JSON facts on equal rows of one split.

    Args:
        hashes: of its rows, in order, shape (rows,).
        labels: of them; None where unknown.

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
    top = int(counts.argmax())
    return {
        "rows": len(hashes),
        "repeated": len(again),
        "top": [int(counts[top]), int(first[top])],
        "contradicting": differing,
        "majority": majority,
    }


def chance_bits(sample: Sample) -> float | None:
    """Return how many bits tell one row from another, were columns independent; None where rows are no numbers.

    The collision entropy, summed over columns: two rows agree by chance once in 2**bits, or more often where columns depend on each
    other. `CERTAIN` where a column is as good as continuous: its values repeat no more than whole rows do.

    Args:
        sample: random rows of the split.
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


def closer_than_chance(
    ours: Floats, theirs: Floats, background: Floats, *, rows: int
) -> tuple[NDArray[np.bool_], float] | None:
    """Return which pairs of rows are closer than neighbours are by chance, and what share of unrelated rows would be too.

    Rows that vary in few directions have close neighbours by chance: in d directions the nearest of n is n**(1/d) times closer than
    the first is. Here d is read off the distances to the 10th and the 20th nearest row (the estimate of Levina and Bickel 2004).

    Args:
        ours: rows of one split, shape (pairs, columns).
        theirs: the row of the training split that each is paired with, same shape.
        background: random training rows, shape (some, columns).
        rows: of the whole training split.

    Returns:
        None where the background is too small to tell.
    """
    near, far = NEIGHBOURS
    if len(background) < 3 * far:
        return None
    ours, theirs, background = (np.nan_to_num(each) for each in (ours, theirs, background))
    found: list[tuple[NDArray[np.bool_], float]] = []
    for view in (standardised, by_column(background)):
        a, b, c = view(ours), view(theirs), view(background)
        apart = np.sqrt(((a - b) ** 2).mean(1))
        between = np.maximum((a**2).mean(1)[:, None] + (c**2).mean(1) - 2 * (a @ c.T) / a.shape[1], 0)
        first, second = np.sqrt(np.partition(between, (near - 1, far - 1), axis=1)[:, [near - 1, far - 1]]).T
        steps = np.log(np.maximum(second, 1e-12) / np.maximum(first, 1e-12))
        directions = np.log(far / near) / max(float(np.median(steps)), 1e-6)
        expected = first * (len(background) / (near * max(rows, len(background)))) ** (1 / directions)
        found.append((apart <= CLOSE * expected, min(1.0, CLOSE**directions)))
    (rowwise, one), (columnwise, two) = found
    return rowwise | columnwise, min(1.0, one + two)


def comparable(background: Floats) -> Callable[[Floats], Floats] | None:
    """Return the function that puts columns on one scale, where a few are so much larger that all rows look alike; else None.

    Args:
        background: random training rows, shape (some, columns).
    """
    size = (
        np.sqrt(np.square(np.clip(np.nan_to_num(background), -LARGEST, LARGEST)).mean(0))
        if len(background)
        else np.zeros(1)
    )
    return by_column(np.nan_to_num(background)) if size.max() > LARGE * np.quantile(size, 0.75) > 0 else None


def by_column(background: Floats) -> Callable[[Floats], Floats]:
    """Return the function that puts every column on the scale of its middle half, or of its deviation where that is a point."""
    low, middle, high = np.quantile(background, (0.25, 0.5, 0.75), axis=0)
    spread = np.where(high > low, high - low, np.std(background, axis=0))
    spread[spread == 0] = 1.0

    def scaled(rows: Floats) -> Floats:
        return np.asarray((rows - middle) / spread)

    return scaled
