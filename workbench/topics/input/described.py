"""What a loader is, and what rounds of its loop showed, as JSON values."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate, default_convert

from workbench.topics.input.clock import Spent
from workbench.topics.input.loaders import is_stream
from workbench.topics.input.loop import Loop

__all__ = ["as_round", "cores", "dataset_length", "describe", "fetch_parts", "no_batch"]


def describe(loader: Any, own: DataLoader[Any] | None) -> dict[str, Any]:
    """Return the settings of a loader that matter for its speed."""
    if own is None:
        return {"type": type(loader).__name__, "dataset": None, "num_workers": None, "batches": None, "examples": None}
    return {
        "type": type(own).__name__, "dataset": type(own.dataset).__name__, "stream": is_stream(own),
        "batch_size": own.batch_size, "sampler": type(own.sampler if own.batch_size is not None or own.batch_sampler is None else own.batch_sampler).__name__,
        "num_workers": own.num_workers, "prefetch_factor": own.prefetch_factor,
        "collate": "default" if own.collate_fn is default_collate or own.collate_fn is default_convert else getattr(own.collate_fn, "__name__", type(own.collate_fn).__name__),
        "persistent_workers": own.persistent_workers, "pin_memory": own.pin_memory, "batches": _batches(own), "examples": dataset_length(own.dataset), "drop_last": own.drop_last,
    }  # fmt: skip


def _batches(loader: DataLoader[Any]) -> int | None:
    """Return how many batches an epoch should have, without asking the loader, which would hold a stream to it."""
    try:
        if is_stream(loader):
            full, rest = divmod(len(loader.dataset), loader.batch_size or 1)  # type: ignore[arg-type]
            return full + (rest > 0 and not loader.drop_last)
        return len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def as_round(loop: Loop, *, ahead: bool) -> dict[str, Any]:
    """Return what one round of a loop showed, as JSON values.

    Args:
        loop: that was timed.
        ahead: the host runs ahead of the device, whose work on a first batch falls into later steps.
    """
    waits, steps, first = np.array(loop.wait_s), np.array(loop.step_s), np.array(loop.first, dtype=bool)
    if ahead:
        steady = (loop.total_s - float(waits[first].sum())) / len(loop) if len(loop) else math.nan
    else:
        inner = loop.total_s - float((waits + steps)[first].sum())
        steady = inner / int((~first).sum()) if (~first).any() else math.nan
    waited = np.maximum(0.0, waits - np.array(loop.queued_s))  # a busy machine is no slow loader
    lost = np.array(loop.queued_s) + np.array(loop.step_queued_s)
    return {
        "steps": len(loop),
        "steady_s": steady,
        "wait_s": float(waited[~first].mean()) if (~first).any() else math.nan,
        "queued_s": float(lost[~first].mean()) if (~first).any() and not ahead else 0.0,
        "step_s": float(steps.mean()) if len(steps) else math.nan,
        "starts": waits[first].tolist(),
    }


def fetch_parts(fetched: Sequence[tuple[Spent, Spent]]) -> dict[str, float] | None:
    """Return mean seconds of fetching the items of a batch and of collating them; None where nothing was timed."""
    if not fetched:
        return None
    items, collate = ([pair[k] for pair in fetched] for k in (0, 1))
    return {
        "items_s": float(np.mean([s.wall_s for s in items])),
        "items_blocked_s": float(np.mean([s.blocked_s for s in items])),
        "items_queued_s": float(np.mean([s.others_s for s in items])),
        "collate_s": float(np.mean([s.wall_s for s in collate])),
        "collate_queued_s": float(np.mean([s.others_s for s in collate])),
        "cpu_s": float(np.mean([a.cpu_s + b.cpu_s for a, b in zip(items, collate, strict=True)])),
    }


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def no_batch(loader: Any, own: DataLoader[Any] | None) -> str:
    """Return what to say of a loader that gives nothing."""
    if own is not None and dataset_length(own.dataset) == 0:
        return f"the loader gives no batch: its dataset {type(own.dataset).__name__} has 0 examples."
    if own is None:
        return f"the loader ({type(loader).__name__}) gives no batch: an iterator that is used up, or an empty source."
    claimed = (
        f", which says it has {dataset_length(own.dataset)} examples,"
        if dataset_length(own.dataset) is not None
        else ""
    )
    return (
        f"the loader gives no batch: its dataset {type(own.dataset).__name__}{claimed} yields none, its sampler is empty, or "
        f"drop_last drops the only batch (batch_size={own.batch_size}, drop_last={own.drop_last})."
    )


def dataset_length(data: Any) -> int | None:
    """Return the length of a dataset, None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
