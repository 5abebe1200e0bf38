"""`find_overlap`: rows of one split that are in the training split too, exactly or nearly (P2.9), and rows that a split repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial import KDTree

from workbench.errors import ConfigError
from workbench.instruments.examples.near import BY_CHANCE, CLOSE, LARGEST, by_column, near_copies
from workbench.instruments.examples.rows import (
    NEAR_VALUES,
    Floats,
    Numbers,
    Words,
    as_objects,
    exact_hashes,
    fetch_rows,
    is_ids,
    near_hasher,
    read_rows,
    repeats,
    split_sample,
    standardised,
    text_of,
)  # fmt: skip

Places = NDArray[np.int64]
SHOWN = 20
PEEKED = 64  # rows that are read at a time where their places are known
CONFIRMED = 1000  # near rows that are held against unrelated ones, at most; the others count in proportion
BACKGROUND = 300  # unrelated training rows for that (rule of thumb)
NEIGHBOURS = (10, 20)  # by the distances to which of the nearest rows it is told in how many directions rows vary
LARGE = 10.0  # times three quarters of the columns: a larger column hides what rows differ by (rule of thumb)
ROWS = 20_000  # training rows that neighbours are looked for among, at most: 4 s for rows of 15 columns that depend on nothing
CLUMPS = 1000  # of these, whose own neighbours tell what comes by chance, at most
_EQUAL = 1e-9  # distance of rows that are equal but for rounding, in scaled columns


def find_overlap(
    train: Any,
    others: Mapping[str, Any],
    *,
    near: bool = True,
    tolerance: float = 0.1,
    memory_mb: float = 256.0,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Return JSON facts on which rows of `others` are in `train` too.

    Exact: equal inputs, by a hash of 64 bits. Near: numbers that agree after each row is standardised by its own mean and deviation, to a
    distance of `tolerance` deviations (the same picture brighter, in other units, with a little noise); text that agrees
    without case, white space and punctuation. Not found: what was shifted, cropped, mirrored, resized, or said in other
    words; near integers (tokens) and near rows of different sizes. Near rows that are no closer than unrelated ones come by chance do
    not count (`closer_than_chance`); in rows of fewer than 16 values they are looked for by column, among their neighbours
    (`narrow_copies`), where the training split has no more than 20,000 rows.

    Args:
        tolerance: root mean square difference of two standardised rows that still counts as near (rule of thumb).
        memory_mb: of the blocks that are in memory at a time, in units of 1e6 bytes; hashes take 40 bytes a row beyond that.

    Returns:
        "train_rows", "train_duplicates" (rows that were there before), "near" (whether it could be looked for), "repeats" (of
        `repeats`, for each split), and under "splits" for each: "rows", "exact", "near" (numbers of rows), "by_chance" (share of
        unrelated rows that would pass for near), "same" (it is the training split, row for row), "pairs" (the first ones: index
        there, index in train, distance), "same_label" and "labelled" (of the overlapping rows).
    """
    if not memory_mb > 0:
        raise ConfigError(f"memory_mb={memory_mb!r} must be above 0: the size of the blocks that are read at a time.")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance={tolerance!r} must lie between 0 and 1; unrelated rows differ by 1.4.")
    search = _Search(train, others, near=near, tolerance=tolerance, size=memory_mb / 8, most=max_rows)
    ours, hashed = search.ours, {name: search.hashed(data, name) for name, data in others.items()}
    found = {name: search.find(name, others[name], mine) for name, mine in hashed.items()}
    repeated = {name: repeats(mine.exact, mine.labels) for name, mine in {"train": ours, **hashed}.items()}
    return {
        "train_rows": len(ours.exact), "train_duplicates": repeated["train"]["repeated"], "near": search.looked, "repeats": repeated,
        "splits": found,
    }  # fmt: skip


class _Hashed(NamedTuple):
    """The rows of a split, in order: hashes of shape (rows,), near hashes of shape (rows, tables), labels, whether all have one size."""

    exact: Words
    near: Words | None
    labels: NDArray[Any] | None
    uniform: bool


class _Search:
    """A training split, and how other splits are looked for in it."""

    def __init__(
        self, train: Any, others: Mapping[str, Any], *, near: bool, tolerance: float, size: float, most: int | None
    ) -> None:
        self.train, self.tolerance, self.size, self.most = train, tolerance, size, most
        self.view: Any = np.asarray
        first, *rest = (self._peeked(data) for data in (train, *others.values()))
        if any(rows.shape[1:] != first.shape[1:] for rows in rest if len(rows)):  # those of objects have one axis
            first = as_objects(first)
        self.like = first
        self.background = split_sample(train, split="train", most=most, memory_mb=size, rows=BACKGROUND)
        self.text = near and first.dtype == object and len(first) > 0 and not isinstance(first[0], Numbers)
        numbers = near and not (first.dtype == object or is_ids(first) or first.dtype.kind == "b")  # no tokens or flags
        self.wide = numbers and first.shape[1] >= NEAR_VALUES
        self.hasher: Callable[[NDArray[Any]], Words] | None = None
        if self.text:
            self.hasher = lambda rows: exact_hashes(np.array([text_of(v) for v in rows], dtype=object))[:, None]
        if self.wide:
            inputs = self.background.inputs
            if inputs is not None and inputs.shape[1] == first.shape[1]:
                self.view = comparable(inputs)
            self.hasher = near_hasher(first.shape[1], self.view)
        self.ours = self.hashed(train, "train")
        count, self.table = len(self.ours.exact), None
        enough = 3 * NEIGHBOURS[1] <= count <= ROWS
        if numbers and not self.wide and first.shape[1] and enough and self.ours.uniform:
            self.table = np.concatenate(list(self._blocks(train, np.arange(count), "train"))).astype(np.float64)
        self.looked = self.text or self.wide or (self.table is not None and bool(others))

    def _peeked(self, data: Any) -> NDArray[Any]:
        """Return the inputs of the first rows."""
        if not len(data):
            return np.empty((0, 0))
        held = max(1, int(self.size * 1e6) // max(1, fetch_rows(data, [0]).inputs.nbytes))
        return fetch_rows(data, range(min(PEEKED, held, len(data), self.most or len(data)))).inputs

    def hashed(self, data: Any, split: str) -> _Hashed:
        """Return the hashes of a split."""
        exact, close, labels, uniform = [np.empty(0, dtype=np.uint64)], [], [], True
        for rows in read_rows(data, memory_mb=self.size, split=split, first=self.most):
            inputs = _alike(rows.inputs, self.like)
            uniform &= inputs.dtype == self.like.dtype
            exact.append(exact_hashes(inputs))
            close.append(self.hasher(inputs) if self.hasher and uniform else None)
            labels.append(rows.labels)
        return _Hashed(np.concatenate(exact), joined(close), joined(labels), uniform)

    def _blocks(self, data: Any, places: Places, split: str) -> Iterator[NDArray[Any]]:
        for start in range(0, len(places), PEEKED):
            yield _alike(fetch_rows(data, places[start : start + PEEKED].tolist(), split=split).inputs, self.like)

    def find(self, name: str, data: Any, mine: _Hashed) -> dict[str, Any]:
        """Return where rows of a split are in the training split, as JSON values."""
        found = _first(self.ours.exact, mine.exact)
        equal = found >= 0
        distance, scale, chance = np.where(equal, 0.0, np.inf), 1.0, 0.0
        if mine.near is not None and self.ours.near is not None:
            for k in range(mine.near.shape[1]):
                places = _first(self.ours.near[:, k], mine.near[:, k])
                asked = np.flatnonzero((places >= 0) & (found < 0))
                apart = self._apart(name, data, asked, places[asked])
                hits = asked[apart <= self.tolerance]
                found[hits], distance[hits] = places[hits], apart[apart <= self.tolerance]
        asked = np.flatnonzero(~equal & (found >= 0) if self.wide else ~equal)
        checked = asked[np.linspace(0, len(asked) - 1, min(len(asked), CONFIRMED)).astype(int)]
        if len(asked) and self.wide and self.background.inputs is not None:
            a, b = (
                np.concatenate([block[:, self.background.columns].astype(np.float64) for block in self._blocks(*side)])
                for side in ((data, checked, name), (self.train, found[checked], "train"))
            )
            told = closer_than_chance(a, b, self.background.inputs, rows=len(self.ours.exact))
            close, chance = (np.zeros(len(checked), dtype=bool), 1.0) if told is None else told
            found[np.setdiff1d(asked, checked[close])] = -1
        elif len(asked) and self.table is not None and mine.uniform:
            rows = np.concatenate(list(self._blocks(data, checked, name))).astype(np.float64)
            copies, nearest, away, chance = narrow_copies(rows, self.table)
            if copies.any() and chance > BY_CHANCE and self.ours.labels is not None and mine.labels is not None:
                alike = near_copies(self.table, self.ours.labels[:, None], rows, mine.labels[checked, None])
                copies, chance = (alike, BY_CHANCE) if alike.any() else (copies, chance)
            hits = checked[copies]
            found[hits], distance[hits] = nearest[copies], away[copies]
        if len(asked) and (self.wide or self.table is not None):
            scale = len(asked) / len(checked)
        hits = np.flatnonzero(found >= 0)
        shown = hits[np.argsort(distance[hits], kind="stable")][:SHOWN]
        agree = None
        if mine.labels is not None and self.ours.labels is not None:
            agree = mine.labels[hits] == self.ours.labels[found[hits]]
        return {
            "rows": len(found), "exact": int(equal.sum()), "near": round(float((~equal[hits]).sum()) * scale), "by_chance": chance,
            "same": len(found) > 0 and np.array_equal(mine.exact, self.ours.exact),
            "pairs": [[int(i), int(found[i]), round(float(distance[i]), 4)] for i in shown],
            "same_label": int(np.sum(agree)) if agree is not None else 0, "labelled": len(hits) if agree is not None else 0,
        }  # fmt: skip

    def _apart(self, name: str, data: Any, mine: Places, theirs: Places) -> Floats:
        """Return how far rows are apart, in deviations of a row; infinite for rows of equal values."""
        if self.text:
            return np.full(len(mine), 1e-3)
        found = [np.empty(0)]
        for here, there in zip(self._blocks(data, mine, name), self._blocks(self.train, theirs, "train"), strict=True):
            a, b = standardised(self.view(here)), standardised(self.view(there))
            found.append(np.where(a.any(1) & b.any(1), np.sqrt(((a - b) ** 2).mean(1)), np.inf))
        return np.concatenate(found)


def _first(theirs: Words, mine: Words) -> Places:
    """Return where each of `mine` is among `theirs` first, -1 where it is not."""
    values, first = np.unique(theirs, return_index=True)
    return np.asarray(np.append(first, -1)[pd.Index(values).get_indexer(pd.Index(mine))])


def joined(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return the parts as one; None where one is missing, or there are none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None


def _alike(rows: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Return `rows` in the type of `like`, where one split holds integers and the other does not; sizes have to agree."""
    if object in (rows.dtype, like.dtype) or rows.shape[1] != like.shape[1]:
        return as_objects(rows)
    return rows.astype(like.dtype) if rows.dtype.kind != like.dtype.kind else rows


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

    Returns:
        None where the background is too small to tell.
    """
    if len(background) < 3 * NEIGHBOURS[1]:
        return None
    close, chance = np.zeros(len(ours), dtype=bool), 0.0
    ours, theirs, background = (np.nan_to_num(each) for each in (ours, theirs, background))
    for view in (standardised, by_column(background)):
        a, b, c = view(ours), view(theirs), view(background)
        between = np.maximum((a**2).mean(1)[:, None] + (c**2).mean(1) - 2 * (a @ c.T) / a.shape[1], 0)
        near, far = np.sqrt(np.sort(between, axis=1)[:, [k - 1 for k in NEIGHBOURS]]).T
        limit, share = _copies_within(near, far, len(background), rows)
        close |= np.sqrt(((a - b) ** 2).mean(1)) <= limit * near
        chance = min(1.0, chance + share)
    return close, chance


def _copies_within(near: Floats, far: Floats, background: int, rows: int) -> tuple[float, float]:
    """Return how close a copy is, in distances to the 10th nearest, and the share of unrelated rows that are as close.

    Args:
        near: distances to the 10th nearest row, far: to the 20th, of so many in the `background`.
        rows: of the training split, the nearest of which would be a copy.
    """
    steps = np.log(np.maximum(far, 1e-12) / np.maximum(near, 1e-12))
    directions = float(np.log(NEIGHBOURS[1] / NEIGHBOURS[0]) / max(float(np.median(steps)), 1e-6))
    expected = (background / (NEIGHBOURS[0] * max(rows, background))) ** (1 / directions)
    close = min(CLOSE, BY_CHANCE ** (1 / directions))
    return close * expected, min(1.0, close**directions)


def comparable(background: Floats) -> Callable[[Floats], Floats]:
    """Return the function that puts columns on one scale, where a few are so much larger that all rows look alike; else none does."""
    size = np.sqrt(np.square(np.clip(np.nan_to_num(background), -LARGEST, LARGEST)).mean(0))
    return by_column(np.nan_to_num(background)) if size.max() > LARGE * np.quantile(size, 0.75) > 0 else np.asarray


def narrow_copies(rows: Floats, train: Floats) -> tuple[NDArray[np.bool_], Places, Floats, float]:
    """Return which rows are far closer to a training row than neighbours are, to which and how far, and the share that chance makes."""
    train, rows = (np.clip(np.nan_to_num(each), -LARGEST, LARGEST) for each in (train, rows))
    scaled = by_column(train)
    theirs, ours = (np.clip(scaled(each), -LARGEST, LARGEST) for each in (train, rows))
    tree = KDTree(theirs)
    found, places = tree.query(ours, k=NEIGHBOURS[1])
    own = np.linspace(0, len(theirs) - 1, min(len(theirs), CLUMPS)).astype(int)
    others = tree.query(theirs[own], k=NEIGHBOURS[1] + 1)[0][:, 1:]
    near, far = (k - 1 for k in NEIGHBOURS)
    limit, share = _copies_within(others[:, near], others[:, far], len(train), len(train))
    copies, clumps = ((d[:, 0] > _EQUAL) & (d[:, 0] <= limit * d[:, near]) for d in (found, others))
    return copies, places[:, 0], found[:, 0] / np.sqrt(train.shape[1]), max(share, float(clumps.mean()))
