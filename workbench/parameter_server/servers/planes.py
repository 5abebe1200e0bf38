"""Which data plane a variable's values travel by in this process: one a cluster, found by the cluster's id."""

from __future__ import annotations

from workbench.errors import UsageError
from workbench.parameter_server.servers.plane import DataPlane

__all__ = ["forget_plane", "plane_of", "set_plane"]

_PLANES: dict[str, DataPlane] = {}


def set_plane(cluster: str, plane: DataPlane) -> None:
    """Let this process reach the servers of a cluster, by its id."""
    _PLANES[cluster] = plane


def forget_plane(cluster: str) -> None:
    """Forget a cluster that ended."""
    _PLANES.pop(cluster, None)


def plane_of(cluster: str) -> DataPlane:
    """Return how this process reaches the servers of a cluster.

    Raises:
        UsageError: it does not; the cluster was shut down, or the variable came here in another way than through a closure.
    """
    if cluster not in _PLANES:
        raise UsageError(
            "This variable's cluster was shut down, or was never reached from this process. Variables are used on the "
            "coordinator, and in functions that are given to schedule, while the cluster is up."
        )
    return _PLANES[cluster]
