"""What worker processes change: whether they draw random numbers of their own, and whether they share a stream out (P1.9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from workbench.topics.data.order import untouched
from workbench.topics.data.workers import probe_workers
from workbench.topics.input.loaders import closed, is_stream
from workbench.topics.input.loop import Device, run_loop
from workbench.topics.input.variants import spec_loader
from workbench.workloads.items import example_hashes

__all__ = ["stream_epochs", "worker_draws"]

_VISITS = 4 * 20
"""Items that `probe_workers` asks for in all, by two workers in two epochs."""


def worker_draws(
    loader: DataLoader[Any], indices: Sequence[Any], *, item_s: float, seconds: float, timeout_s: float
) -> dict[str, Any] | None:
    """Return whether workers draw random numbers of their own; None where that would take too long, or cannot be asked.

    Args:
        loader: the person's own.
        indices: some that its sampler gives.
        item_s: that an item takes.
        seconds: that asking may take.
        timeout_s: for a batch.
    """
    if is_stream(loader) or (loader.num_workers and item_s * _VISITS > seconds):
        return None
    how = {
        "worker_init_fn": loader.worker_init_fn, "context": loader.multiprocessing_context,
        "persistent": loader.persistent_workers,
    }  # fmt: skip
    return probe_workers(loader.dataset, indices=indices, num_workers=loader.num_workers, timeout_s=timeout_s, **how)


def stream_epochs(loader: DataLoader[Any], *, seconds: float, timeout_s: float) -> dict[str, Any] | None:
    """Return whether a stream gives the same examples without workers and with several; None where nobody can tell.

    Where an epoch takes too long to count, workers that begin with the same batches tell that they repeat each other's.

    Args:
        loader: the person's own.
        seconds: that an epoch may take.
        timeout_s: for a batch.

    Returns:
        "workers" that were tried, examples of an epoch "without" and "with_workers" (None where it did not end), "alike" (batches
        that each worker began with, where all did with the same), "same" and "same_contents".
    """
    if not is_stream(loader):
        return None
    workers = max(2, loader.num_workers)
    counts: dict[int, int | None] = {}
    batches: dict[int, list[tuple[str, ...]]] = {0: [], workers: []}
    for count, into in batches.items():
        with untouched(loader), closed(spec_loader(loader, {"workers": count, "persistent": False}, None)) as timed:
            epoch = run_loop(
                timed, lambda batch, into=into: into.append(tuple(example_hashes(batch))), Device(lambda: None, ahead=False),  # type: ignore[misc]
                seconds=seconds, least=max(1, 2 * count), most=10_000, timeout_s=timeout_s, epochs=1,
            )  # fmt: skip
        counts[count] = epoch.ended[0][1] if epoch.ended else None
    one, more = counts[0], counts[workers]
    if one is None or more is None:
        alike = _begin_alike(batches[workers], workers)
        found = {"workers": workers, "without": one, "with_workers": more, "alike": alike}
        return {**found, "same": False, "same_contents": False} if alike else None
    contents = {count: Counter(h for batch in given for h in batch) for count, given in batches.items()}
    lost = workers * ((loader.batch_size or 1) - 1) if loader.drop_last else 0  # each may drop an incomplete batch
    return {
        "workers": workers, "without": one, "with_workers": more, "alike": 0, "same": more == one or 0 < one - more <= lost,
        "same_contents": contents[0] == contents[workers],
    }  # fmt: skip


def _begin_alike(batches: Sequence[tuple[str, ...]], workers: int) -> int:
    """Return how many batches each worker began with, where all of them did with the same ones; 0 where they did not.

    Workers deliver in turns, a batch each. Batches that are all one and the same tell nothing.
    """
    turns = [batches[k : k + workers] for k in range(0, len(batches) - workers + 1, workers)]
    alike = all(len(set(turn)) == 1 for turn in turns)
    return len(turns) if alike and len({example for turn in turns for example in turn[0]}) > 1 else 0
