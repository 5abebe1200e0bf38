"""What each worker keeps for itself, batch norm's running statistics above all, made into one model's (P6.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workbench.diagnostics.batch_norm_merge import merge_statistics

__all__ = ["merge_buffers"]


def merge_buffers(workers: Sequence[Mapping[str, Tensor]], updates: Sequence[int]) -> dict[str, Tensor]:
    """Return the buffers of one model from those of several workers.

    Running means and variances are merged by the law of total variance, each worker with the updates that it made as its
    weight; workers that made none do not count. Every other buffer is that of the worker that made the most.

    Args:
        workers: buffers by name.
        updates: that each of them made.
    """
    most = max(range(len(workers)), key=lambda worker: updates[worker])
    found = {name: tensor.clone() for name, tensor in workers[most].items()}
    counted = [worker for worker in range(len(workers)) if updates[worker]]
    if len(counted) < 2:
        return found
    weights = [float(updates[worker]) for worker in counted]
    for name in found:
        layer, _, leaf = name.rpartition("running_mean")
        other = f"{layer}running_var"
        if leaf or not name.endswith("running_mean") or other not in found:
            continue
        means = torch.stack([workers[worker][name] for worker in counted]).double().numpy()
        variances = torch.stack([workers[worker][other] for worker in counted]).double().numpy()
        merged = merge_statistics(means, variances, weights)
        for key, values in ((name, merged.mean), (other, merged.variance)):
            found[key] = torch.as_tensor(values, dtype=found[key].dtype)
    return found
