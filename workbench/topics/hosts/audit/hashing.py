"""Short hashes of tensors and of random state, so that ranks can be compared without sending what they hold."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["hash_of", "is_sharded", "random_state", "row_hashes", "state_of"]

MAX_ELEMENTS = 65_536
"""Of a tensor; a larger one is hashed at evenly spaced places (rule of thumb: what differs, differs everywhere)."""


def hash_of(tensors: Iterable[Tensor | None]) -> str:
    """Return eight hex digits for the bits of some tensors; None counts too."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(b"none" if tensor is None else _bytes(tensor), crc)
    return f"{crc:08x}"


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor holds a part of a larger one by design (FSDP2)."""
    return type(tensor).__name__ == "DTensor"


def _bytes(tensor: Tensor) -> bytes:
    local = (tensor.to_local() if is_sharded(tensor) else tensor).detach()  # type: ignore[attr-defined]
    if local.is_sparse:
        joined = local.coalesce()
        return _bytes(joined.indices()) + _bytes(joined.values())
    if local.layout is not torch.strided or local.is_meta or local.is_quantized or local.numel() == 0:
        return str(tuple(local.shape)).encode()
    flat = local.reshape(-1)
    kept = flat[:: max(1, flat.numel() // MAX_ELEMENTS)].cpu().contiguous()
    found: bytes = kept.view(torch.uint8).numpy().tobytes()
    return found


def row_hashes(batch: Any, *, most: int) -> list[str]:
    """Return a hash of each example of a batch, of its largest array; none where a batch has no array with rows."""
    rows = max(_arrays(batch), key=lambda a: a.numel(), default=None)
    if rows is None or rows.ndim == 0 or len(rows) == 0 or rows.numel() == 0:
        return []
    kept = rows[:most].detach().cpu().reshape(min(most, len(rows)), -1).contiguous()
    plain = kept.view(torch.uint8).numpy()
    return [f"{zlib.crc32(row.tobytes()):08x}" for row in plain]


def _arrays(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        return [torch.from_numpy(np.ascontiguousarray(batch))]
    if isinstance(batch, dict):
        return [array for value in batch.values() for array in _arrays(value)]
    if isinstance(batch, (list, tuple)):
        return [array for value in batch for array in _arrays(value)]
    return []


def random_state() -> dict[str, int]:
    """Return a hash of each of the three global generators."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "numpy": zlib.crc32(np.asarray(words).tobytes(), zlib.crc32(repr((kind, rest)).encode())),
        "python": zlib.crc32(repr(random.getstate()).encode()),
    }


def state_of(generator: Any) -> int | None:
    """Return a hash of a generator's state; None for what is no generator."""
    if isinstance(generator, torch.Generator):
        return zlib.crc32(generator.get_state().numpy().tobytes())
    if isinstance(generator, np.random.Generator):
        return zlib.crc32(repr(generator.bit_generator.state).encode())
    if isinstance(generator, np.random.RandomState):
        return zlib.crc32(repr(generator.get_state()).encode())
    if isinstance(generator, random.Random):
        return zlib.crc32(repr(generator.getstate()).encode())
    return None
