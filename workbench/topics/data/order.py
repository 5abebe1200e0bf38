"""In which order examples come: facts for `data.unshuffled` and `data.weak_shuffle`, from two epochs of indices or labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from workbench.topics.data.hashing import exact_hashes
from workbench.topics.data.order_tests import epoch_agreement, index_order, label_order
from workbench.topics.data.rows import Rows, fetch_rows, split_item
from workbench.train.rng import isolated_rng

__all__ = ["loader_order", "stream_order", "trainer_order", "untouched"]

MAX_INDICES = 200_000
"""Indices of an epoch that are looked at, at most: an order this long that looks random is."""


def trainer_order(data: Any, labels: NDArray[Any] | None) -> dict[str, Any]:
    """Return the order of this package's own trainer over a map-style dataset: drawn anew each epoch, by construction."""
    return {
        "source": "trainer",
        "examples": len(data),
        "indices": None,
        "labels": None,
        "stored_labels": None if labels is None else label_order(labels),
        "epochs": None,
    }


def loader_order(loader: DataLoader[Any], *, max_examples: int) -> dict[str, Any]:
    """Return the order of a loader over a map-style dataset, from its sampler alone; its random state is put back.

    Args:
        loader: the person's own.
        max_examples: whose labels are read, at most.
    """
    with untouched(loader):
        first, second = (_indices(loader) for _ in range(2))
    data, read = loader.dataset, first[:max_examples].tolist()
    rows = fetch_rows(data, read) if read else Rows(0, np.empty((0, 0)), None)
    return {
        "source": "loader",
        "sampler": type(loader.sampler).__name__,
        "examples": len(data),  # type: ignore[arg-type]
        "indices": index_order(first) if len(first) > 1 else None,
        "labels": None if rows.labels is None else label_order(rows.labels),
        "stored_labels": None,
        "epochs": epoch_agreement(first, second) if len(first) > 1 else None,
    }


def stream_order(stream: Any, *, max_examples: int) -> tuple[dict[str, Any], Rows]:
    """Return the order of data that come in an order of their own, and the rows of the first epoch that were read.

    Args:
        stream: an iterable dataset, whose items are examples, or a loader over one, whose items are batches.
        max_examples: read of each of two epochs, at most.
    """
    batched = isinstance(stream, DataLoader)
    with untouched(stream) if batched else isolated_rng():
        first, second = (_read(stream, max_examples, batched=batched) for _ in range(2))
    labels = first.labels
    return {
        "source": "loader of a stream" if batched else "stream",
        "examples": len(first.inputs),
        "indices": None,
        "labels": None if labels is None else label_order(labels),
        "stored_labels": None,
        "epochs": epoch_agreement(exact_hashes(first.inputs), exact_hashes(second.inputs)),
    }, first


def _indices(loader: DataLoader[Any]) -> NDArray[np.int64]:
    drawn: Iterator[Any] = iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
    flat = itertools.chain.from_iterable(drawn) if loader.batch_sampler is not None else drawn
    return np.fromiter((int(i) for i in itertools.islice(flat, MAX_INDICES)), dtype=np.int64)


def _read(stream: Any, most: int, *, batched: bool) -> Rows:
    """Return up to `most` rows of one epoch."""
    items: list[Any] = []
    for item in stream:
        items.extend(_unbatched(item) if batched else [item])
        if len(items) >= most:
            break
    if not items:
        return Rows(0, np.empty((0, 0)), None)
    return fetch_rows(items[:most], list(range(min(most, len(items)))))


def _unbatched(batch: Any) -> list[Any]:
    """Return the examples of a collated batch as (inputs, label) pairs."""
    inputs, labels = split_item(batch)
    if labels is None or len(labels) != len(inputs):
        return list(inputs)
    return list(zip(inputs, labels, strict=True))


@contextmanager
def untouched(loader: DataLoader[Any]) -> Iterator[None]:
    """Leave the global random state and the loader's own generators as they were."""
    holders = (
        (loader, loader.sampler, loader.batch_sampler) if not isinstance(loader.dataset, IterableDataset) else (loader,)
    )
    found = [getattr(holder, "generator", None) for holder in holders]
    generators = [g for g in found if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in generators]
    try:
        with isolated_rng():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
