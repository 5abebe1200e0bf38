"""Per-step values of all lanes stay on the device and reach the record on a cadence: no synchronisation in the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.record.parts import PartWriter

__all__ = ["LaneLog"]

_CORE = ("loss", "loss_se", "lr", "grad_norm", "clipped")


class LaneLog:
    """Collects the rows of K lanes between two flushes; the lanes may change only when it is empty."""

    def __init__(self, steps: PartWriter) -> None:
        self._steps = steps
        self._first = 0
        self._core: dict[str, list[Tensor]] = {"loss": [], "loss_se": [], "grad_norm": [], "clipped": []}
        self._extra: dict[str, list[tuple[int, Any]]] = {}

    def __len__(self) -> int:
        """Steps not yet handed on."""
        return len(self._core["loss"])

    def append(self, step: int, core: Mapping[str, Tensor], extra: Mapping[str, Tensor | float]) -> None:
        """Keep one step: tensors of shape (lanes,), or plain numbers that all lanes share."""
        if not self._core["loss"]:
            self._first = step
        for name, tensor in core.items():
            self._core[name].append(tensor)
        for name, value in extra.items():
            self._extra.setdefault(name, []).append((step - self._first, value))

    def flush(self, numbers: Sequence[int], lrs: Sequence[NDArray[np.float64]]) -> dict[int, int]:
        """Bring the rows to the host and hand them to the record, without those after a lane's first non-finite loss.

        Args:
            numbers: of the lanes' trials, in the order of the rows.
            lrs: lr of every step, lane by lane.

        Returns:
            For each lane that became non-finite, its row in the stack and the step at which its loss was so first.
        """
        if not len(self):
            return {}
        block, bad = self._block(numbers, lrs, self._extra)
        self._steps.add(block)
        for values in self._core.values():
            values.clear()
        self._extra.clear()
        return bad

    def show(self, numbers: Sequence[int], lrs: Sequence[NDArray[np.float64]]) -> None:
        """Bring the rows to the host for those who look on; they stay here, and what is flushed later is the same.

        Args:
            numbers: as for `flush`.
            lrs: as for `flush`.
        """
        if len(self):
            self._steps.show(self._block(numbers, lrs, {})[0])

    def _block(
        self,
        numbers: Sequence[int],
        lrs: Sequence[NDArray[np.float64]],
        extra: Mapping[str, list[tuple[int, Any]]],
    ) -> tuple[dict[str, Any], dict[int, int]]:
        """Return the rows up to each lane's first non-finite loss, and where that was, as `flush` returns it."""
        count, lanes = len(self), len(numbers)
        columns = {name: _stack(values, lanes) for name, values in self._core.items() if values}
        columns["loss_se"] = np.sqrt(columns["loss_se"])
        columns["lr"] = np.stack([values[self._first : self._first + count] for values in lrs])
        columns.setdefault("clipped", np.zeros((lanes, count)))
        columns["clipped"] = columns["clipped"].astype(np.int8)
        for name, pairs in extra.items():
            columns[name] = _sparse(pairs, lanes, count)
        bad = ~np.isfinite(columns["loss"])
        ends = np.where(bad.any(1), bad.argmax(1) + 1, count)
        kept = np.arange(count) < ends[:, None]
        block: dict[str, Any] = {
            "trial": np.repeat(np.asarray(numbers, np.int32), count)[kept.ravel()],
            "step": np.tile(np.arange(count) + self._first, lanes)[kept.ravel()],
        }
        block |= {name: values[kept] for name, values in _ordered(columns)}
        return block, {int(row): int(self._first + ends[row] - 1) for row in np.flatnonzero(bad.any(1))}


def _ordered(columns: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return sorted(columns.items(), key=lambda item: _CORE.index(item[0]) if item[0] in _CORE else len(_CORE))


def _stack(values: list[Tensor], lanes: int) -> np.ndarray:
    """Return shape (lanes, steps)."""
    stacked = torch.stack([v.detach().reshape(-1).expand(lanes) for v in values], dim=1).cpu()
    short = stacked.dtype in (torch.bfloat16, torch.float16)  # NumPy has no bfloat16
    return (stacked.float() if short else stacked).numpy()


def _sparse(pairs: list[tuple[int, Any]], lanes: int, count: int) -> np.ndarray:
    """Return shape (lanes, steps), NaN where nothing was measured."""
    measured = [value for _, value in pairs]
    if isinstance(measured[0], Tensor):
        values = _stack(measured, lanes)
    else:
        values = np.broadcast_to(np.array(measured, dtype=np.float32), (lanes, len(measured)))
    column = np.full((lanes, count), np.nan, dtype=values.dtype)
    column[:, [i for i, _ in pairs]] = values
    return column
