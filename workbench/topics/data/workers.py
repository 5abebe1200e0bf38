"""Do the worker processes of a loader draw random numbers of their own: the same example, asked of two workers and twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from workbench.topics.data.hashing import exact_hashes
from workbench.topics.data.rows import fetch_rows
from workbench.train.rng import isolated_rng
from workbench.workloads.items import IndexedDataset

__all__ = ["probe_workers"]

WORKERS = 2
EXAMPLES = 4
VISITS = 5
"""Times that a worker is asked for each of the examples."""


def probe_workers(
    data: Any,
    *,
    num_workers: int,
    indices: Sequence[Any] | None = None,
    worker_init_fn: Any = None,
    context: Any = None,
    persistent: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Return JSON facts on the random draws of worker processes; nothing is started where there are none.

    Two workers are asked for the same examples in the same order, in two epochs. Where the dataset draws at random, and the
    draws of two workers agree one by one, every worker makes the same augmentations.

    Args:
        data: a map-style dataset.
        num_workers: of the loader.
        indices: that its sampler gives, the first few of which are asked for; None is spread over 0 to the length.
        worker_init_fn: of the loader.
        context: its multiprocessing context.
        persistent: its workers stay from one epoch to the next, and so do their generators.
        timeout_s: for a batch.

    Returns:
        "workers" (of the loader), "random" (an example differs from one visit to the next), "same_in_workers",
        "same_in_epochs", "p" (chance of the first by draws that are independent but often agree), "visits".
    """
    if num_workers < 1:
        return {"workers": 0, "random": None, "same_in_workers": None, "same_in_epochs": None, "p": None, "visits": 0}
    used = min(WORKERS, num_workers)
    if indices:
        examples = [k for place, k in enumerate(indices[: 8 * EXAMPLES]) if k not in indices[:place]][:EXAMPLES]
    else:
        examples = [index * len(data) // EXAMPLES for index in range(min(EXAMPLES, len(data)))]
    asked = [index for _ in range(VISITS) for index in examples]
    settings = {
        "worker_init_fn": worker_init_fn,
        "multiprocessing_context": context,
        "timeout": timeout_s,
        "persistent_workers": persistent,
    }
    with isolated_rng():
        epochs = _draws(data, asked, used, settings)
    one = epochs[0][0].reshape(VISITS, len(examples))
    agree = float((one[1:] == one[:-1]).mean())
    random = agree < 1
    return {
        "workers": num_workers,
        "random": bool(random),
        "same_in_workers": bool(random and (epochs[0][0] == epochs[0][-1]).all()) if used > 1 else None,
        "same_in_epochs": bool(random and (epochs[0][0] == epochs[1][0]).all()),
        "p": float(max(agree, 1 / 3) ** len(asked))
        if random
        else None,  # of the few draws there were, none may have agreed
        "visits": len(asked),
    }


def _draws(data: Any, asked: list[Any], workers: int, settings: dict[str, Any]) -> list[NDArray[np.int64]]:
    """Return hashes of what each worker drew in each of two epochs, shape (workers, visits)."""
    loader: DataLoader[Any] = DataLoader(
        _Hashed(data),
        batch_sampler=[[index] for index in asked for _ in range(workers)],  # batch k goes to worker k % workers
        num_workers=workers,
        **settings,
    )
    epochs = [np.array([int(batch) for batch in loader], dtype=np.int64) for _ in range(2)]
    return [epoch.reshape(len(asked), workers).T for epoch in epochs]


class _Hashed(torch.utils.data.Dataset[int]):
    """Hashes of the items of a dataset, taken in the worker."""

    def __init__(self, data: Any) -> None:
        self.data = IndexedDataset(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> int:
        return int(exact_hashes(fetch_rows(self.data, [index]).inputs).view(np.int64)[0])
