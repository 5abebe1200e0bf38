"""Which data plane a variable's values travel by in this process: one a cluster, found by the cluster's id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.servers.server import Push, ServerRuntime

Grad = Tensor | Sequence[Tensor]
"""A flat gradient, or its pieces, which lie one after the other in the block."""


class Place(NamedTuple):
    """Where a block lies."""

    server: int
    block: str


def whole(grad: Grad) -> Tensor:
    """Return a gradient in one piece."""
    return grad if isinstance(grad, Tensor) else torch.cat(list(grad))


class DataPlane(Protocol):
    """Four ways to move values, many blocks at a time, and `ask` for everything that is not in a hurry."""

    @property
    def name(self) -> str:
        """How they travel: "direct", "shm" or "plasma"."""
        ...

    @property
    def why(self) -> str:
        """Why this way was taken."""
        ...

    def pull(self, places: Sequence[Place]) -> list[tuple[Tensor, int]]:
        """Return values (flat, the caller's own until the next call) and version of each block."""
        ...

    def pull_into(self, places: Sequence[Place], take: Callable[[int, Tensor], None]) -> list[int]:
        """Do so without a copy in between; returns the versions.

        Args:
            places: to read.
            take: called with the number of a place and its values, which it has to copy; again where they were written meanwhile.
        """
        ...

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        """Apply a gradient to each block; returns once all are applied, with the new versions."""
        ...

    def push_pull(
        self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]
    ) -> list[tuple[Tensor, int]]:
        """Apply a gradient to each block and return what came of it."""
        ...

    def pull_rows(self, place: Place, rows: Tensor, width: int) -> Tensor:
        """Return some rows of a block, shape (rows, width)."""
        ...

    def ask(self, server: int, method: str, *arguments: Any) -> Any:
        """Call a method of a server by name and return its answer.

        Raises:
            UnavailableError: the server is gone, as from every method here.
        """
        ...


class DirectPlane:
    """Servers that live in this process.

    Args:
        server: returns a server by its index; raises `UnavailableError` where it is gone.
    """

    name: str = "direct"
    why: str = "the servers are in this process"

    def __init__(self, server: Callable[[int], ServerRuntime]) -> None:
        self._server = server

    def pull(self, places: Sequence[Place]) -> list[tuple[Tensor, int]]:
        """See `DataPlane`."""
        return [self._server(place.server).read(place.block) for place in places]

    def pull_into(self, places: Sequence[Place], take: Callable[[int, Tensor], None]) -> list[int]:
        """See `DataPlane`."""
        pulled = self.pull(places)
        for k, (values, _) in enumerate(pulled):
            take(k, values)
        return [version for _, version in pulled]

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        """See `DataPlane`."""
        return [
            self._server(place.server).push(place.block, whole(grad), push)
            for place, grad, push in zip(places, grads, pushes, strict=True)
        ]

    def push_pull(
        self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]
    ) -> list[tuple[Tensor, int]]:
        """See `DataPlane`."""
        self.push(places, grads, pushes)
        return self.pull(places)

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
