"""One batch on one device or on several: what batch norm's statistics become, and the loss with either's (P6.2, P6.3, P6.7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Subset

from workbench.studies.session import Session
from workbench.topics.batch_norm.batches import BatchStatistics, batch_statistics, statistics_set, tracking_layers
from workbench.topics.batch_norm.collect import forward_of, held_out, validation_loss
from workbench.topics.data.rows import read_rows
from workbench.train.batches import eval_batches
from workbench.train.distributed.merge_statistics import MergedStatistics, merge_statistics
from workbench.train.rng import isolated_rng

__all__ = ["Shards", "measure_devices"]

Shards = Literal["dealt", "sorted"]
_Statistics = Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


def measure_devices(
    session: Session,
    model: nn.Module,
    *,
    batch_size: int,
    devices: Sequence[int],
    shards: Sequence[Shards],
    batches: int = 20,
) -> list[dict[str, Any]]:
    """Return JSON rows, one for each way to shard and number of devices: how far their statistics part, and what that costs.

    Each device passes its part of every batch through the same weights and keeps running statistics of its own, as with data
    parallel training; beside it the whole batch passes at once, as with synchronised batch norm.

    Args:
        session: whose workload and config are used.
        model: with the weights to look at; left as it is.
        batch_size: examples in a batch over all devices.
        devices: how many, each of them a row; those that leave a device fewer than 2 examples are left out.
        shards: "dealt" gives each device every k-th example of a random order, "sorted" a contiguous part of the examples by
            label, as where files are sorted and nobody shuffles across them.
        batches: forward passes; at most an epoch.
    """
    data: Any = session.workload.train_data
    layers = tracking_layers(model)
    if not layers or not hasattr(data, "__getitem__"):
        return []
    rows = []
    with isolated_rng():
        for kind in shards:
            order = _ordered(data, kind)
            for count in devices if order is not None else ():
                if batch_size // count >= 2:
                    assert order is not None
                    examples = batch_size // count
                    found = _split(session, model, order, kind=kind, count=count, examples=examples, batches=batches)
                    if found is not None:
                        rows.append({"shards": kind, **found})
    return rows


def _ordered(data: Any, kind: Shards) -> NDArray[np.int64] | None:
    """Return the order that shards are cut from; None where labels are asked for and there are none."""
    if kind == "dealt":
        return np.random.default_rng(0).permutation(len(data))
    labels = [rows.labels for rows in read_rows(data, memory_mb=64.0)]
    if not labels or any(part is None or part.dtype.kind not in "iub" for part in labels):
        return None
    return np.argsort(np.concatenate([part for part in labels if part is not None]), kind="stable")


def _split(
    session: Session,
    model: nn.Module,
    order: NDArray[np.int64],
    *,
    kind: Shards,
    count: int,
    examples: int,
    batches: int,
) -> dict[str, Any] | None:
    """Return one row; None where no layer with running statistics looked at every device's batches."""
    layers = tracking_layers(model)
    steps = max(2, min(batches, len(order) // (count * examples)))
    places = _places(order, kind, count, examples, steps)
    forward = forward_of(session)

    def seen(batch_size: int) -> Any:
        found = batch_statistics(model, _batches(session, places, batch_size), forward)
        return {name: each for name, each in found.items() if name in layers}

    parts, whole = seen(examples), seen(count * examples)
    parts = {name: each for name, each in parts.items() if len(set(each.batch % count)) == count and name in whole}
    if not parts:
        return None
    own: list[dict[str, Any]] = [{} for _ in range(count)]
    merged: dict[str, MergedStatistics] = {}
    together: dict[str, Any] = {}
    step_apart = 0.0
    for name, each in parts.items():
        of_device = [
            type(each)(*(column[each.batch % count == device] for column in each)).average(layers[name].momentum)
            for device in range(count)
        ]
        for device, values in enumerate(of_device):
            own[device][name] = values
        merged[name] = merge_statistics([m for m, _ in of_device], [v for _, v in of_device])
        together[name] = whole[name].average(layers[name].momentum)
        spread = _step_spread(each, count) / np.maximum(together[name][1], layers[name].eps)
        step_apart = max(step_apart, math.sqrt(float(spread.mean())))
    missing = [float((m.spread / np.maximum(m.variance, layers[n].eps)).mean()) for n, m in merged.items()]
    loss = _losses(session, model)
    average = {name: (m.mean, m.average_variance) for name, m in merged.items()}
    return {
        "devices": count,
        "examples": examples,
        "batches": steps,
        "apart": math.sqrt(max(missing)),
        "step_apart": step_apart,
        "missing": max(missing),
        "average_error": max(_error(m.average_variance, together[n][1], layers[n].eps) for n, m in merged.items()),
        "merged_error": max(_error(m.variance, together[n][1], layers[n].eps) for n, m in merged.items()),
        "losses": {
            "own": [loss(each) for each in own],
            "average": loss(average),
            "merged": loss({name: (m.mean, m.variance) for name, m in merged.items()}),
            "whole": loss(together),
        },
    }


def _step_spread(each: BatchStatistics, count: int) -> NDArray[np.float64]:
    """Return the variance of the devices' means within a step, averaged over the steps, shape (channels,)."""
    means = {int(batch): each.mean[each.batch == batch].mean(0) for batch in set(each.batch)}
    steps = [[means[b] for b in range(at, at + count) if b in means] for at in range(0, max(means) + 1, count)]
    return np.asarray(np.mean([np.var(rows, axis=0) for rows in steps if rows], axis=0))


def _places(order: NDArray[np.int64], kind: Shards, count: int, examples: int, steps: int) -> list[int]:
    """Return which examples pass, batch after batch, and in each of them device after device."""
    dealt = kind == "dealt"
    shards = [order[device::count] if dealt else part for device, part in enumerate(np.array_split(order, count))]
    rng = np.random.default_rng(1)
    drawn = [np.resize(rng.permutation(shard), (steps, examples)) for shard in shards]
    return [int(i) for step in range(steps) for rows in drawn for i in rows[step]]


def _batches(session: Session, places: list[int], batch_size: int) -> Iterator[Any]:
    data: Any = session.workload.train_data
    part = session.workload.replace(train_data=Subset(data, places))
    for batch, _ in eval_batches(part, "train", batch_size, session.device, session.config.precision):
        yield batch


def _losses(session: Session, model: nn.Module) -> Callable[[_Statistics], float]:
    """Return the validation loss as a function of the running statistics."""
    held = held_out(session.workload)

    def loss(statistics: _Statistics) -> float:
        with torch.no_grad(), statistics_set(model, statistics):
            return validation_loss(held, model, session)

    return loss


def _error(found: NDArray[np.float64], truth: NDArray[np.float64], eps: float) -> float:
    """Return the root mean square over channels of the relative difference, of variances that count beside eps."""
    return math.sqrt(float(np.square((found - truth) / np.maximum(truth, eps)).mean()))
