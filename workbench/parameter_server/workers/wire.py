"""How values travel through Ray: tensors as arrays, and what is small as bytes, which costs least."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.parameter_server.workers.closure import map_structure

_SIMPLE = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class Packed:
    """A tensor's bytes, its shape and dtype; NumPy does not know every dtype of torch."""

    content: NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: torch.dtype


def to_wire(value: Any) -> Any:
    """Return nested tuples, lists and dicts with every dense tensor packed; memory is shared where it can be."""
    return map_structure(_packed, value)


def from_wire(value: Any) -> Any:
    """Undo `to_wire`; the tensors are the caller's own."""
    return map_structure(_unpacked, value)


def to_bytes(value: Any, pack: Callable[[Any], bytes], also: tuple[type, ...] = ()) -> bytes:
    """Return what `pickle.loads` reads.

    Args:
        pack: for what pickle alone cannot send, such as what a script defines; it takes longer.
        also: types that pickle alone can send, besides numbers, text and packed tensors.
    """
    return pickle.dumps(value, protocol=5) if _simple(value, (*_SIMPLE, Packed, *also)) else pack(value)


def _simple(value: Any, types: tuple[type, ...]) -> bool:
    if type(value) in (list, tuple):
        return all(_simple(each, types) for each in value)
    if type(value) is dict:
        return all(_simple(each, types) for pair in value.items() for each in pair)
    return type(value) in types


def _packed(leaf: Any) -> Any:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    flat = leaf.detach().cpu().contiguous().reshape(-1)
    return Packed(flat.view(torch.uint8).numpy(), tuple(leaf.shape), leaf.dtype)


def _unpacked(leaf: Any) -> Any:
    if not isinstance(leaf, Packed):
        return leaf
    if not leaf.content.size:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    return torch.from_numpy(leaf.content.copy()).view(leaf.dtype).reshape(leaf.shape)
