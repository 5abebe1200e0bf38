"""`narrow_copies`: near copies in tables of few columns, where a hash would take neighbours for copies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from workbench.topics.data.repeats import CLOSE, LARGEST, NEIGHBOURS, by_column

__all__ = ["NarrowCopies", "narrow_copies"]

ROWS = 20_000
"""Training rows that neighbours are looked for among, at most: 4 s for rows of 15 columns that depend on nothing."""
CLUMPS = 1000
"""Of these, whose own neighbours tell what comes by chance, at most."""
_EQUAL = 1e-9
"""Distance of rows that are equal but for rounding, in scaled columns."""

Floats = NDArray[np.float64]


class NarrowCopies(NamedTuple):
    """Which rows are near copies, the nearest training row of each and its distance, and the share that chance makes."""

    copies: NDArray[np.bool_]
    nearest: NDArray[np.int64]
    distance: Floats
    by_chance: float


def narrow_copies(rows: Floats, train: Floats) -> NarrowCopies | None:
    """Return which rows are far closer to a training row than neighbours are, and the share of unrelated rows that would be too.

    The distance at which chance has the nearest row follows from the 10th and the 20th, as in `closer_than_chance`. Rows of tables also
    come in clumps, by categories or by time: what that makes is counted on training rows, each against all others.

    Args:
        rows: of another split, shape (rows, columns).
        train: training rows.

    Returns:
        None where the training split is too small or too large.
    """
    if not len(rows) or not 3 * NEIGHBOURS[1] <= len(train) <= ROWS:
        return None
    train, rows = (np.clip(np.nan_to_num(each), -LARGEST, LARGEST) for each in (train, rows))
    scaled = by_column(train)
    theirs, ours = (np.clip(scaled(each), -LARGEST, LARGEST) for each in (train, rows))
    tree = KDTree(theirs)
    found, places = tree.query(ours, k=NEIGHBOURS[1])
    own = np.linspace(0, len(theirs) - 1, min(len(theirs), CLUMPS)).astype(int)
    others = tree.query(theirs[own], k=NEIGHBOURS[1] + 1)[0][:, 1:]
    near, far = (k - 1 for k in NEIGHBOURS)
    ratio = np.maximum(others[:, far], 1e-12) / np.maximum(others[:, near], 1e-12)
    directions = np.log(NEIGHBOURS[1] / NEIGHBOURS[0]) / max(float(np.median(np.log(ratio))), 1e-6)
    limit = CLOSE * NEIGHBOURS[0] ** (-1 / directions)
    copies, clumps = ((d[:, 0] > _EQUAL) & (d[:, 0] <= limit * d[:, near]) for d in (found, others))
    chance = min(1.0, max(CLOSE**directions, float(clumps.mean())))
    return NarrowCopies(copies, places[:, 0], found[:, 0] / np.sqrt(train.shape[1]), chance)
