"""Hashes of rows: equal ones for equal rows, and ones that nearly equal rows share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEAR_VALUES", "NearTables", "Numbers", "exact_hashes", "standardised", "text_of"]

Words = NDArray[np.uint64]
View = Callable[[NDArray[Any]], NDArray[Any]]
BLOCK_BYTES = (
    2**23
)  # rule of thumb: smaller blocks stay in the cache, but two threads of a product then wait for each other
NEAR_VALUES = 16  # rule of thumb: rows with fewer values are near each other by chance
_SEED = 20_261_122


class Numbers(bytes):
    """The bytes of a row of numbers, where rows are of different sizes: no text, though bytes."""


def exact_hashes(rows: NDArray[Any]) -> Words:
    """Return a 64-bit hash of each row, shape (rows,): equal numbers give equal hashes, whatever their type was.

    Numbers are compared as float32, integers above 2**24 as themselves; 0 and -0 are one, so are all NaN. Objects are text,
    bytes or `Numbers`.
    """
    if rows.dtype == object:
        return np.array([_digest(value) for value in rows], dtype=np.uint64)
    words_of = _words_of(rows)
    count = words_of(rows[:1]).shape[1] if len(rows) else 0
    factors = np.random.default_rng(_SEED).integers(0, 2**64, (2, count), dtype=np.uint64) | np.uint64(1)
    step = max(1, BLOCK_BYTES // max(1, 8 * count))
    found = np.empty(len(rows), dtype=np.uint64)
    for start in range(0, len(rows), step):
        words = words_of(rows[start : start + step])
        for (
            factor
        ) in factors:  # twice, because a product carries upwards only: the topmost bits of two words would cancel
            words ^= words >> np.uint64(32)
            words *= factor
        found[start : start + step] = _mixed(words.sum(axis=1, dtype=np.uint64))
    return found


class NearTables:
    """Locality-sensitive hashes: rows that differ little share one of several (Datar et al. 2004).

    A row is standardised by its own mean and deviation, so that brightness, contrast and units fall out, projected on random
    directions and rounded.

    Args:
        values: per row.
        tables: hashes of a row.
        directions: projections that one hash is made of.
        width: of a rounding step, in deviations of a row.
        view: what rows go through first; None leaves them as they are.
    """

    def __init__(
        self, values: int, *, tables: int = 4, directions: int = 8, width: float = 0.25, view: View | None = None
    ) -> None:
        self.view: View = view or np.asarray
        rng = np.random.default_rng(_SEED + 1)
        axes = rng.standard_normal((values, tables * directions)) / np.sqrt(values)
        self._axes = axes.astype(np.float32)
        self._sums = self._axes.sum(axis=0)
        self._offsets = rng.random(tables * directions).astype(np.float32)
        self._factors = rng.integers(0, 2**64, (tables, directions), dtype=np.uint64) | np.uint64(1)
        self._width = np.float32(width)

    def hashes(self, rows: NDArray[Any]) -> Words:
        """Return the hashes of each row, shape (rows, tables); a row of equal values has none that another could share."""
        tables, directions = self._factors.shape
        found = np.empty((len(rows), tables), dtype=np.uint64)
        step = max(1, BLOCK_BYTES // max(1, 4 * rows.shape[1]))
        for start in range(0, len(rows), step):
            block = np.ascontiguousarray(self.view(rows[start : start + step]), dtype=np.float32)
            mean = block.mean(axis=1, keepdims=True)
            spread = np.sqrt(np.maximum(np.einsum("ij,ij->i", block, block)[:, None] / block.shape[1] - mean**2, 0))
            flat = ~(spread > 1e-6 * np.abs(mean)) | ~np.isfinite(spread)
            along = (block @ self._axes - mean * self._sums) / np.where(flat, 1, spread)
            cells = np.floor(np.where(flat, 0, along) / self._width + self._offsets * len(self._offsets))
            parts = cells.astype(np.int64).view(np.uint64).reshape(-1, tables, directions)
            joined = _mixed((_mixed(parts) * self._factors).sum(axis=2, dtype=np.uint64))
            found[start : start + step] = joined
            if flat.any():
                found[start : start + step][flat[:, 0]] = exact_hashes(block[flat[:, 0]])[:, None]
        return found


def standardised(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return rows of mean 0 and deviation 1, shape (rows, values); rows of equal values become zeros."""
    values = rows.astype(np.float64)
    values -= values.mean(axis=1, keepdims=True)
    spread = values.std(axis=1, keepdims=True)
    scaled: NDArray[np.float64] = np.divide(values, spread, out=np.zeros_like(values), where=spread > 0)
    return scaled


def text_of(value: Any) -> str:
    """Return text without what copies differ in: case, white space, punctuation; rows of numbers keep every digit."""
    if isinstance(value, Numbers):
        return value.hex()
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def _words_of(rows: NDArray[Any]) -> Any:
    """Return the function that turns rows of this type into words of 64 bits."""
    integers = rows.dtype.kind in "iu" and rows.dtype.itemsize > 2

    def words(block: NDArray[Any]) -> Words:
        if integers:
            return block.astype(np.int64).view(np.uint64)
        values = block.astype(np.float32)  # a copy
        values += np.float32(0)  # -0 becomes 0
        if not np.isfinite(values.sum()):
            values[np.isnan(values)] = np.float32("nan")
        if values.shape[1] % 2:
            values = np.pad(values, ((0, 0), (0, 1)))
        return values.view(np.uint64)

    return words


def _mixed(words: Words) -> Words:
    """Return the words with every bit spread over all of them (the finaliser of MurmurHash3)."""
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xFF51AFD7ED558CCD)
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def _digest(value: Any) -> int:
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
