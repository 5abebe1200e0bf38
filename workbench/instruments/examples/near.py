"""`near_copies`: rows that lie with a few of another split's, of their target, apart from all others: copies from before the split (P2.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from workbench.instruments.examples.rows import NEAR_VALUES, Floats, standardised
from workbench.instruments.examples.sizes import CATEGORIES

CLOSE = 0.25  # of the distance at which chance has the nearest row: closer ones are copies (rule of thumb),
BY_CHANCE = 1e-3  # where no more than this share of unrelated rows is as close (rule of thumb)
LARGEST = 1e100  # numbers beyond it are as good as infinite: their squares would be
_CLUMP = 20  # copies of one row, at most, and rows beyond them by which it is told in how many directions rows vary
_COLUMNS, _DISTINCT = 256, 0.5
"""Columns that are compared, at most, and share of a column's values that are different, from which on it varies from row to row (rules of thumb)."""
_MATTER, _AGREE, _CHANCE = 0.1, 0.9, 2.0
"""Share of all rows that copies are, share of the rows near others that have their target, and times as many as chance makes, at least (rules of thumb)."""


def near_copies(train: Floats, targets: NDArray[Any], rows: Floats, theirs: NDArray[Any], *, table: bool = True) -> NDArray[np.bool_]:  # fmt: skip
    """Return which rows have near copies among the training rows: up to 20 of their target, and then none for a distance that chance does not leave.

    Columns that repeat their values are left out, for categories put rows together; so are rows that are equal. Nothing is found where
    rows near each other differ in their targets, as those of a repeated measurement, where they are most of a class, or where columns that
    are shuffled each on its own, as settings that are combined, put as many together.

    Args:
        train: training rows, shape (rows, columns), and their targets, shape (rows, values); then those of the other split.
        table: whether columns stand for themselves; those of pictures and series are all compared.
    """
    nothing = np.zeros(len(rows), dtype=bool)
    if len(train) < 3 * _CLUMP or not len(rows):
        return nothing
    ordered = np.sort(train, axis=0)
    varies = np.flatnonzero((np.diff(ordered, axis=0) > 0).mean(0) > (_DISTINCT if table else 0.0))
    varies = varies[np.linspace(0, len(varies) - 1, min(len(varies), _COLUMNS)).astype(int)]
    if not len(varies):
        return nothing
    ours, others = (np.clip(np.nan_to_num(each[:, varies]), -LARGEST, LARGEST) for each in (train, rows))
    values, own = np.unique(np.concatenate([targets, theirs]), axis=0, return_inverse=True)
    own, asked = np.split(own.ravel(), [len(targets)])
    few = targets.shape[1] == 1 and (targets.dtype.kind != "f" or len(values) <= CATEGORIES)
    most = np.bincount(own, minlength=len(values))[asked] // 2 if few else np.full(len(rows), _CLUMP)

    def found(ours: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        near, alike = nothing, nothing
        for view in (by_column(ours), *([standardised] if len(varies) >= NEAR_VALUES else [])):
            distances, places = KDTree(view(ours)).query(view(others), k=2 * _CLUMP)
            gaps = _gaps(distances)
            same = np.logical_and.accumulate(own[places[:, :_CLUMP]] == asked[:, None], axis=1)
            near = near | gaps.any(1)
            alike = alike | (gaps & same & (np.arange(1, _CLUMP + 1) <= most[:, None])).any(1)
        return near, alike

    near, alike = found(ours)
    if alike.sum() < max(_MATTER * len(rows), _AGREE * near.sum()):
        return nothing
    by_chance = found(np.random.default_rng(0).permuted(ours, axis=0))[0]
    return alike if alike.sum() >= _CHANCE * by_chance.sum() else nothing


def _gaps(distances: Floats) -> NDArray[np.bool_]:
    """Return after which of the nearest rows the next one is further by more than chance makes it in as many directions, shape (rows, 20)."""
    logs = np.log(np.maximum(distances, 1e-12))
    steps = logs[:, -1] - logs[:, _CLUMP:-1].mean(1)  # 1 / directions, but for a factor (Levina and Bickel 2004)
    steps /= np.log(2 * _CLUMP / np.arange(_CLUMP + 1, 2 * _CLUMP)).mean()
    steps = np.maximum(steps, np.median(steps))[:, None]
    gaps = np.diff(logs[:, : _CLUMP + 1], axis=1) >= np.maximum(-np.log(CLOSE), -np.log(BY_CHANCE) * steps)
    return np.asarray(gaps & (distances[:, :1] > 1e-9))


def by_column(background: Floats) -> Callable[[Floats], Floats]:
    """Return the function that puts every column on the scale of its middle half, or of its deviation where that is a point."""
    low, middle, high = np.quantile(background, (0.25, 0.5, 0.75), axis=0)
    spread = np.where(high > low, high - low, np.std(background, axis=0))
    spread[spread == 0] = 1.0
    return lambda rows: np.asarray((rows - middle) / spread)
