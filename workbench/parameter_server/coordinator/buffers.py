"""`merge_buffers`: batch norm's running statistics of all workers as one, for a training loop of one's own (P6.7, P7.3)."""

from __future__ import annotations

from torch import Tensor

from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.workers.replica_buffers import merged_buffers

__all__ = ["merge_buffers"]


def merge_buffers(coordinator: ClusterCoordinator, placed: PlacedModule) -> dict[str, Tensor]:
    """Bring the buffers of all workers' replicas together, and give them to the coordinator's, from which `placed.module()` is made.

    Parameters are on the servers, buffers are each worker's own: without this call a module with batch norm is evaluated, exported and
    saved with the statistics that it had before training. Call it after `join`; `StrategyModel.fit` does so by itself.

    Args:
        placed: module that was trained.

    Returns:
        The merged buffers by name; see `merged_buffers`.

    Source: P6.7, P7.3.
    """
    found = coordinator.on_every_worker(PlacedModule.replica_buffers, args=(placed,))
    merged = merged_buffers(placed.start_buffers(), dict(enumerate(found)))
    placed.take_buffers(merged)
    return merged
