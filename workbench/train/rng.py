"""Random state: seeded per trial, saved with a checkpoint, given back to the caller afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_all(*seeds: int) -> None:
    """Seed Python, NumPy and torch from a tuple of seeds."""
    # Without the key (1, 0) would give what (1,) gives, and dropout would repeat the draws of the initialisation.
    words = np.random.SeedSequence(list(seeds), spawn_key=tuple(range(1, len(seeds)))).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[0]))  # noqa: NPY002  # datasets of the user's own draw from the global generators
    torch.manual_seed(int(words[0]) << 16 ^ int(words[1]))


def capture_rng() -> dict[str, Tensor]:
    """Return the state of all global generators as tensors."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        tensors["mps"] = torch.mps.get_rng_state()
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    tensors["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    tensors["numpy"] = torch.from_numpy(np.append(keys, [position, has_gauss]).astype(np.int64))
    tensors["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return tensors


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Put the state of all global generators back."""
    torch.set_rng_state(tensors["torch"])
    for name, state in tensors.items():
        if name.startswith("cuda/") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, int(name.split("/")[1]))
    if "mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["mps"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = tensors["numpy"].tolist()
    cached = float(tensors["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leave the caller's random state bit for bit as it was, also when the block raises."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
