"""The loop over a loader, timed: how long each batch is waited for, how long each step takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.topics.input.clock import Spent, now, queued_s
from workbench.topics.input.loaders import batches_of
from workbench.topics.input.timed import TimedBatch
from workbench.workloads.items import fresh_containers

__all__ = ["Device", "Loop", "Step", "run_cached", "run_loop"]

Step = Callable[[Any], Any]
_CATCH_UP = 16
"""Steps after which a device that lags behind is waited for (rule of thumb)."""
_KEPT = 4
"""Batches that are kept: large ones would fill the memory."""


@dataclass(frozen=True)
class Device:
    """How to wait for the device that steps run on.

    Attributes:
        wait: returns when all work that was handed to it is done.
        ahead: the host runs ahead of it.
    """

    wait: Callable[[], object]
    ahead: bool


@dataclass
class Loop:
    """What a loop over a loader showed; entry k of each list is of batch k.

    Attributes:
        wait_s: waited for the batch.
        queued_s: of that, the loop was ready to go on, and other programs had the processors.
        step_s: spent in the step, on the host.
        step_queued_s: of that, other programs had the processors.
        first: the batch was the first of an epoch.
        fetched: what its making took, where the loader is timed.
        indices: of the examples of each batch, where known.
        ended: (batches, examples) of each epoch that was read to its end; examples are batches where they cannot be counted.
        total_s: of the whole loop, the device's work included.
    """

    wait_s: list[float] = field(default_factory=list)
    queued_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_queued_s: list[float] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    fetched: list[tuple[Spent, Spent]] = field(default_factory=list)
    indices: list[Sequence[Any]] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    total_s: float = 0.0

    def __len__(self) -> int:
        return len(self.wait_s)


def run_loop(
    loader: Any,
    step: Step | None,
    device: Device,
    *,
    seconds: float,
    least: int,
    most: int,
    timeout_s: float,
    epochs: int | None = None,
    keep: list[Any] | None = None,
) -> Loop:
    """Iterate over a loader, epoch after epoch, and time it; worker processes are gone afterwards unless they persist.

    Args:
        loader: made by `timed_loader`, or whatever can be iterated over.
        step: called with each batch; None does nothing.
        device: to wait for at both ends.
        seconds: to go on for; the batch in progress is finished.
        least: batches to take all the same.
        most: batches to take.
        timeout_s: for a batch.
        epochs: to stop after; None is none.
        keep: the first few batches are appended to it, as they are before the step.
    """
    found = Loop()
    device.wait()
    began = before = time.perf_counter()
    queued = queued_s()
    for epoch in itertools.count():
        taken = examples = 0
        for timed in batches_of(loader, timeout_s=timeout_s):
            came, then = time.perf_counter(), queued_s()
            batch = _noted(found, timed)
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
            if device.ahead and len(found) % _CATCH_UP == 0:
                device.wait()  # or the host would hand over more work than the time allows
            before, queued = time.perf_counter(), queued_s()
            taken += 1
            examples += len(found.indices[-1]) if found.indices else 1
            if len(found) >= most or (done - began >= seconds and len(found) >= least):
                device.wait()
                found.total_s = time.perf_counter() - began
                return found
        found.ended.append((taken, examples))
        if taken == 0 or (epochs is not None and epoch + 1 >= epochs):
            break
    device.wait()
    found.total_s = time.perf_counter() - began
    return found


def _noted(found: Loop, timed: Any) -> Any:
    if not isinstance(timed, TimedBatch):
        return timed
    found.fetched.append((timed.items, timed.collate))
    found.indices.append(timed.indices)
    return timed.data


def run_cached(batches: Sequence[Any], step: Step, device: Device, *, seconds: float, least: int, most: int) -> Spent:
    """Return the mean time of a step on batches that are there already: what is left when loading costs nothing."""
    device.wait()
    began, count = now(), 0
    while count < most:
        step(fresh_containers(batches[count % len(batches)]))  # a step may take parts out of its batch
        count += 1
        if device.ahead and count % _CATCH_UP == 0:
            device.wait()
        if count >= least and time.perf_counter() - began.wall_s >= seconds:
            break
    device.wait()
    spent = now().since(began)
    return Spent(*(part / count for part in spent))
