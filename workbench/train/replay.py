"""`serve_requests`: a small replay of production: requests served in the order they came, labels known later (P2.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Subset

from workbench.errors import DataError, UsageError
from workbench.ledger.push import pusher
from workbench.record.read import TrialRecord
from workbench.record.write import StudyWriter
from workbench.train.artifacts import best_checkpoint, load_trained, trained_with
from workbench.train.evaluation import Evaluation, values_each, weighted_means
from workbench.train.offline import add_rows
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order
from workbench.workloads.subsets import whole

__all__ = ["serve_requests"]

Request = tuple[float, int]


def serve_requests(
    workload: Workload,
    trial: TrialRecord,
    requests: Sequence[Request],
    *,
    step: int | None = None,
    split: str = "validation",
    max_batch: int = 8,
    max_wait_s: float = 0.01,
    label_delay_s: float = 0.0,
    until_s: float | None = None,
) -> pd.DataFrame:
    """Serve a stream of requests with a checkpoint, add rows with the setting "online" to the study, and return what was served.

    Time is the requests' own: nothing waits. A batch is served when it is full or when its oldest request has waited for
    `max_wait_s`. A request counts once its label is there.

    Args:
        workload: what was trained.
        trial: whose checkpoint serves.
        requests: (time in seconds, index of an example of the split) in the order of time.
        step: of the checkpoint; None is the best one (P4.5).
        split: what the requests ask for.
        max_batch: requests served together, at most.
        max_wait_s: that a request waits for others.
        label_delay_s: from a request to its label.
        until_s: labels that come later do not count; None waits for all.

    Returns:
        One row a request: time_s, example, batch, served_s, label_s, loss, and every metric.

    Raises:
        UsageError: no request, or one out of order or for an example that is not there; or no label came in time.
        DataError: the split cannot be indexed.
        CheckpointError: there is no such checkpoint.
    """
    full = whole(workload)
    data = full.data(split)
    if in_its_own_order(data):
        raise DataError(
            f"workload {workload.name!r}: requests ask for examples by index, and the {split} split is iterable only."
        )
    times, examples = _checked(requests, len(data))
    if max_batch < 1 or not max_wait_s >= 0 or not label_delay_s >= 0:
        raise UsageError(
            f"max_batch={max_batch} must be at least 1, max_wait_s={max_wait_s} and label_delay_s={label_delay_s} at least 0."
        )
    path = best_checkpoint(trial) if step is None else trial.folder / "checkpoints" / f"step-{step:08d}"
    model = load_trained(full, path)
    precision = trained_with(full, path).precision
    start = time.perf_counter()
    served, weights = [], []
    for number, (first, end, at) in enumerate(_batches(times, max_batch=max_batch, max_wait_s=max_wait_s)):
        part = full.replace(**{f"{split}_data": Subset(data, examples[first:end])})
        ((columns, weight),) = values_each(
            part, [model], split=split, batch_size=end - first, device=torch.device("cpu"), precision=precision
        )
        rows = {"time_s": times[first:end], "example": examples[first:end], "batch": number, "served_s": at}
        served.append(pd.DataFrame(rows | {name: values.numpy() for name, values in columns.items()}))
        weights.append(weight)
    table = pd.concat(served, ignore_index=True)
    table.insert(4, "label_s", table["time_s"] + label_delay_s)
    known = np.ones(len(table), dtype=bool) if until_s is None else (table["label_s"] <= until_s).to_numpy(copy=True)
    kept = torch.from_numpy(known) & (torch.cat(weights) > 0)
    if not bool(kept.any()):
        raise UsageError(
            f"no label came until {until_s} s: the first comes at {table['label_s'].min():g} s. Wait longer."
        )
    seconds = time.perf_counter() - start
    found: list[Evaluation] = []
    for name in ("loss", *full.metrics):
        values = torch.from_numpy(table[name].to_numpy(dtype=np.float64, copy=True))[kept]
        found += weighted_means(name, values.unsqueeze(0), torch.cat(weights)[kept], seconds)
    with closing(StudyWriter.reopen(trial.path, when_closed=pusher())) as writer:
        add_rows(
            writer, found, trial=trial.number, step=int(path.name.removeprefix("step-")), split=split, setting="online"
        )
    return table


def _batches(times: Sequence[float], *, max_batch: int, max_wait_s: float) -> Iterator[tuple[int, int, float]]:
    """Yield (first, end, time) of the batches as they are served."""
    first = 0
    while first < len(times):
        closes = times[first] + max_wait_s
        end = first
        while end < len(times) and end - first < max_batch and times[end] <= closes:
            end += 1
        yield first, end, times[end - 1] if end - first == max_batch else closes
        first = end


def _checked(requests: Sequence[Any], size: int) -> tuple[list[float], list[int]]:
    if not len(requests):
        raise UsageError("requests is empty: give at least one (time in seconds, index of an example).")
    times, examples = [float(t) for t, _ in requests], [int(e) for _, e in requests]
    for place, (at, example) in enumerate(zip(times, examples, strict=True)):
        if not math.isfinite(at) or (place and at < times[place - 1]):
            raise UsageError(f"requests[{place}] comes at {at} s, before the one ahead of it: sort them by time.")
        if not 0 <= example < size:
            raise UsageError(f"requests[{place}] asks for example {example}; there are 0 to {size - 1}.")
    return times, examples
