"""In which order examples come: facts for `data.unshuffled` and `data.weak_shuffle`, from two epochs of indices or labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2, norm, poisson, rankdata
from torch.utils.data import DataLoader, IterableDataset

from workbench.topics.data.hashing import exact_hashes
from workbench.topics.data.rows import Rows, fetch_rows, split_item
from workbench.train.rng import isolated_rng

__all__ = ["loader_order", "stream_order", "trainer_order", "untouched"]


BLOCKS = 20
BUFFER_DELAY = 2 / np.e
"""Mean distance from its place of an item that waits in a shuffle buffer of size 1: the waiting time is exponential."""


def index_order(indices: NDArray[np.int64]) -> dict[str, Any]:
    """Return how random an order of indices is, against all orders being as likely.

    Args:
        indices: in the order in which they are read, shape (examples,); drawn with or without replacement.

    Returns:
        "displacement": mean distance of an example from its place in storage, over that of a random order, n / 3 (Spearman's
        footrule, normal for large n: Diaconis and Graham 1977), "displacement_p" (as small); "successions": how often the next
        stored example follows, about 1 in a random order of n, Poisson, "successions_p" (as many); "examples"; "buffer": size
        of the shuffle buffer that would give this displacement.
    """
    n = len(indices)
    places = rankdata(indices)
    distance = np.abs(places - np.arange(1, n + 1))
    mean, deviation = (n * n - 1) / 3, np.sqrt((n + 1) * (2 * n * n + 7) / 45)
    follows = int((np.diff(indices) == 1).sum())
    return {
        "examples": n,
        "displacement": float(distance.sum() / mean) if n > 1 else 1.0,
        "displacement_p": float(norm.cdf((distance.sum() - mean) / deviation)),
        "successions": follows,
        "successions_p": float(poisson.sf(follows - 1, 1.0)),
        "buffer": float(distance.mean() / BUFFER_DELAY),
    }


def label_order(labels: NDArray[Any]) -> dict[str, Any]:
    """Return how random an order of labels is, against all orders of the same labels being as likely.

    Args:
        labels: in the order in which they are read, shape (examples,); classes, or numbers that seldom repeat.

    Returns:
        "neighbours": by how much more often than by chance two in a row are of one class, 1 when sorted (for numbers: their
        correlation from one to the next), "neighbours_p"; "drift_p": chance of classes that are as unevenly spread over
        20 blocks (chi-squared; None for numbers), "examples".
    """
    labels = labels[np.isfinite(labels)] if labels.dtype.kind == "f" else labels
    n = len(labels)
    values, codes = np.unique(labels, return_inverse=True)
    if n < 2 or len(values) < 2:
        return {"examples": n, "neighbours": 0.0, "neighbours_p": 1.0, "drift_p": None}
    if len(values) > n / 2 and np.issubdtype(labels.dtype, np.number):
        centred = labels.astype(np.float64) - labels.astype(np.float64).mean()
        serial = float(centred[1:] @ centred[:-1] / (centred @ centred))
        p = float(norm.sf((serial + 1 / (n - 1)) * np.sqrt(n)))
        return {"examples": n, "neighbours": serial, "neighbours_p": p, "drift_p": None}
    counts = np.bincount(codes).astype(np.float64)
    equal = float((codes[1:] == codes[:-1]).sum())
    expected, deviation = _joins(counts)
    most = n - len(values)
    return {
        "examples": n,
        "neighbours": (equal - expected) / max(most - expected, 1e-9) if most > expected else 0.0,
        "neighbours_p": float(norm.sf((equal - 0.5 - expected) / deviation)) if deviation > 0 else 1.0,
        "drift_p": _drift(codes, counts),
    }


def epoch_agreement(first: NDArray[Any], second: NDArray[Any]) -> dict[str, Any]:
    """Return how alike two epochs order the same items, against independent orders.

    Args:
        first: what identifies each item (its index, or a hash), in order, shape (examples,).
        second: of the next epoch.

    Returns:
        "same": the two are equal; "displacement" and "displacement_p" as in `index_order`, of the second against the first;
        None where they share too few items.
    """
    same = len(first) == len(second) and bool((first == second).all())
    place = {value: k for k, value in enumerate(first.tolist())}
    shared = np.array([place[value] for value in second.tolist() if value in place], dtype=np.int64)
    if len(shared) < 10 or len(place) < len(first) / 2:
        return {"same": same, "displacement": None, "displacement_p": None}
    found = index_order(shared)
    return {"same": same, "displacement": found["displacement"], "displacement_p": found["displacement_p"]}


def _joins(counts: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation of the number of neighbours of one class over all orders (Mood 1940, on runs)."""
    n = counts.sum()
    squares, cubes = (counts**2).sum(), (counts**3).sum()
    mean = (squares - n) / n
    variance = (squares * (squares + n * (n + 1)) - 2 * n * cubes - n**3) / (n**2 * (n - 1))
    return float(mean), float(np.sqrt(max(variance, 0.0)))


def _drift(codes: NDArray[np.int64], counts: NDArray[np.float64]) -> float | None:
    """Return the chance of classes as unevenly spread over blocks of the order; None where a cell expects too few."""
    n = len(codes)
    blocks = int(min(BLOCKS, n * counts.min() / n / 5))
    if blocks < 2:
        blocks = min(BLOCKS, n // 50)
        if blocks < 2:
            return None
    block = np.arange(n) * blocks // n
    table = np.zeros((blocks, len(counts)))
    np.add.at(table, (block, codes), 1.0)
    kept = counts / blocks >= 5
    if kept.sum() < 2:
        return None
    table = table[:, kept]
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return float(chi2.sf(((table - expected) ** 2 / expected).sum(), (blocks - 1) * (kept.sum() - 1)))


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
