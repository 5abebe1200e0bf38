"""Random state: seeded per trial, saved with a checkpoint, given back to the caller afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture_rng", "isolated_rng", "restore_rng", "seed_all"]


def seed_all(*seeds: int) -> None:
    """Seed Python, NumPy and torch from a tuple of seeds."""
    words = np.random.SeedSequence(list(seeds)).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[0]))  # noqa: NPY002  # datasets of the user's own draw from the global generators
    torch.manual_seed(int(words[0]) << 16 ^ int(words[1]))


def capture_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of all global generators as (tensors, JSON values)."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    return tensors, plain


def restore_rng(tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Put the state of all global generators back."""
    torch.set_rng_state(tensors["torch"])
    for name, state in tensors.items():
        if name.startswith("cuda/") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, int(name.split("/")[1]))
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leave the caller's random state bit for bit as it was, also when the block raises."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(*state)
