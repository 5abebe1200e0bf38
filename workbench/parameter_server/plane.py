"""`DataPlane`: how values and gradients travel between a process and the servers; `DirectPlane` calls them in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from workbench.parameter_server.server import Push, ServerRuntime

__all__ = ["DataPlane", "DirectPlane", "Place"]


class Place(NamedTuple):
    """Where a block lies."""

    server: int
    block: str


class DataPlane(Protocol):
    """Four ways to move values, many blocks at a time, and `ask` for everything that is not in a hurry."""

    @property
    def name(self) -> str:
        """How they travel: "direct", "shm", "gloo" or "plasma"."""
        ...

    @property
    def why(self) -> str:
        """Why this way was taken."""
        ...

    def pull(self, places: Sequence[Place]) -> list[tuple[Tensor, int]]:
        """Return values (flat, the caller's own until the next call) and version of each block."""
        ...

    def push(self, places: Sequence[Place], grads: Sequence[Tensor], pushes: Sequence[Push]) -> list[int]:
        """Apply a gradient to each block; returns once all are applied, with the new versions."""
        ...

    def push_pull(
        self, places: Sequence[Place], grads: Sequence[Tensor], pushes: Sequence[Push]
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

    def push(self, places: Sequence[Place], grads: Sequence[Tensor], pushes: Sequence[Push]) -> list[int]:
        """See `DataPlane`."""
        return [
            self._server(place.server).push(place.block, grad, push)
            for place, grad, push in zip(places, grads, pushes, strict=True)
        ]

    def push_pull(
        self, places: Sequence[Place], grads: Sequence[Tensor], pushes: Sequence[Push]
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
