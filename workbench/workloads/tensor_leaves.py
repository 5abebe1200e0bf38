"""What items and batches are made of: their leaves by name, bytes of each, and a hash of their contents (P1.5, P1.8)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["content_hash", "example_hashes", "fresh_containers", "leaf_bytes", "leaves", "without"]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, lists and tuples, each with its path: "image", "meta/file", "0"."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)) and not _is_column(value):
        parts = [(str(place), part) for place, part in enumerate(value)]
    else:
        yield path or "item", value
        return
    for name, part in parts:
        yield from leaves(part, f"{path}/{name}" if path else name)


def fresh_containers(value: Any) -> Any:
    """Return the same leaves in dicts, lists and containers of their own: who takes one out leaves the given ones whole."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: fresh_containers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return value if _is_column(value) else type(value)(fresh_containers(part) for part in value)
    return copy.copy(value) if isinstance(value, MutableMapping) else value


def _is_column(value: Any) -> bool:
    """Tell whether a list is one feature of many examples: what the default collate makes of text."""
    return isinstance(value, list) and len(value) > 0 and all(isinstance(part, (str, bytes)) for part in value)


def leaf_bytes(value: Any) -> int:
    """Return the bytes of one leaf: of the numbers of a tensor or an array, of encoded text; 8 for a single number."""
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value)
    if isinstance(value, list):
        return sum(leaf_bytes(part) for part in value)
    return 0 if value is None else int(getattr(value, "nbytes", 8))


def content_hash(value: Any) -> str:
    """Return a hash of names and contents of an item or a batch: equal for equal bits, shapes and types alone."""
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(value):
        found.update(f"|{path}|".encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            found.update(np.ascontiguousarray(leaf).tobytes())
        else:
            found.update(f"{type(leaf).__name__}:{leaf!r}".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def example_hashes(batch: Any) -> list[str]:
    """Return a hash of each example of a collated batch; of the batch where its leaves do not have one row an example."""
    parts = [leaf for _, leaf in leaves(batch)]
    rows = {
        len(part) if isinstance(part, list) else (part.shape[0] if getattr(part, "ndim", 0) else -1) for part in parts
    }
    if len(rows) != 1 or -1 in rows:
        return [content_hash(batch)]
    return [content_hash([part[row] for part in parts]) for row in range(rows.pop())]


def without(value: Any, dropped: frozenset[str], path: str = "") -> Any:
    """Return nested mappings without the leaves of these paths; a tuple keeps its places, with 0 where a leaf was."""
    if isinstance(value, Mapping):
        kept = {key: f"{path}/{key}" if path else str(key) for key in value}
        return {key: without(value[key], dropped, at) for key, at in kept.items() if at not in dropped}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(without(part, dropped, f"{path}/{name}" if path else name) for name, part in named))
    if isinstance(value, (list, tuple)) and not _is_column(value):
        return type(value)(without(p, dropped, f"{path}/{i}" if path else str(i)) for i, p in enumerate(value))
    return 0 if path in dropped else value
