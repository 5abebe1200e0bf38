"""In which order examples come, and whether worker processes draw alike: facts from two epochs, for an order and for `data.worker_rng`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset

from workbench.instruments.examples.orders import epoch_agreement, index_order, label_order
from workbench.instruments.examples.rows import Rows, exact_hashes, fetch_rows, split_item
from workbench.train.rng import isolated_rng
from workbench.workloads.items import IndexedDataset

MAX_INDICES = 200_000  # of an epoch that are looked at, at most: an order this long that looks random is
WORKERS, EXAMPLES, VISITS = 2, 4, 5  # visits: how often a worker is asked for each of the examples
_OF_WORKERS = ("worker_init_fn", "multiprocessing_context", "persistent_workers")
_UNKNOWN = dict.fromkeys(("indices", "labels", "stored_labels", "epochs"))


def trainer_order(data: Any, labels: NDArray[Any] | None) -> dict[str, Any]:
    """Return the order of this package's own trainer over a map-style dataset: drawn anew each epoch, by construction."""
    stored = None if labels is None else label_order(labels)
    return {"source": "trainer", "examples": len(data)} | _UNKNOWN | {"stored_labels": stored}


def loader_order(loader: DataLoader[Any], *, max_examples: int) -> dict[str, Any]:
    """Return the order of a loader over a map-style dataset, from its sampler alone, and of the labels of its first `max_examples`."""
    with untouched(loader):
        first, second = (_indices(loader) for _ in range(2))
    data: Any = loader.dataset
    labels = fetch_rows(data, first[:max_examples].tolist()).labels if len(first) else None
    return {"source": "loader", "examples": len(data), "sampler": type(loader.sampler).__name__} | _UNKNOWN | {
        "indices": index_order(first) if len(first) > 1 else None,
        "epochs": epoch_agreement(first, second) if len(first) > 1 else None,
        "labels": None if labels is None else label_order(labels),
    }  # fmt: skip


def stream_order(stream: Any, *, max_examples: int) -> tuple[dict[str, Any], Rows]:
    """Return the order of data that come in an order of their own, and the rows of the first epoch that were read.

    Args:
        stream: an iterable dataset, whose items are examples, or a loader over one, whose items are batches.
    """
    batched = isinstance(stream, DataLoader)
    with untouched(stream) if batched else isolated_rng():
        first, second = (_rows_of_epoch(stream, max_examples, batched=batched) for _ in range(2))
    known = {"source": "loader of a stream" if batched else "stream", "examples": len(first.inputs)} | _UNKNOWN
    agreement = epoch_agreement(exact_hashes(first.inputs), exact_hashes(second.inputs))
    return known | {"labels": None if first.labels is None else label_order(first.labels), "epochs": agreement}, first


def _indices(loader: DataLoader[Any]) -> NDArray[np.int64]:
    batches = loader.batch_sampler
    flat = iter(loader.sampler) if batches is None else itertools.chain.from_iterable(iter(batches))
    return np.fromiter((int(i) for i in itertools.islice(flat, MAX_INDICES)), dtype=np.int64)


def _rows_of_epoch(stream: Any, most: int, *, batched: bool) -> Rows:
    """Return up to `most` rows of one epoch."""
    items: list[Any] = []
    for item in stream:
        inputs, labels = split_item(item) if batched else ((), None)
        if labels is not None and len(labels) == len(inputs):
            items.extend(zip(inputs, labels, strict=True))
        else:
            items.extend(inputs if batched else [item])
        if len(items) >= most:
            break
    return fetch_rows(items, range(min(most, len(items)))) if items else Rows(0, np.empty((0, 0)), None)


@contextmanager
def untouched(loader: DataLoader[Any]) -> Iterator[None]:
    """Leave the global random state and the loader's own generators as they were."""
    stream = isinstance(loader.dataset, IterableDataset)
    found = [getattr(holder, "generator", None) for holder in ((loader,) if stream else (loader, loader.sampler, loader.batch_sampler))]  # fmt: skip
    states = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    try:
        with isolated_rng():
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def probe_workers(
    data: Any,
    *,
    num_workers: int,
    like: DataLoader[Any] | None = None,
    indices: Sequence[Any] = (),
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Return JSON facts on the random draws of worker processes, started as those `like` a loader; nothing is started where there are none.

    Two workers are asked for the same examples in the same order, in two epochs. Where the dataset draws at random, and the
    draws of two workers agree one by one, every worker makes the same augmentations.

    Returns:
        "workers" (of the loader), "random" (an example differs from one visit to the next), "same_in_workers",
        "same_in_epochs", "p" (chance of the first by draws that are independent but often agree), "visits".
    """
    if num_workers < 1:
        return {"workers": 0, "random": None, "same_in_workers": None, "same_in_epochs": None, "p": None, "visits": 0}
    used = min(WORKERS, num_workers)
    spread = [index * len(data) // EXAMPLES for index in range(min(EXAMPLES, len(data)))]
    examples = list(dict.fromkeys(indices[: 8 * EXAMPLES]))[:EXAMPLES] or spread
    asked = examples * VISITS
    loader: DataLoader[Any] = DataLoader(
        _Hashed(data), batch_sampler=[[index] for index in asked for _ in range(used)],  # batch k goes to worker k % used
        num_workers=used, timeout=timeout_s, **{name: getattr(like, name) for name in _OF_WORKERS if like is not None},
    )  # fmt: skip
    with isolated_rng():
        drawn = [np.array([int(batch) for batch in loader], dtype=np.int64) for _ in range(2)]
    first, second = (epoch.reshape(len(asked), used).T for epoch in drawn)  # shape (workers, visits)
    visits = first[0].reshape(VISITS, len(examples))
    agree = float((visits[1:] == visits[:-1]).mean())
    random = agree < 1
    return {
        "workers": num_workers,
        "random": random,
        "same_in_workers": bool(random and (first[0] == first[-1]).all()) if used > 1 else None,
        "same_in_epochs": bool(random and (first[0] == second[0]).all()),
        "p": float(max(agree, 1 / 3) ** len(asked)) if random else None,  # none of few draws may have agreed
        "visits": len(asked),
    }


class _Hashed(Dataset[int]):
    """Hashes of the items of a dataset, taken in the worker."""

    def __init__(self, data: Any) -> None:
        self.data = IndexedDataset(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> int:
        return int(exact_hashes(fetch_rows(self.data, [index]).inputs).view(np.int64)[0])
