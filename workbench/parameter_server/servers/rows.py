"""`checked_rows`: the rows that a lookup asks for, before anything is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.errors import UsageError

__all__ = ["checked_rows"]

IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_rows(rows: Any, count: int, name: str) -> Tensor:
    """Return the ids as a tensor.

    Args:
        rows: ids of any shape.
        count: rows that there are.
        name: of the variable.

    Raises:
        UsageError: they are no integers.
        IndexError: there is no such row; negative ones do not count from the end, as in an embedding.
    """
    ids = torch.as_tensor(rows)
    if not ids.numel():
        return ids.long()
    if ids.dtype not in IDS:
        raise UsageError(f"Rows of {name!r} are asked for by {ids.dtype} values; give integer ids, such as ids.long().")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise IndexError(f"Row {low if low < 0 else high} of {name!r}, which has rows 0 to {count - 1}.")
    return ids
