"""`merged_buffers`: buffers of the workers' replicas as one, above all the running statistics of batch norm (P7.3, P6.7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workbench.train.distributed.merge_statistics import merge_statistics

_MEAN, _VARIANCE = "running_mean", "running_var"


class ReplicaBuffers(NamedTuple):
    """Buffers of one worker's replica.

    Attributes:
        updates: that it has made since the replica was built.
        values: by name.
    """

    updates: int
    values: dict[str, Tensor]


def merged_buffers(start: Mapping[str, Tensor], replicas: Mapping[int, ReplicaBuffers]) -> dict[str, Tensor]:
    """Return the buffers that a model should be evaluated with.

    Parameters are on the servers and newer than any replica; buffers are made by forward passes, and each worker's are its own. Running means
    and variances become those of the examples of all workers, each weighed by the updates that it has made; counters add up; of
    anything else the values of the worker that made most updates stand.

    Args:
        start: buffers that every replica began with, by name.
        replicas: worker -> its buffers; workers without an update have no say.

    Source: P6.7, P7.3.
    """
    here = {worker: found for worker, found in replicas.items() if found.updates}
    if not here:
        return {name: value.clone() for name, value in start.items()}
    most = max(here.values(), key=lambda found: found.updates).values
    counts = [found.updates for found in here.values()]
    merged: dict[str, Tensor] = {}
    for name, begun in start.items():
        prefix, _, kind = name.rpartition(".")
        mean_name, variance_name = (f"{prefix}.{each}" if prefix else each for each in (_MEAN, _VARIANCE))
        values = [found.values[name] for found in here.values()]
        if kind in (_MEAN, _VARIANCE) and mean_name in start and variance_name in start:
            if len(here) == 1:
                merged[name] = values[0].clone()
                continue
            means = torch.stack([found.values[mean_name] for found in here.values()]).double().numpy()
            variances = torch.stack([found.values[variance_name] for found in here.values()]).double().numpy()
            together = merge_statistics(means, variances, counts)
            merged[name] = torch.as_tensor(together.mean if kind == _MEAN else together.variance).to(begun.dtype)
        elif not begun.is_floating_point() and not begun.dim():
            merged[name] = begun + torch.stack([value - begun for value in values]).sum(0)
        else:
            merged[name] = most[name].clone()
    return merged


def quicken_batch_norm(module: nn.Module, workers: int) -> None:
    """Let the running statistics of one of several replicas forget as fast as those of a single one.

    A replica sees one batch in `workers` updates, so its moving average reaches that many times as far back, over parameters that
    have long changed. With 1 - (1 - momentum)^workers it reaches as far back, in updates, as without servers; the noise that this
    adds the average over the replicas takes away again. Layers without a momentum, which average over all batches, are left.

    Args:
        module: whose layers are changed.
        workers: replicas that take turns.

    Source: ours, for O9.
    """
    for layer in module.modules():
        momentum = getattr(layer, "momentum", None)
        if isinstance(getattr(layer, "running_mean", None), Tensor) and isinstance(momentum, float):
            setattr(layer, "momentum", 1 - (1 - momentum) ** workers if workers > 1 else momentum)  # noqa: B010


class BufferLog:
    """The newest buffers that each worker sent, and how many updates it had made.

    Args:
        start: buffers that every replica began with, by name.
    """

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        self._start = {name: value.clone() for name, value in start.items()}
        self._updates: Counter[int] = Counter()
        self._values: dict[int, dict[str, Tensor]] = {}

    def note(self, worker: int, updates: int, values: dict[str, Tensor] | None) -> None:
        """Note that a worker made so many more updates, and what its buffers were afterwards, where it said so."""
        self._updates[worker] += updates
        if values is not None:
            self._values[worker] = values

    def merged(self) -> dict[str, Tensor]:
        """Return what `merged_buffers` makes of them."""
        replicas = {worker: ReplicaBuffers(self._updates[worker], values) for worker, values in self._values.items()}
        return merged_buffers(self._start, replicas)
