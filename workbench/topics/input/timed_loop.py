"""A loop over a loader, timed: what each batch and each step took, what a round of it says, and its Chrome trace (P1.2)."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from workbench.errors import UsageError
from workbench.topics.data.order import untouched
from workbench.topics.input.loaders import (
    Spent,
    TimedBatch,
    batches_of,
    closed,
    now,
    queued_s,
    timed_loader,
    torch_loader,
)
from workbench.train.rng import isolated_rng
from workbench.workloads.items import fresh_containers

Step = Callable[[Any], Any]
Wait = Callable[[], object]
_CATCH_UP = 16  # steps after which a device that lags behind is waited for (rule of thumb)
_KEPT = 4  # batches that are kept: large ones would fill the memory
LEAST, MOST = 4, 400  # batches of a round
LOADING, STEP = "data loading", "training step"  # names of the spans of a trace


def at_once() -> None:
    """Wait for a device that the host does not run ahead of: each step has done its work when it returns."""


@dataclass
class Loop:
    """What a loop over a loader showed; entry k of each list is of batch k."""

    wait_s: list[float] = field(default_factory=list)  # waited for the batch
    queued_s: list[float] = field(default_factory=list)  # of that, other programs had the processors
    step_s: list[float] = field(default_factory=list)  # spent in the step, on the host
    step_queued_s: list[float] = field(default_factory=list)  # of that, other programs had the processors
    first: list[bool] = field(default_factory=list)  # the batch was the first of an epoch
    fetched: list[tuple[Spent, Spent]] = field(default_factory=list)  # what its making took, where the loader is timed
    indices: list[Sequence[Any]] = field(default_factory=list)  # of the examples of each batch, where known
    # (batches, examples) of each epoch that was read to its end; examples are batches where they cannot be counted
    ended: list[tuple[int, int]] = field(default_factory=list)
    total_s: float = 0.0  # of the whole loop, the device's work included

    def __len__(self) -> int:
        return len(self.wait_s)


def run_loop(
    loader: Any, step: Step | None = None, wait: Wait = at_once, *, seconds: float, timeout_s: float, least: int = LEAST,
    most: int = MOST, epochs: int | None = None, keep: list[Any] | None = None,
) -> Loop:  # fmt: skip
    """Iterate over a loader, epoch after epoch, and time it; worker processes are gone afterwards unless they persist."""
    found = Loop()

    def ended() -> Loop:  # called while the loader is open: what its workers take to stop is none of the loop's time
        wait()
        found.total_s = time.perf_counter() - began
        return found

    wait()
    began = before = time.perf_counter()
    queued = queued_s()
    while True:
        taken = examples = 0
        for timed in batches_of(loader, timeout_s=timeout_s):
            came, then, batch = time.perf_counter(), queued_s(), timed
            if isinstance(timed, TimedBatch):
                batch = timed.data
                found.fetched.append((timed.items, timed.collate))
                found.indices.append(timed.indices)
            if keep is not None and len(keep) < _KEPT:
                keep.append(fresh_containers(batch))
            if step is not None:
                step(batch)
            done = time.perf_counter()
            found.wait_s.append(came - before)
            found.queued_s.append(min(then - queued, came - before))
            found.step_s.append(done - came)
            found.step_queued_s.append(min(queued_s() - then, done - came))
            found.first.append(taken == 0)
            if len(found) % _CATCH_UP == 0:
                wait()  # or the host would hand over more work than the time allows
            before, queued = time.perf_counter(), queued_s()
            taken += 1
            examples += len(found.indices[-1]) if found.indices else 1
            if len(found) >= most or (done - began >= seconds and len(found) >= least):
                return ended()
        found.ended.append((taken, examples))
        if taken == 0 or len(found.ended) == epochs:
            return ended()


def run_cached(batches: Sequence[Any], step: Step, wait: Wait, *, seconds: float) -> Spent:
    """Return the mean time of a step on batches that are there already: what is left when loading costs nothing."""
    wait()
    began, count = now(), 0
    for count in range(1, MOST + 1):
        step(fresh_containers(batches[(count - 1) % len(batches)]))  # a step may take parts out of its batch
        if count % _CATCH_UP == 0:
            wait()
        if count >= LEAST and time.perf_counter() - began.wall_s >= seconds:
            break
    wait()
    return Spent(*(part / count for part in now().since(began)))


def as_round(loop: Loop, *, ahead: bool) -> dict[str, Any]:
    """Return what one round of a loop showed, as JSON values; `ahead`: the device's work on a first batch falls into later steps."""
    if not len(loop):
        return {"steps": 0, "steady_s": math.nan, "wait_s": math.nan, "queued_s": 0.0, "step_s": math.nan, "starts": []}
    waits, steps, first = np.array(loop.wait_s), np.array(loop.step_s), np.array(loop.first, dtype=bool)
    later = ~first
    waited = np.maximum(0.0, waits - np.array(loop.queued_s))  # a busy machine is no slow loader
    lost = np.array(loop.queued_s) + np.array(loop.step_queued_s)
    steady = math.nan
    if ahead:
        steady = (loop.total_s - float(waits[first].sum())) / len(loop)
    elif later.any():
        steady = (loop.total_s - float((waits + steps)[first].sum())) / int(later.sum())
    return {
        "steps": len(loop), "steady_s": steady, "wait_s": float(waited[later].mean()) if later.any() else math.nan,
        "queued_s": float(lost[later].mean()) if later.any() and not ahead else 0.0, "step_s": float(steps.mean()),
        "starts": waits[first].tolist(),
    }  # fmt: skip


def fetch_parts(fetched: Sequence[tuple[Spent, Spent]]) -> dict[str, float] | None:
    """Return mean seconds of fetching the items of a batch and of collating them; None where nothing was timed."""
    if not fetched:
        return None
    items, collate = zip(*fetched, strict=True)
    parts = {
        "items_s": [s.wall_s for s in items], "items_blocked_s": [s.blocked_s for s in items], "items_queued_s": [s.others_s for s in items],
        "collate_s": [s.wall_s for s in collate], "collate_queued_s": [s.others_s for s in collate],
        "cpu_s": [a.cpu_s + b.cpu_s for a, b in fetched],
    }  # fmt: skip
    return {name: float(np.mean(values)) for name, values in parts.items()}


def write_trace(
    loader: Any, step: Step | None, wait: Wait, path: str | Path, *, timeout_s: float, steps: int = 20
) -> dict[str, Any]:
    """Write a trace of at most `steps` steps that https://ui.perfetto.dev opens, and return "path" and "steps"."""
    file = Path(path)
    if not file.name.endswith((".json", ".json.gz")):
        raise UsageError(f"trace={str(path)!r} must end in .json or .json.gz: it is a Chrome trace.")
    file.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    own, done = torch_loader(loader), 0
    # or torch's profiler writes to the terminal when it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with (
        untouched(loader) if isinstance(loader, DataLoader) else isolated_rng(),
        closed(timed_loader(own) if own is not None else loader) as timed,
        contextlib.closing(batches_of(timed, timeout_s=timeout_s)) as batches,  # its worker processes are gone with it
        profile(activities=activities) as profiler,
    ):
        while done < steps:
            with record_function(LOADING):
                batch = next(batches, None)
            if batch is None:
                break
            with record_function(STEP):
                if step is not None:
                    step(batch.data if isinstance(batch, TimedBatch) else batch)
            done += 1
        wait()
    profiler.export_chrome_trace(str(file))
    return {"path": str(file), "steps": done}
