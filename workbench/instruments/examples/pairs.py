"""`Pairs`: whether inputs that are trained on in several passes over the data have the same class each time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.instruments.examples.seen import digests
from workbench.instruments.losses.classes import Compared

_ROWS, _SPARSER = 100_000, 64
"""Examples that are kept at most, and updates from which on ever fewer are looked at, so that later passes are among them (rules of thumb)."""


class Pairs:
    """Keeps a digest of each example of an update whose loss picks one class for each, with the class and the pass over the data."""

    def __init__(self) -> None:
        self._given: list[tuple[int, Sequence[Tensor]]] = []  # to models that are trained, since the last backward pass
        self._asked: set[int] = set()  # rows of passes without gradient, which may have made the classes
        self._fillers: dict[int, Tensor] = {}
        self._kept: list[tuple[int, int, Tensor, Tensor]] = []
        self._rows = self._due = 0

    def drew(self) -> None:
        """Take in that a batch is drawn: passes without gradient that came before made no classes for it."""
        self._asked.clear()

    def entered(self, given: Sequence[Tensor], number: int, update: int, *, trains: bool) -> None:
        """Take in a forward pass of a whole model on what was drawn in pass `number` over a loader."""
        if not given or not given[0].dim() or given[0].grad_fn is not None or update < self._due or self._rows >= _ROWS:
            return
        if trains:
            self._given = [*self._given[-1:], (number, given)]  # more than one of them are as good as two
        else:
            self._asked.add(len(given[0]))

    def trained(self, compared: Compared | None, update: int) -> None:
        """Take in what a loss compares that `backward` is about to be called on, as `Written` reads it."""
        entered, self._given = self._given, []
        if compared is None or len(entered) != 1 or not compared[0].endswith(("entropy", "logits")):
            return
        target, (number, given) = compared[2].detach(), entered[0]
        if target.numel() != len(given[0]) or len(given[0]) in self._asked:
            return
        inputs = [part for part in given if part.data_ptr() != target.data_ptr()]  # a model may be given its labels
        told = torch.zeros(0)
        with contextlib.suppress(RuntimeError, TypeError):  # of tensors that are no plain ones
            told = digests([self._without_filler(k, part) for k, part in enumerate(inputs)])
        if len(told):
            self._kept.append((number, update, told, target.flatten()[: len(told)].clone()))
            self._rows, self._due = self._rows + len(told), update + max(update // _SPARSER, 1)

    def _without_filler(self, place: int, part: Tensor) -> Tensor:
        """Return tokens less the one that most sequences of the first batch end with: what they are filled up with is 0 then, and counts for nothing."""
        if part.dim() != 2 or part.dtype not in (torch.int64, torch.int32):
            return part
        if place not in self._fillers:
            self._fillers[place] = part[:, -1].mode().values
        return part - self._fillers[place].to(part.device)

    def to_dict(self) -> dict[str, Any] | None:
        """Return how often two passes have the same input, as JSON values; None where no two do.

        Returns:
            "rows" and "passes" that were looked at, "pairs" of rows of two passes with the same input, "contradicting" pairs that differ in
            class, "within" (as many of one pass), "share" (of pairs of rows that are of one pass) and "in_turn": whether two groups of updates
            explain all that contradicts, as two tasks do.
        """
        if not self._kept:
            return None
        sizes = [len(told) for _, _, told, _ in self._kept]
        x = torch.cat([told.cpu() for _, _, told, _ in self._kept]).numpy()
        y = torch.cat([labels.cpu() for _, _, _, labels in self._kept]).numpy()
        numbers, updates = (np.repeat([each[k] for each in self._kept], sizes) for k in (0, 1))
        kept, place = (x != 0) & (y >= 0), np.concatenate([np.arange(size) for size in sizes])
        if not (y == y.round()).all() or not _alike(updates, y) or _alike(place) == _alike(place, y):
            return None  # no classes, but shares of them or places in the batch
        columns = [each[kept].astype(np.int64) for each in (x, numbers, y, updates)]
        x, numbers, y, updates = (np.unique(each, return_inverse=True)[1] for each in columns)
        every, together = _alike(x), _alike(x, numbers)
        within = together - _alike(x, numbers, y)
        if every == together:
            return None
        passes = np.bincount(numbers).astype(np.float64)
        return {
            "rows": len(x), "passes": len(passes), "pairs": every - together, "contradicting": every - _alike(x, y) - within, "within": within,
            "share": float((passes**2).sum() / passes.sum() ** 2), "in_turn": _in_turn(x, y, updates),
        }  # fmt: skip


def _alike(*columns: NDArray[Any]) -> int:
    """Return how many pairs of rows are equal."""
    counts = np.unique(np.stack(columns, 1), axis=0, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _in_turn(x: NDArray[np.intp], y: NDArray[np.intp], updates: NDArray[np.intp]) -> bool:
    """Tell whether updates fall into two groups so that equal inputs contradict each other between these alone: whether that graph has no odd cycle."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    known: dict[int, dict[int, int]] = {}  # of each input the first updates with two of its classes
    rows = list(zip(x.tolist(), y.tolist(), updates.tolist(), strict=True))
    for row, label, update in rows:
        if len(first := known.setdefault(row, {})) < 2:
            first.setdefault(label, update)
    pairs = [(u, v) for row, label, u in rows for other, v in known[row].items() if other != label]
    count = int(updates.max()) + 1
    one, other = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    double = coo_array((np.ones(len(pairs)), (one, other + count)), shape=(2 * count, 2 * count))
    group = connected_components(double, directed=False)[1]
    return bool((group[one] != group[one + count]).all())
