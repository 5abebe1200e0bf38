"""Which data plane a variable's values travel by in this process: one a cluster, found by the cluster's id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.servers.server import Push, ServerRuntime

Grad = Sequence[Tensor]
"""A gradient as flat pieces, which lie one after the other in the block."""
Take = Callable[[int, Tensor], object]
"""Copies the flat values of a block, which is told by its place among those asked for."""


class Place(NamedTuple):
    """Where a block lies."""

    server: int
    block: str


class DataPlane(Protocol):
    """Three ways to move values, and `ask` for everything that is not in a hurry; all raise `UnavailableError` where a server is gone."""

    @property
    def name(self) -> str:
        """How values travel: "direct", "shm" or "plasma"."""
        ...

    @property
    def why(self) -> str:
        """Why this way was taken."""
        ...

    def pull_into(self, places: Sequence[Place], take: Take) -> list[int]:
        """Let `take` copy the values of each block, again where they were written meanwhile; returns the versions."""
        ...

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        """Apply a gradient to each block; returns once all are applied, with the new versions."""
        ...

    def pull_rows(self, place: Place, rows: Tensor, width: int) -> Tensor:
        """Return some rows of a block, shape (rows, width)."""
        ...

    def ask(self, server: int, method: str, *arguments: Any) -> Any:
        """Call a method of a server by name and return its answer."""
        ...


def pull(plane: DataPlane, places: Sequence[Place]) -> list[Tensor]:
    """Return copies of the values of blocks, each flat."""
    found: dict[int, Tensor] = {}

    def take(k: int, values: Tensor) -> None:
        found[k] = values.clone()

    plane.pull_into(places, take)
    return [found[k] for k in range(len(places))]


class DirectPlane:
    """Servers that live in this process, which `server` returns by their index."""

    name: str = "direct"
    why: str = "the servers are in this process"

    def __init__(self, server: Callable[[int], ServerRuntime]) -> None:
        self._server = server

    def pull_into(self, places: Sequence[Place], take: Take) -> list[int]:
        """See `DataPlane`."""
        versions = []
        for k, place in enumerate(places):
            values, version = self._server(place.server).read(place.block)
            take(k, values)
            versions.append(version)
        return versions

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        """See `DataPlane`."""
        return [
            self._server(place.server).push(place.block, torch.cat(list(grad)), push)
            for place, grad, push in zip(places, grads, pushes, strict=True)
        ]

    def pull_rows(self, place: Place, rows: Tensor, width: int) -> Tensor:
        """See `DataPlane`."""
        return self._server(place.server).read_rows(place.block, rows, width)

    def ask(self, server: int, method: str, *arguments: Any) -> Any:
        """See `DataPlane`."""
        return getattr(self._server(server), method)(*arguments)


_PLANES: dict[str, DataPlane] = {}


def set_plane(cluster: str, plane: DataPlane) -> None:
    """Let this process reach the servers of a cluster, by its id."""
    _PLANES[cluster] = plane


def forget_plane(cluster: str) -> None:
    """Forget a cluster that ended."""
    _PLANES.pop(cluster, None)


def plane_of(cluster: str) -> DataPlane:
    """Return how this process reaches the servers of a cluster; raises `UsageError` where it does not."""
    if cluster not in _PLANES:
        raise UsageError(
            "This variable's cluster was shut down, or was never reached from this process. Variables are used on the "
            "coordinator, and in functions that are given to schedule, while the cluster is up."
        )
    return _PLANES[cluster]
