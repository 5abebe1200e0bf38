"""Curves as a page needs them: in one order of trials, and no more points than there are pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["METRICS", "Curve", "CurvePoints", "Rows", "kept", "packed"]

METRICS = ("loss", "grad_norm", "lr")
COLUMNS = 1000  # a page is no wider: two points in each of them
MOST_ROWS = 1 << 20  # rule of thumb: 20 MB; what a longer study has beyond is thinned
THINNED = 4 * COLUMNS  # columns that are left of it

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Rows(NamedTuple):
    """Rows of some trials, trial after trial and in order of steps.

    Attributes:
        trial: number, shape (rows,).
        step: shape (rows,).
        values: of loss, grad_norm and lr, shape (3, rows).
    """

    trial: Ints
    step: Ints
    values: Floats


class Curve(NamedTuple):
    """One metric of one trial."""

    trial: int
    step: Ints
    value: Floats


def kept(steps: NDArray[Any], values: NDArray[Any], columns: int) -> NDArray[np.int64]:
    """Return the positions that draw the same picture: both ends, and of each column of steps the lowest and highest value.

    Args:
        steps: in order, shape (rows,).
        values: shape (rows,); where a column has none that is finite, its first row stays, so that the gap does.
        columns: into which the steps are divided evenly; no more than two rows in each stay.
    """
    count = len(steps)
    if count <= 2 * columns:
        return np.arange(count)
    span = int(steps[-1]) - int(steps[0]) + 1
    column = (steps.astype(np.int64) - int(steps[0])) * columns // span
    begins = np.flatnonzero(np.diff(column, prepend=-1))
    group = np.repeat(np.arange(len(begins)), np.diff(begins, append=count))
    finite = np.isfinite(values)
    found = [np.array([0, count - 1])]
    for sign in (1.0, -1.0):
        height = np.where(finite, sign * values, np.inf)
        hit = np.flatnonzero(height == np.minimum.reduceat(height, begins)[group])
        found.append(hit[np.diff(group[hit], prepend=-1) > 0])
    return np.unique(np.concatenate(found))


class CurvePoints:
    """Every curve of one study; what a long study has too much of is thinned as it comes."""

    def __init__(self) -> None:
        self._parts: list[Rows] = []
        self._thinned: list[list[Curve]] = [[] for _ in METRICS]
        self._held = 0

    def add(self, blocks: Sequence[Mapping[str, Any]]) -> Rows:
        """Keep blocks of rows of the table of steps, and return them as one."""
        rows = _joined(blocks)
        if len(rows.trial):
            self._parts.append(rows)
            self._held += len(rows.trial)
        if self._held > MOST_ROWS:
            self._thinned = [self.curves(metric, THINNED) for metric in range(len(METRICS))]
            self._parts, self._held = [], 0
        return rows

    def rewind(self, trial: int, step: int) -> None:
        """Drop the trial's rows of `step` and later."""
        parts = [Rows(p.trial[k], p.step[k], p.values[:, k]) for p in self._parts for k in [_before(p, trial, step)]]
        self._parts = [part for part in parts if len(part.trial)]
        self._held = sum(len(part.trial) for part in self._parts)
        self._thinned = [
            [c if c.trial != trial else Curve(trial, c.step[c.step < step], c.value[c.step < step]) for c in curves]
            for curves in self._thinned
        ]

    def curves(self, metric: int, columns: int = COLUMNS) -> list[Curve]:
        """Return the curve of every trial that has one, at most `columns` times two points and its ends."""
        pieces: dict[int, list[tuple[Ints, Floats]]] = {}
        for curve in self._thinned[metric]:
            pieces.setdefault(curve.trial, []).append((curve.step, curve.value))
        if len(self._parts) > 1:  # what was joined once need not be again
            self._parts = [_sorted(*(np.concatenate(each, axis=-1) for each in zip(*self._parts, strict=True)))]
        for part in self._parts:
            for trial, run in _runs(part.trial):
                pieces.setdefault(trial, []).append((part.step[run], part.values[metric, run]))
        found = []
        for trial, pairs in sorted(pieces.items()):
            steps, values = (np.concatenate(each) for each in zip(*pairs, strict=True))
            where = kept(steps, values, columns)
            found.append(Curve(trial, steps[where], values[where]))
        return found


def packed(rows: Rows) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Return how rows lie in buffers, and the buffers: int32 steps, then float32 values of one metric after the other."""
    if not len(rows.trial):
        return [], []
    counts = [[trial, where.stop - where.start] for trial, where in _runs(rows.trial)]
    buffers = [rows.step.data, *(np.ascontiguousarray(values).data for values in rows.values)]
    return [{"metrics": list(METRICS), "rows": counts}], buffers


def _joined(blocks: Sequence[Mapping[str, Any]]) -> Rows:
    def column(name: str, dtype: Any) -> NDArray[Any]:
        parts = [np.asarray(block.get(name, np.full(len(block["trial"]), np.nan))) for block in blocks]
        return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)

    with np.errstate(over="ignore"):  # beyond float32 is infinite, for a picture
        values = np.stack([column(name, np.float32) for name in METRICS])
    return _sorted(column("trial", np.int32), column("step", np.int32), values)


def _sorted(trial: Ints, step: Ints, values: Floats) -> Rows:
    """Put the rows of a trial together; their order stays."""
    if (np.diff(trial) >= 0).all():
        return Rows(trial, step, values)
    order = np.argsort(trial, kind="stable")
    return Rows(trial[order], step[order], values[:, order])


def _runs(trials: Ints) -> Iterator[tuple[int, slice]]:
    begins = np.flatnonzero(np.diff(trials, prepend=-1)).tolist()
    for begin, end in zip(begins, [*begins[1:], len(trials)], strict=True):
        yield int(trials[begin]), slice(begin, end)


def _before(rows: Rows, trial: int, step: int) -> NDArray[np.bool_]:
    earlier: NDArray[np.bool_] = (rows.trial != trial) | (rows.step < step)
    return earlier
