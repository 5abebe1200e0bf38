"""`find_overlap`: rows of one split that are in the training split too, exactly or nearly (P2.9), and rows that a split repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from workbench.errors import ConfigError
from workbench.topics.data.rows import (
    NEAR_VALUES,
    NearTables,
    Numbers,
    Rows,
    Sample,
    as_objects,
    exact_hashes,
    fetch_rows,
    is_ids,
    read_rows,
    split_sample,
    standardised,
    text_of,
)  # fmt: skip

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
SHOWN = 20
PEEKED = 64
"""Rows that tell whether all are of one size, at most."""
COMPARED = 4096
"""Pairs of one block that share a near hash and are compared number by number, at most."""
CONFIRMED = 1000
"""Near rows that are held against unrelated ones, at most; the others count in proportion."""
BACKGROUND = 300
"""Unrelated training rows for that (rule of thumb)."""
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
ROWS = 20_000
"""Training rows that neighbours are looked for among, at most: 4 s for rows of 15 columns that depend on nothing."""
CLUMPS = 1000
"""Of these, whose own neighbours tell what comes by chance, at most."""
_EQUAL = 1e-9
"""Distance of rows that are equal but for rounding, in scaled columns."""


def find_overlap(
    train: Any,
    others: Mapping[str, Any],
    *,
    near: bool = True,
    tolerance: float = 0.1,
    memory_mb: float = 256.0,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Return JSON facts on which rows of `others` are in `train` too; every hit is compared number by number.

    Exact: equal inputs. Near: numbers that agree after each row is standardised by its own mean and deviation, to a
    distance of `tolerance` deviations (the same picture brighter, in other units, with a little noise); text that agrees
    without case, white space and punctuation. Not found: what was shifted, cropped, mirrored, resized, or said in other
    words; near integers (tokens) and near rows of different sizes. Near rows that are no closer than unrelated ones come by chance do
    not count (`closer_than_chance`); in rows of fewer than 16 values they are looked for by column, among their neighbours
    (`narrow_copies`), where the training split has no more than 20,000 rows.

    Args:
        train: the training split, map-style.
        others: split name -> map-style dataset.
        near: look for near duplicates too.
        tolerance: root mean square difference of two standardised rows that still counts as near (rule of thumb).
        memory_mb: of the blocks that are in memory at a time, in units of 1e6 bytes; hashes take 8 bytes a training row and
            some 110 a row of `others` beyond that.
        max_rows: of each split, the first ones; None is all.

    Returns:
        "train_rows", "train_duplicates" (rows that were there before), "near" (whether it could be looked for), "repeats" (of
        `repeats`, for each split), and under "splits" for each: "rows", "exact", "near" (numbers of rows), "by_chance" (share of
        unrelated rows that would pass for near), "same" (it is the training split, row for row), "pairs" (the first ones: index
        there, index in train, distance), "same_label" and "labelled" (of the overlapping rows).

    Raises:
        ConfigError: a setting is out of its range.
    """
    if not memory_mb > 0:
        raise ConfigError(f"memory_mb={memory_mb!r} must be above 0: the size of the blocks that are read at a time.")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance={tolerance!r} must lie between 0 and 1; unrelated rows differ by 1.4.")
    size = memory_mb / 8  # a block, its copies, and the rows it is compared with
    first, *rest = (_peeked(data, size, max_rows) for data in (train, *others.values()))
    if any(rows.shape[1:] != first.shape[1:] for rows in rest if len(rows)):  # those of objects have one axis
        first = as_objects(first)
    sample = split_sample(train, split="train", most=max_rows, memory_mb=size, rows=BACKGROUND)
    measured = not (first.dtype == object or is_ids(first) or first.dtype.kind == "b")  # no text, tokens or flags
    tables = None
    if near and measured and first.shape[1] >= NEAR_VALUES:
        inputs = sample.inputs
        whole = inputs is not None and inputs.shape[1] == first.shape[1]
        tables = NearTables(first.shape[1], view=comparable(inputs) if whole and inputs is not None else None)
    narrow = near and measured and first.ndim == 2 and 0 < first.shape[1] < NEAR_VALUES
    sides = [_Side(name, data, like=first, tables=tables, size=size, most=max_rows) for name, data in others.items()]
    seen: list[Words] = []
    labels: list[NDArray[Any] | None] = []
    kept: list[Floats] = []
    for rows in read_rows(train, memory_mb=size, first=max_rows):
        alike = rows._replace(inputs=_alike(rows.inputs, first))
        hashes = exact_hashes(alike.inputs)
        seen.append(hashes)
        labels.append(rows.labels)
        if narrow and rows.start + len(rows.inputs) <= ROWS:
            kept.append(alike.inputs.astype(np.float64))
        close = _near_hashes(alike.inputs, tables) if near else None
        for side in sides:
            side.match(alike, hashes, close, tolerance)
    every = np.concatenate(seen) if seen else np.empty(0, dtype=np.uint64)
    if tables is not None:
        for side in sides:
            side.confirm(train, sample, len(every))
    table = np.concatenate(kept) if kept else np.empty((0, 0))
    told = [side.search(table, joined(labels)) for side in sides if len(table) == len(every) > 0]
    own = repeats(every, joined(labels))
    return {
        "train_rows": own["rows"],
        "train_duplicates": own["repeated"],
        "near": near and (tables is not None or (bool(told) and all(told)) or _are_text(first)),
        "repeats": {"train": own} | {side.name: repeats(side.exact, side.labels) for side in sides},
        "splits": {side.name: side.facts(every) for side in sides},
    }


class _Side:
    """A split that is looked for in the training split: its hashes, and where its rows were found."""

    def __init__(
        self, name: str, data: Any, *, like: NDArray[Any], tables: NearTables | None, size: float, most: int | None
    ) -> None:
        self.name, self.data, self.tables = name, data, tables
        exact, close, labels = [], [], []
        for rows in read_rows(data, memory_mb=size, split=name, first=most):
            inputs = _alike(rows.inputs, like)
            exact.append(exact_hashes(inputs))
            close.append(_near_hashes(inputs, tables))
            labels.append(rows.labels)
        self.exact = np.concatenate(exact) if exact else np.empty(0, dtype=np.uint64)
        self.close, self.labels = joined(close), joined(labels)
        self.order = np.argsort(self.exact, kind="stable")
        self.orders = None if self.close is None else np.argsort(self.close, axis=0, kind="stable")
        count = len(self.exact)
        self.found = np.full(count, -1, dtype=np.int64)
        self.distance = np.full(count, np.inf)
        self.equal, self.agrees, self.labelled = (np.zeros(count, dtype=bool) for _ in range(3))
        self.scale, self.by_chance = 1.0, 0.0

    def match(self, rows: Rows, exact: NDArray[Any], close: NDArray[Any] | None, tolerance: float) -> None:
        """Note which rows of this split are among these of the training split."""
        self._note(rows, *_pairs(self.exact, self.order, exact), 0.0)
        if close is None or self.close is None or self.orders is None or close.shape[1] != self.close.shape[1]:
            return
        for table in range(close.shape[1]):
            self._note(rows, *_pairs(self.close[:, table], self.orders[:, table], close[:, table]), tolerance)

    def _note(self, rows: Rows, mine: NDArray[Any], theirs: NDArray[Any], tolerance: float) -> None:
        exact = tolerance == 0
        open_ = ~self.equal[mine] if exact else ~np.isfinite(self.distance[mine])
        mine, theirs = mine[open_], theirs[open_]
        for start in range(0, len(mine) if exact else min(len(mine), COMPARED), COMPARED // 8):
            part = slice(start, start + COMPARED // 8)
            i, j = mine[part], theirs[part]
            here, there = fetch_rows(self.data, i.tolist(), split=self.name).inputs, rows.inputs[j]
            here = _alike(here, there)
            if not exact and self.tables is not None:
                here, there = self.tables.view(here), self.tables.view(there)
            distance = _distances(here, there, exact=exact)
            better = (distance <= tolerance) & ((distance < self.distance[i]) | exact)
            i, j = i[better], j[better]
            self.equal[i] = exact
            self.found[i], self.distance[i] = rows.start + j, distance[better]
            if self.labels is not None and rows.labels is not None:
                self.agrees[i], self.labelled[i] = self.labels[i] == rows.labels[j], True

    def confirm(self, train: Any, sample: Sample, rows: int) -> None:
        """Drop the near rows that are no closer than unrelated training rows, `sample`, come by chance among so many `rows`."""
        near = np.flatnonzero((self.found >= 0) & ~self.equal)
        if not near.size or sample.inputs is None:
            return
        checked = near[np.linspace(0, near.size - 1, min(near.size, CONFIRMED)).astype(int)]
        ours, theirs = (
            np.concatenate([block[:, sample.columns].astype(np.float64) for block in _blocks(data, places)])
            for data, places in ((self.data, checked), (train, self.found[checked]))
        )
        told = closer_than_chance(ours, theirs, sample.inputs, rows=rows)
        kept, self.by_chance = (np.zeros(len(checked), dtype=bool), 1.0) if told is None else told
        self.scale = near.size / len(checked)
        dropped = np.setdiff1d(near, checked[kept])
        self.found[dropped], self.distance[dropped] = -1, np.inf
        self.agrees[dropped], self.labelled[dropped] = False, False

    def search(self, train: Floats, labels: NDArray[Any] | None) -> bool:
        """Look for near copies of few columns among all training rows; False where nobody can tell them from neighbours."""
        different = np.flatnonzero(~self.equal)
        if not different.size:
            return True
        asked = different[np.linspace(0, different.size - 1, min(different.size, CONFIRMED)).astype(int)]
        blocks = _blocks(self.data, asked, self.name)
        if any(block.dtype == object or block.shape[1] != train.shape[1] for block in blocks):
            return False
        told = narrow_copies(np.concatenate(blocks).astype(np.float64), train)
        if told is None:
            return False
        hits, places = asked[told.copies], told.nearest[told.copies]
        self.found[hits], self.distance[hits] = places, told.distance[told.copies]
        if self.labels is not None and labels is not None:
            self.agrees[hits], self.labelled[hits] = self.labels[hits] == labels[places], True
        self.scale, self.by_chance = different.size / len(asked), told.by_chance
        return True

    def facts(self, train: Words) -> dict[str, Any]:
        """Return what was found as JSON values, `train` being the hashes of the training rows."""
        hits = np.flatnonzero(self.found >= 0)
        shown = hits[np.argsort(self.distance[hits], kind="stable")][:SHOWN]
        return {
            "rows": len(self.exact),
            "exact": int(self.equal[hits].sum()),
            "near": round(float((~self.equal[hits]).sum()) * self.scale),
            "by_chance": self.by_chance,
            "same": bool(len(train) == len(self.exact) > 0 and (train == self.exact).all()),
            "pairs": [[int(i), int(self.found[i]), round(float(self.distance[i]), 4)] for i in shown],
            "same_label": int(self.agrees[hits].sum()),
            "labelled": int(self.labelled[hits].sum()),
        }


def _peeked(data: Any, size: float, most: int | None) -> NDArray[Any]:
    """Return the inputs of the first rows, of as many as `size` times 1e6 bytes hold, and `most`."""
    if not len(data):
        return np.empty((0, 0))
    held = max(1, int(size * 1e6) // max(1, fetch_rows(data, [0]).inputs.nbytes))
    return fetch_rows(data, range(min(PEEKED, held, len(data), most or len(data)))).inputs


def _blocks(data: Any, places: NDArray[Any], split: str = "train") -> list[NDArray[Any]]:
    parts = np.array_split(places, -(-len(places) // PEEKED))
    return [fetch_rows(data, part.tolist(), split=split).inputs for part in parts]


def joined(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return the parts as one; None where one is missing, or there are none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None


def _near_hashes(rows: NDArray[Any], tables: NearTables | None) -> Words | None:
    if _are_text(rows):
        return exact_hashes(np.array([text_of(value) for value in rows], dtype=object))[:, None]
    return None if tables is None or rows.dtype == object else tables.hashes(rows)


def _are_text(rows: NDArray[Any]) -> bool:
    return bool(rows.dtype == object and len(rows) and not isinstance(rows[0], Numbers))


def _alike(rows: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Return `rows` in the type of `like`, where one split holds integers and the other does not; sizes have to agree."""
    if object in (rows.dtype, like.dtype) or rows.shape[1] != like.shape[1]:
        return as_objects(rows)
    return rows.astype(like.dtype) if rows.dtype.kind != like.dtype.kind else rows


def _pairs(
    mine: NDArray[Any], order: NDArray[Any], theirs: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (index in mine, index in theirs) of equal hashes: every one of mine, each with one of theirs."""
    if not len(mine) or not len(theirs):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    sorted_ = mine[order]
    low, high = np.searchsorted(sorted_, theirs, "left"), np.searchsorted(sorted_, theirs, "right")
    hits = np.flatnonzero(high > low)
    _, once = np.unique(theirs[hits], return_index=True)
    hits = hits[once]
    counts = (high - low)[hits]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.repeat(low[hits], counts) + offsets].astype(np.int64), np.repeat(hits, counts).astype(np.int64)


def _distances(a: NDArray[Any], b: NDArray[Any], *, exact: bool) -> NDArray[np.float64]:
    """Return how far rows are apart: 0 for equal ones, else in deviations of a row; infinite for what cannot be compared."""
    if object in (a.dtype, b.dtype):
        a, b = as_objects(a), as_objects(b)
        same = [text_of(x) == text_of(y) if not exact else x == y for x, y in zip(a, b, strict=True)]
        return np.where(same, 0.0 if exact else 1e-3, np.inf)
    if exact:
        return np.where(np.isclose(a, b, rtol=1e-6, atol=0, equal_nan=True).all(axis=1), 0.0, np.inf)
    apart: NDArray[np.float64] = np.sqrt(((standardised(a) - standardised(b)) ** 2).mean(axis=1))
    return apart


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
    """Return the function that puts columns on one scale, where a few are so much larger that all rows look alike; else None."""
    if not len(background):
        return None
    size = np.sqrt(np.square(np.clip(np.nan_to_num(background), -LARGEST, LARGEST)).mean(0))
    return by_column(np.nan_to_num(background)) if size.max() > LARGE * np.quantile(size, 0.75) > 0 else None


def by_column(background: Floats) -> Callable[[Floats], Floats]:
    """Return the function that puts every column on the scale of its middle half, or of its deviation where that is a point."""
    low, middle, high = np.quantile(background, (0.25, 0.5, 0.75), axis=0)
    spread = np.where(high > low, high - low, np.std(background, axis=0))
    spread[spread == 0] = 1.0

    def scaled(rows: Floats) -> Floats:
        return np.asarray((rows - middle) / spread)

    return scaled


class NarrowCopies(NamedTuple):
    """Which rows are near copies, the nearest training row of each and its distance, and the share that chance makes."""

    copies: NDArray[np.bool_]
    nearest: NDArray[np.int64]
    distance: Floats
    by_chance: float


def narrow_copies(rows: Floats, train: Floats) -> NarrowCopies | None:
    """Return which rows are far closer to a training row than neighbours are, and the share of unrelated rows that would be too.

    The distance at which chance has the nearest row follows from the 10th and the 20th, as in `closer_than_chance`. Rows of tables also
    come in clumps, by categories or by time: what that makes is counted on training rows, each against all others. None where the
    training split is too small or too large.
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
