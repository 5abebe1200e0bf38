"""Per-step values stay on the device and reach the record on a cadence: no synchronisation in the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.record_writer import TrialWriter

__all__ = ["StepLog"]

_CORE = ("loss", "loss_se", "lr", "grad_norm", "clipped")


class StepLog:
    """Collects the rows of one trial between two flushes.

    Attributes:
        diverged_at: the first step whose loss was not finite, known after the flush that contained it.
    """

    def __init__(self, writer: TrialWriter, lrs: np.ndarray) -> None:
        self._writer, self._lrs = writer, lrs
        self._first = 0
        self._core: dict[str, list[Tensor]] = {"loss": [], "loss_se": [], "grad_norm": [], "clipped": []}
        self._extra: dict[str, list[tuple[int, Any]]] = {}
        self.diverged_at: int | None = None

    def __len__(self) -> int:
        """Rows not yet handed on."""
        return len(self._core["loss"])

    def append(self, step: int, core: Mapping[str, Tensor], extra: Mapping[str, Tensor | float]) -> None:
        """Keep one row."""
        if not self._core["loss"]:
            self._first = step
        for name, tensor in core.items():
            self._core[name].append(tensor)
        for name, value in extra.items():
            self._extra.setdefault(name, []).append((step - self._first, value))

    def flush(self) -> None:
        """Bring the rows to the host and hand them to the record; rows after the first non-finite loss are dropped."""
        count = len(self)
        if not count:
            return
        columns = {name: _stack(values) for name, values in self._core.items() if values}
        if "loss_se" in columns:
            columns["loss_se"] = np.sqrt(columns["loss_se"])
        columns["lr"] = self._lrs[self._first : self._first + count]
        columns.setdefault("clipped", np.zeros(count, dtype=np.int8))
        columns["clipped"] = columns["clipped"].astype(np.int8)
        for name, pairs in self._extra.items():
            columns[name] = _sparse(pairs, count)
        bad = np.flatnonzero(~np.isfinite(columns["loss"]))
        keep = int(bad[0]) + 1 if bad.size else count
        if bad.size:
            self.diverged_at = self._first + int(bad[0])
        block = {"trial": np.full(keep, self._writer.number, np.int32), "step": np.arange(keep) + self._first}
        self._writer.study.steps.add(block | {name: values[:keep] for name, values in _ordered(columns)})
        for values in self._core.values():
            values.clear()
        for pairs in self._extra.values():
            pairs.clear()


def _ordered(columns: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return sorted(columns.items(), key=lambda item: _CORE.index(item[0]) if item[0] in _CORE else len(_CORE))


def _stack(values: list[Tensor]) -> np.ndarray:
    return torch.stack([v.reshape(()) for v in values]).cpu().numpy()


def _sparse(pairs: list[tuple[int, Any]], count: int) -> np.ndarray:
    if not pairs:
        return np.full(count, np.nan, dtype=np.float32)
    measured = [value for _, value in pairs]
    tensors = isinstance(measured[0], Tensor)
    values = _stack([v.detach() for v in measured]) if tensors else np.array(measured, dtype=np.float32)
    column = np.full(count, np.nan, dtype=values.dtype)
    column[[i for i, _ in pairs]] = values
    return column
