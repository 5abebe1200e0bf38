"""How large the inputs are, feature by feature: facts for `data.scale`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.studies.data.rows import Rows

__all__ = ["collect_scale"]


def collect_scale(blocks: Iterable[Rows]) -> dict[str, Any]:
    """Return JSON facts on the size of the inputs, from one pass over blocks of rows.

    The size of a feature is the root mean square of its values that are not 0: 1 for one-hot and binary features however
    rare, near 1 for standardised ones, whatever their range. Features that never vary are left out.

    Returns:
        "kind" ("float", "integer" or "other"), "rows", "features", "constant" (features), "smallest", "median", "largest"
        (size of a feature), "smallest_at", "largest_at" (its place in the flattened input); None where unknown.
    """
    nothing: dict[str, Any] = dict.fromkeys(("smallest", "median", "largest", "smallest_at", "largest_at"))
    rows = 0
    kind, sums = "other", _Sums()
    for block in blocks:
        kind = _kind(block.inputs)
        if kind != "float" or (sums.squares is not None and block.inputs.shape[1] != len(sums.squares)):
            return {"kind": kind, "rows": rows, "features": None, "constant": None, **nothing}
        rows += len(block.inputs)
        sums.add(block.inputs)
    if sums.squares is None or sums.nonzero is None or sums.low is None or sums.high is None:
        return {"kind": kind, "rows": 0, "features": None, "constant": None, **nothing}
    varies = (sums.high > sums.low) & (sums.nonzero > 0)
    facts = {"kind": kind, "rows": rows, "features": len(varies), "constant": int((~varies).sum())}
    if not varies.any():
        return facts | nothing
    at = np.flatnonzero(varies)
    size = np.sqrt(sums.squares[at] / sums.nonzero[at])
    return facts | {
        "smallest": float(size.min()),
        "median": float(np.median(size)),
        "largest": float(size.max()),
        "smallest_at": int(at[size.argmin()]),
        "largest_at": int(at[size.argmax()]),
    }


class _Sums:
    """Running sums over finite values, each of shape (features,)."""

    def __init__(self) -> None:
        self.squares: NDArray[np.float64] | None = None
        self.nonzero: NDArray[np.float64] | None = None
        self.low: NDArray[np.float64] | None = None
        self.high: NDArray[np.float64] | None = None

    def add(self, inputs: NDArray[Any]) -> None:
        values = inputs.astype(np.float64)
        finite = np.isfinite(values)
        squares = (np.where(finite, values, 0.0) ** 2).sum(0)
        nonzero = (finite & (values != 0)).sum(0).astype(np.float64)
        low, high = np.where(finite, values, np.inf).min(0), np.where(finite, values, -np.inf).max(0)
        if self.squares is None or self.nonzero is None or self.low is None or self.high is None:
            self.squares, self.nonzero, self.low, self.high = squares, nonzero, low, high
        else:
            self.squares, self.nonzero = self.squares + squares, self.nonzero + nonzero
            self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)


def _kind(inputs: NDArray[Any]) -> str:
    return {"f": "float", "i": "integer", "u": "integer", "b": "integer"}.get(inputs.dtype.kind, "other")
