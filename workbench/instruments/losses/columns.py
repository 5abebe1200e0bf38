"""`Columns`: whether one number of an example's inputs gives its target away."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_NUMBERS, LEAST, CLASSES, OF_A_CLASS = 1_000_000, 64, 20, 4
"""Numbers of inputs that are kept, different examples that it takes, targets that are taken for classes, and examples of each that is looked at (rules of thumb)."""
EXACT = 1e-6


class Columns:
    """Keeps inputs that are a table, one row an example, and their targets, of the first updates."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._numbers = 0

    def saw(self, inputs: Any, target: Any) -> None:
        """Take in inputs of shape (examples, columns) and a target an example; others say nothing, nor what lies on a device that would be waited for."""
        plain = type(inputs) is Tensor and type(target) is Tensor and inputs.is_cpu and target.is_cpu
        if not plain or inputs.dim() != 2 or not inputs.is_floating_point() or inputs.shape[1] < 2:
            return
        if target.requires_grad or target.numel() != len(inputs) or self._numbers + inputs.numel() > MAX_NUMBERS:
            return
        self._numbers += inputs.numel()
        self._rows.append((inputs.detach().clone(), target.detach().flatten().clone()))

    def to_dict(self) -> dict[str, Any] | None:
        """Return how many examples were seen, and the columns that are a function of the target in all of them, as JSON values; None of too few."""
        rows = [pair for pair in self._rows if pair[0].shape[1] == self._rows[0][0].shape[1]]
        if sum(len(x) for x, _ in rows) < LEAST:
            return None
        x, y = (torch.cat([pair[k] for pair in rows]).double().numpy() for k in (0, 1))
        table = np.unique(np.column_stack([x, y]), axis=0)  # later epochs tell nothing more
        x, y = table[:, :-1], table[:, -1]
        values, kinds, counts = np.unique(y, return_inverse=True, return_counts=True)
        if len(values) < 2 or len(y) < LEAST or not np.isfinite(table).all():
            return None
        if len(values) <= CLASSES:  # a number that is rare tells a rare class by chance
            kept = (counts >= OF_A_CLASS)[kinds]
            x, kinds = x[kept], kinds[kept]
        varies = np.ptp(x, axis=0) > 0
        x = x - x.mean(0)
        whole = (x**2).sum(0)
        if len(values) <= CLASSES:
            sums = np.zeros((len(values), x.shape[1]))
            np.add.at(sums, kinds, x)
            explained = (sums**2 / counts[:, None]).sum(0)
        else:
            centred = y - y.mean()
            explained = (x.T @ centred) ** 2 / (centred**2).sum()
        found = np.flatnonzero(varies & (explained >= whole * (1 - EXACT)))
        return {"examples": len(y), "columns": found[:20].tolist(), "of": x.shape[1]}
