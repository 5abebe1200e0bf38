"""Evaluation in parts: each host takes its share of a split, and the sums, not the means, are joined (P2.11)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from workbench.errors import DataError, UsageError
from workbench.train.evaluation import Evaluation, values_each
from workbench.workloads.base import Workload
from workbench.workloads.item_access import in_its_own_order, plain_tensors

__all__ = ["PartialSum", "evaluate_shard", "join_shards"]


class PartialSum(NamedTuple):
    """One metric over a part of a split, as sums.

    Attributes:
        metric: "loss" or a name of the workload's metrics.
        total: sum of weight times value, in float64.
        weight: sum of the weights.
        num_examples: examples with a positive weight.
        num_correct: their correct predictions for a metric of zeros and ones, else None.
        seconds: wall time of the part.
    """

    metric: str
    total: float
    weight: float
    num_examples: int
    num_correct: int | None
    seconds: float


def evaluate_shard(
    workload: Workload,
    model: nn.Module,
    shard: int,
    shards: int,
    *,
    split: str = "validation",
    batch_size: int,
    device: torch.device | None = None,
    precision: str | None = None,
) -> list[PartialSum]:
    """Return the sums over every `shards`-th example, from example `shard` on; nothing is padded and nothing dropped.

    Args:
        workload: what is evaluated.
        model: what with; it is left as it was.
        shard: this host, from 0.
        shards: hosts; those beyond the examples have empty parts.
        split: of the data.
        batch_size: examples in a batch.
        device: where; None is the model's.
        precision: of the config.

    Raises:
        UsageError: `shard` is none of `shards`.
        DataError: the split cannot be indexed.
    """
    if not 0 <= shard < shards:
        raise UsageError(f"shard={shard} must be 0 to {shards - 1}, one of shards={shards}.")
    data = workload.data(split)
    if in_its_own_order(data):
        raise DataError(
            f"workload {workload.name!r}: to share out the {split} split it needs __getitem__, and it is iterable only."
        )
    start = time.perf_counter()
    places = range(shard, len(data), shards)
    if not places:
        return []
    part = workload.replace(**{f"{split}_data": _part(workload, data, places)})
    device = device or next(model.parameters()).device
    ((columns, weights),) = values_each(
        part, [model], split=split, batch_size=batch_size, device=device, precision=precision
    )
    kept = weights > 0
    sums, seconds = [], time.perf_counter() - start
    for name, values in columns.items():
        whole = name != "loss" and bool(((values[kept] == 0) | (values[kept] == 1)).all())
        correct = int(values[kept].sum()) if whole else None
        total = float((values[kept] * weights[kept]).sum())
        sums.append(PartialSum(name, total, float(weights[kept].sum()), int(kept.sum()), correct, seconds))
    return sums


def _part(workload: Workload, data: Any, places: range) -> Dataset[Any]:
    """Return the examples at `places`; tensors stay tensors, because those are read without a loader."""
    if (tensors := plain_tensors(data, workload.collate)) is not None:
        return TensorDataset(*(tensor[places.start :: places.step] for tensor in tensors))
    return Subset(data, places)


def join_shards(parts: Sequence[Sequence[PartialSum]]) -> list[Evaluation]:
    """Return the evaluation of the whole split from the sums of all its parts; seconds are those of the slowest.

    Raises:
        UsageError: no part has an example that counts.
    """
    filled = [part for part in parts if part]
    if not filled or not sum(part[0].weight for part in filled) > 0:
        raise UsageError("parts hold no example with a weight above 0, so there is no mean to take.")
    found = []
    for sums in zip(*filled, strict=True):
        counts = [s.num_correct for s in sums if s.num_correct is not None]
        found.append(
            Evaluation(
                sums[0].metric,
                sum(s.total for s in sums) / sum(s.weight for s in sums),
                sum(s.num_examples for s in sums),
                sum(counts) if len(counts) == len(sums) else None,
                max(s.seconds for s in sums),
            )
        )
    return found
