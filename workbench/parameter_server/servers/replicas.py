"""`Replica`: a process's copy of a placed module, one a worker, kept until its cluster ends (T1.1)."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from workbench.parameter_server.context import current_worker

__all__ = ["Replica", "forget_replicas", "replica_of", "tracks_statistics"]


@dataclass
class Replica:
    """A worker's copy of the module.

    Attributes:
        module: to compute with; its placed parameters are replaced by every pull.
        parameters: those of the module that are placed, by name, flat.
        versions: of the blocks, as they were last pulled.
        updates: that were pushed from here: whose batches its buffers have seen.
    """

    module: nn.Module
    parameters: dict[str, Tensor]
    versions: list[int]
    updates: int = 0


_REPLICAS: dict[tuple[str, str, int | None], Replica] = {}


def replica_of(cluster: str, name: str, module: nn.Module, parameters: Collection[str], blocks: int) -> Replica:
    """Return the replica of whoever asks, worker or coordinator; it is made where there is none.

    Args:
        cluster: id of the cluster.
        name: of the placed module.
        module: to copy.
        parameters: names of those that are placed.
        blocks: in which they lie.
    """
    here = current_worker()
    key = (cluster, name, None if here is None else here.index)
    if key not in _REPLICAS:
        module = copy.deepcopy(module)
        placed = {label: parameter for label, parameter in module.named_parameters() if label in parameters}
        flat = {label: parameter.data.reshape(-1) for label, parameter in placed.items()}
        for label, parameter in placed.items():
            parameter.data = flat[label].view(parameter.shape)
            parameter.requires_grad_(True)
        _REPLICAS[key] = Replica(module, flat, [0] * blocks)
    return _REPLICAS[key]


def forget_replicas(cluster: str, name: str | None = None) -> None:
    """Drop the replicas of a cluster that ended, or of one placed module."""
    for key in [key for key in _REPLICAS if key[0] == cluster and name in (None, key[1])]:
        del _REPLICAS[key]


def tracks_statistics(module: nn.Module) -> bool:
    """Return whether a module has batch norm layers with running statistics."""
    return any(isinstance(layer, _NormBase) and layer.running_mean is not None for layer in module.modules())
