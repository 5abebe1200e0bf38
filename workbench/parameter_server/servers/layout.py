"""Several flat tensors in one piece of memory, and where each of them lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Lying", "extent", "laid_out", "lay", "taken"]

Lying = tuple[int, int, torch.dtype]
"""Where a tensor lies: first byte, number of values, dtype."""

ALIGNED = 64  # bytes


def lay(tensors: Sequence[tuple[int, torch.dtype]]) -> tuple[list[Lying], int]:
    """Return where tensors of these sizes and dtypes will lie, and how many bytes they take together."""
    lying: list[Lying] = []
    end = 0
    for size, dtype in tensors:
        lying.append((end, size, dtype))
        end += -(-size * dtype.itemsize // ALIGNED) * ALIGNED
    return lying, max(end, 1)


def laid_out(tensors: Sequence[Tensor | Sequence[Tensor]], lying: Sequence[Lying], content: Tensor) -> None:
    """Copy tensors, which may be given in pieces, to where they shall lie in `content`, shape (bytes,)."""
    for tensor, there in zip(tensors, taken(content, lying), strict=True):
        if isinstance(tensor, Tensor):
            there.copy_(tensor.reshape(-1))
        else:
            torch.cat(list(tensor), out=there)


def extent(tensor: Tensor | Sequence[Tensor]) -> tuple[int, torch.dtype]:
    """Return number and dtype of the values of a tensor, which may be given in pieces."""
    pieces = [tensor] if isinstance(tensor, Tensor) else tensor
    return sum(piece.numel() for piece in pieces), pieces[0].dtype


def taken(content: Tensor, lying: Sequence[Lying]) -> list[Tensor]:
    """Return the tensors that lie in `content`; they are views of it."""
    return [content[begin : begin + size * dtype.itemsize].view(dtype) for begin, size, dtype in lying]
