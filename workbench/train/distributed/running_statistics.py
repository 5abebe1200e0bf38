"""Running statistics of batch norm on all processes of a group, gathered, and merged by the law of total variance (P6.7).

An average leaves out how far the means of the processes lie apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.errors import UsageError
from workbench.train.batch_norm import batch_norm_layers, plain_name
from workbench.train.distributed.batch_norm import Group, place
from workbench.train.distributed.merge_statistics import merge_statistics

__all__ = [
    "LayerStatistics",
    "gather_running_statistics",
    "merge_running_statistics",
    "merged_running_statistics",
]

How = Literal["merge", "average"]


class LayerStatistics(NamedTuple):
    """Running statistics of one batch norm layer on every process.

    Attributes:
        mean: shape (processes, channels).
        variance: the same shape.
        batches: seen by each process, shape (processes,).
        examples: that stand for each process, shape (processes,).
    """

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    batches: NDArray[np.float64]
    examples: NDArray[np.float64]


def gather_running_statistics(
    model: nn.Module, group: Group = None, *, examples: float = 1.0
) -> dict[str, LayerStatistics]:
    """Return the running statistics of every process, the same on all of them; every process has to call it.

    Args:
        model: the module of this process, wrapped or not.
        group: of processes; None is the default one. Without one, this process is the only one.
        examples: that this process's statistics stand for; equal numbers, such as the default, weigh all processes alike.

    Raises:
        UsageError: the processes' models do not have the same batch norm layers, or `examples` is negative.
    """
    if not 0 <= examples < float("inf"):
        raise UsageError(f"examples={examples!r} must be finite and at least 0: what this process has trained on.")
    layers = _tracking(model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    parts: list[Tensor] = []
    for layer in layers.values():
        for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked):
            assert buffer is not None
            parts.append(buffer.detach().reshape(-1).to(device=device, dtype=torch.float64))
    own = torch.cat([torch.tensor([examples], dtype=torch.float64, device=device), *parts])
    rows = _gathered(own, group)
    found: dict[str, LayerStatistics] = {}
    at = 1
    for name, layer in layers.items():
        n = layer.num_features
        mean, variance, batches = rows[:, at : at + n], rows[:, at + n : at + 2 * n], rows[:, at + 2 * n]
        found[name] = LayerStatistics(mean, variance, batches, rows[:, 0])
        at += 2 * n + 1
    return found


def merge_running_statistics(
    model: nn.Module, group: Group = None, *, examples: float = 1.0, how: How = "merge"
) -> dict[str, LayerStatistics]:
    """Make the running statistics of all processes equal, in place, and return what they were; every process has to call it.

    Do it before evaluating and before writing a checkpoint (P6.7, P7.3), not at every step. Layers that are equal already
    keep their bits. Training that goes on from merged variances forgets the spread of the means again; to evaluate in
    the middle of it, `merged_running_statistics` puts each process's own statistics back.

    Args:
        model: the module of this process, wrapped or not.
        group: of processes; None is the default one.
        examples: that this process's statistics stand for, its weight in the merge.
        how: "merge" is the law of total variance; "average" leaves out the spread of the means.

    Raises:
        UsageError: the processes' models do not have the same batch norm layers, or an argument is out of its range.

    Source: P6.7, P7.3.
    """
    if how not in ("merge", "average"):
        raise UsageError(f"how={how!r} must be 'merge' or 'average'.")
    found = gather_running_statistics(model, group, examples=examples)
    layers = _tracking(model)
    for name, each in found.items():
        if (each.mean == each.mean[0]).all() and (each.variance == each.variance[0]).all():
            continue
        merged = merge_statistics(each.mean, each.variance, each.examples)
        variance = merged.variance if how == "merge" else merged.average_variance
        for buffer, value in ((layers[name].running_mean, merged.mean), (layers[name].running_var, variance)):
            assert buffer is not None
            buffer.copy_(torch.from_numpy(value))
    return found


@contextmanager
def merged_running_statistics(
    model: nn.Module, group: Group = None, *, examples: float = 1.0, how: How = "merge"
) -> Iterator[dict[str, LayerStatistics]]:
    """Have merged running statistics inside the block, and each process its own again after it; the arguments are those above."""
    layers = _tracking(model).values()
    kept = [(b, b.clone()) for layer in layers for b in (layer.running_mean, layer.running_var) if b is not None]
    try:
        yield merge_running_statistics(model, group, examples=examples, how=how)
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _tracking(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers with running statistics by name, whatever the model is wrapped in."""
    return {
        plain_name(name): layer
        for name, layer in batch_norm_layers(model).items()
        if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None
    }


def _gathered(own: Tensor, group: Group) -> NDArray[np.float64]:
    """Return the vector of every process, shape (processes, numbers)."""
    _, world = place(group)
    if world == 1:
        return own.cpu().numpy()[None].astype(np.float64)
    length = torch.tensor([len(own)], device=own.device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    if len({int(n) for n in lengths}) > 1:
        raise UsageError(
            f"the processes hold {', '.join(str(int(n) - 1) for n in lengths)} numbers of running statistics: every process "
            "must have the same model."
        )
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts).cpu().numpy().astype(np.float64)
