"""`find_overlap`: rows of one split that are in the training split too, exactly or nearly (P2.9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.topics.data.hashing import NEAR_VALUES, NearTables, Numbers, exact_hashes, standardised, text_of
from workbench.topics.data.narrow import ROWS, narrow_copies
from workbench.topics.data.repeats import closer_than_chance, comparable, repeats
from workbench.topics.data.rows import Rows, as_objects, fetch_rows, read_rows
from workbench.topics.data.sample import Sample, split_sample

__all__ = ["find_overlap"]

SHOWN = 20
PEEKED = 64
"""Rows that tell whether all are of one size, at most."""
COMPARED = 4096
"""Pairs of one block that share a near hash and are compared number by number, at most."""
CONFIRMED = 1000
"""Near rows that are held against unrelated ones, at most; the others count in proportion."""
BACKGROUND = 300
"""Unrelated training rows for that (rule of thumb)."""


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
    tables = _tables(first, sample) if near else None
    narrow: list[NDArray[Any]] | None = [] if near and _are_narrow(first) else None
    sides = {
        name: _Side(name, data, like=first, tables=tables, size=size, most=max_rows) for name, data in others.items()
    }
    seen: list[NDArray[np.uint64]] = []
    labels: list[NDArray[Any] | None] = []
    for rows in read_rows(train, memory_mb=size, first=max_rows):
        alike = rows._replace(inputs=_alike(rows.inputs, first))
        hashes = exact_hashes(alike.inputs)
        seen.append(hashes)
        labels.append(rows.labels)
        if narrow is not None and rows.start + len(rows.inputs) <= ROWS:
            narrow.append(alike.inputs.astype(np.float64))
        close = _near_hashes(alike.inputs, tables) if near else None
        for side in sides.values():
            side.match(alike, hashes, close, tolerance)
    every = np.concatenate(seen) if seen else np.empty(0, dtype=np.uint64)
    if tables is not None:
        for side in sides.values():
            side.confirm(train, sample, len(every))
    whole = np.concatenate(narrow) if narrow else np.empty((0, 0))
    told = [side.search(whole, _joined(labels)) for side in sides.values() if len(whole) == len(every) > 0]
    own = repeats(every, _joined(labels))
    return {
        "train_rows": own["rows"],
        "train_duplicates": own["repeated"],
        "near": near and (tables is not None or (bool(told) and all(told)) or _are_text(first)),
        "repeats": {"train": own} | {name: repeats(side.exact, side.labels) for name, side in sides.items()},
        "splits": {name: side.facts(every) for name, side in sides.items()},
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
        found = [c for c in close if c is not None]
        self.close = np.concatenate(found) if found and len(found) == len(close) else None
        self.labels = _joined(labels)
        self.order = np.argsort(self.exact, kind="stable")
        self.orders = None if self.close is None else np.argsort(self.close, axis=0, kind="stable")
        count = len(self.exact)
        self.found = np.full(count, -1, dtype=np.int64)
        self.distance = np.full(count, np.inf)
        self.equal = np.zeros(count, dtype=bool)
        self.agrees = np.zeros(count, dtype=bool)
        self.labelled = np.zeros(count, dtype=bool)
        self.scale, self.by_chance = 1.0, 0.0

    @property
    def near(self) -> NDArray[np.int64]:
        """Rows that were found, and are not equal."""
        return np.flatnonzero((self.found >= 0) & ~self.equal)

    def match(self, rows: Rows, exact: NDArray[Any], close: NDArray[Any] | None, tolerance: float) -> None:
        """Note which rows of this split are among these of the training split."""
        mine, theirs = _pairs(self.exact, self.order, exact)
        self._note(rows, mine, theirs, 0.0)
        if close is None or self.close is None or self.orders is None or close.shape[1] != self.close.shape[1]:
            return
        for table in range(close.shape[1]):
            mine, theirs = _pairs(self.close[:, table], self.orders[:, table], close[:, table])
            self._note(rows, mine, theirs, tolerance)

    def _note(self, rows: Rows, mine: NDArray[Any], theirs: NDArray[Any], tolerance: float) -> None:
        open_ = ~self.equal[mine] if tolerance == 0 else ~np.isfinite(self.distance[mine])
        mine, theirs = mine[open_], theirs[open_]
        for start in range(0, len(mine) if tolerance == 0 else min(len(mine), COMPARED), COMPARED // 8):
            part = slice(start, start + COMPARED // 8)
            i, j = mine[part], theirs[part]
            here, there = fetch_rows(self.data, i.tolist(), split=self.name).inputs, rows.inputs[j]
            here = _alike(here, there)
            if tolerance and self.tables is not None:
                here, there = self.tables.view(here), self.tables.view(there)
            distance = _distances(here, there, exact=tolerance == 0)
            better = (distance <= tolerance) & ((distance < self.distance[i]) | (tolerance == 0))
            i, j = i[better], j[better]
            self.equal[i] = tolerance == 0
            self.found[i], self.distance[i] = rows.start + j, distance[better]
            if self.labels is not None and rows.labels is not None:
                self.agrees[i], self.labelled[i] = self.labels[i] == rows.labels[j], True

    def confirm(self, train: Any, sample: Sample, rows: int) -> None:
        """Drop the near rows that are no closer than unrelated training rows come by chance.

        Args:
            train: the training split.
            sample: unrelated rows of it.
            rows: of the training split.
        """
        near = self.near
        if not near.size or sample.inputs is None:
            return
        checked = near[np.linspace(0, near.size - 1, min(near.size, CONFIRMED)).astype(int)]
        sides = [
            np.concatenate([fetch_rows(data, part.tolist()).inputs[:, sample.columns].astype(np.float64) for part in np.array_split(places, -(-len(places) // PEEKED))])
            for data, places in ((self.data, checked), (train, self.found[checked]))
        ]  # fmt: skip
        told = closer_than_chance(sides[0], sides[1], sample.inputs, rows=rows)
        kept = np.zeros(len(checked), dtype=bool) if told is None else told[0]
        self.by_chance = 1.0 if told is None else told[1]
        self.scale = near.size / len(checked)
        dropped = np.setdiff1d(near, checked[kept])
        self.found[dropped], self.distance[dropped] = -1, np.inf
        self.agrees[dropped], self.labelled[dropped] = False, False

    def search(self, train: NDArray[np.float64], labels: NDArray[Any] | None) -> bool:
        """Look for near copies of few columns; False where nobody can tell them from neighbours.

        Args:
            train: the rows of the training split.
            labels: of these; None where unknown.
        """
        different = np.flatnonzero(~self.equal)
        if not different.size:
            return True
        asked = different[np.linspace(0, different.size - 1, min(different.size, CONFIRMED)).astype(int)]
        blocks = [
            fetch_rows(self.data, part.tolist(), split=self.name).inputs
            for part in np.array_split(asked, -(-len(asked) // PEEKED))
        ]
        if any(_any_objects(block) or block.shape[1] != train.shape[1] for block in blocks):
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

    def facts(self, train: NDArray[np.uint64]) -> dict[str, Any]:
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


def _joined(parts: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None


def _tables(rows: NDArray[Any], sample: Sample) -> NearTables | None:
    """Return tables for rows like these; None for text, tokens and rows of few values. `sample` is of the training split."""
    if not _are_measured(rows):
        return None
    whole = sample.inputs is not None and sample.inputs.shape[1] == rows.shape[1]
    view = comparable(sample.inputs) if whole and sample.inputs is not None else None
    return NearTables(rows.shape[1], view=view) if rows.shape[1] >= NEAR_VALUES else None


def _are_measured(rows: NDArray[Any]) -> bool:
    """Tell whether rows hold numbers that may differ a little: no text, tokens or flags."""
    return not (rows.dtype == object or (rows.dtype.kind in "iu" and rows.dtype.itemsize > 2) or rows.dtype.kind == "b")


def _are_narrow(rows: NDArray[Any]) -> bool:
    return _are_measured(rows) and rows.ndim == 2 and 0 < rows.shape[1] < NEAR_VALUES


def _near_hashes(rows: NDArray[Any], tables: NearTables | None) -> NDArray[np.uint64] | None:
    if _are_text(rows):
        return exact_hashes(np.array([text_of(value) for value in rows], dtype=object))[:, None]
    return None if tables is None or rows.dtype == object else tables.hashes(rows)


def _are_text(rows: NDArray[Any]) -> bool:
    return bool(rows.dtype == object and len(rows) and not isinstance(rows[0], Numbers))


def _alike(rows: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Return `rows` in the type of `like`, where one split holds integers and the other does not; sizes have to agree."""
    if _any_objects(rows, like) or rows.shape[1] != like.shape[1]:
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
    if _any_objects(a, b):
        a, b = as_objects(a), as_objects(b)
        same = [text_of(x) == text_of(y) if not exact else x == y for x, y in zip(a, b, strict=True)]
        return np.where(same, 0.0 if exact else 1e-3, np.inf)
    if exact:
        return np.where(np.isclose(a, b, rtol=1e-6, atol=0, equal_nan=True).all(axis=1), 0.0, np.inf)
    apart: NDArray[np.float64] = np.sqrt(((standardised(a) - standardised(b)) ** 2).mean(axis=1))
    return apart


def _any_objects(*arrays: NDArray[Any]) -> bool:
    return any(array.dtype == object for array in arrays)
