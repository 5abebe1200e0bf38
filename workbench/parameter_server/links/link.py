"""`LinkedPlane`: a data plane that reaches each server in its own way, and all that are needed at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.plane import Grad, Place
from workbench.parameter_server.servers.server import Push

Result = TypeVar("Result")
Pulled = list[tuple[Tensor, int]]
Take = Callable[[int, Tensor], None]


def handed(end: Callable[[], Pulled], take: Take) -> Callable[[], list[int]]:
    """Return what ends a pull, hands out the values and returns the versions."""

    def ended() -> list[int]:
        pulled = end()
        for k, (values, _) in enumerate(pulled):
            take(k, values)
        return [version for _, version in pulled]

    return ended


class Link(Protocol):
    """The way to one server, used by one thread at a time. What is begun is ended by calling what it returned, before anything else."""

    @property
    def name(self) -> str:
        """The name of the way."""
        ...

    @property
    def why(self) -> str:
        """Why it was taken."""
        ...

    def gone(self) -> bool:
        """Return whether the server is known to have ended."""
        ...

    def pull(self, blocks: Sequence[str]) -> Callable[[], Pulled]:
        """Begin to read blocks."""
        ...

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        """Begin to read blocks, and let `take` copy them."""
        ...

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        """Begin to apply gradients."""
        ...

    def push_pull(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], Pulled]:
        """Begin to apply gradients and to read what came of it."""
        ...

    def pull_rows(self, block: str, rows: Tensor, width: int) -> Tensor:
        """Return some rows of a block."""
        ...

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the server."""
        ...

    def close(self) -> None:
        """Give back what the link holds here."""
        ...


class LinkedPlane:
    """A `DataPlane` of links.

    Args:
        num_servers: in the cluster.
        connect: makes the link to a server by its index; raises `UnavailableError` where it is gone.
    """

    def __init__(self, num_servers: int, connect: Callable[[int], Link]) -> None:
        self._connect = connect
        self._links: dict[int, Link] = {}
        self._locks = [threading.Lock() for _ in range(num_servers)]

    @property
    def name(self) -> str:
        """The ways that are taken, such as "shm"."""
        return "+".join(sorted({link.name for link in self._links.values()})) or "none yet"

    @property
    def why(self) -> str:
        """Why they are taken."""
        found = {link.why: None for _, link in sorted(self._links.items())}
        return "; ".join(found) or "no server was needed yet"

    def connect(self) -> None:
        """Find the way to every server now."""
        for server in range(len(self._locks)):
            with self._using([server]):
                self._link(server)

    def close(self) -> None:
        """Give back what all links hold."""
        for server in list(self._links):
            self._leave(server)

    def forget(self, server: int) -> None:
        """Find the way to a server anew when it is needed: it was started anew."""
        with self._locks[server]:
            self._leave(server)

    def pull(self, places: Sequence[Place]) -> Pulled:
        """See `DataPlane`."""
        return self._all(places, lambda link, blocks, _: link.pull(blocks))

    def pull_into(self, places: Sequence[Place], take: Take) -> list[int]:
        """See `DataPlane`."""
        return self._all(places, lambda link, blocks, at: link.pull_into(blocks, lambda k, values: take(at[k], values)))

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        """See `DataPlane`."""
        return self._all(
            places, lambda link, blocks, at: link.push(blocks, [grads[k] for k in at], [pushes[k] for k in at])
        )

    def push_pull(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> Pulled:
        """See `DataPlane`."""
        return self._all(
            places, lambda link, blocks, at: link.push_pull(blocks, [grads[k] for k in at], [pushes[k] for k in at])
        )

    def pull_rows(self, place: Place, rows: Tensor, width: int) -> Tensor:
        """See `DataPlane`."""
        with self._using([place.server]):
            return self._link(place.server).pull_rows(place.block, rows, width)

    def ask(self, server: int, method: str, *arguments: Any) -> Any:
        """See `DataPlane`."""
        with self._using([server]):
            return self._link(server).ask(method, *arguments)

    def _all(
        self, places: Sequence[Place], begin: Callable[[Link, list[str], list[int]], Callable[[], list[Result]]]
    ) -> list[Result]:
        """Begin with every server, then end with every server, also where one of them fails."""
        by: dict[int, list[int]] = {}
        for k, place in enumerate(places):
            by.setdefault(place.server, []).append(k)
        found: dict[int, Result] = {}
        errors: list[Exception] = []
        with self._using(sorted(by)):
            begun: dict[int, Callable[[], list[Result]]] = {}
            for server, at in sorted(by.items()):
                with self._collected(server, errors):
                    begun[server] = begin(self._link(server), [places[k].block for k in at], at)
            for server, end in begun.items():
                with self._collected(server, errors):
                    found.update(zip(by[server], end(), strict=True))
            if errors:
                raise next((each for each in errors if isinstance(each, UnavailableError)), errors[0])
        return [found[k] for k in range(len(places))]

    @contextlib.contextmanager
    def _collected(self, server: int, errors: list[Exception]) -> Iterator[None]:
        """Keep an error for the end; a link on which something may still be under way is not used again."""
        try:
            yield
        except Exception as error:
            errors.append(error)
            self._leave(server)

    def _link(self, server: int) -> Link:
        link = self._links.get(server)
        if link is not None and link.gone():
            self._leave(server)
            raise UnavailableError("ps", server)
        if link is None:
            link = self._links[server] = self._connect(server)
        return link

    def _leave(self, server: int) -> None:
        link = self._links.pop(server, None)
        if link is not None:
            link.close()

    @contextlib.contextmanager
    def _using(self, servers: Sequence[int]) -> Iterator[None]:
        """Keep other threads off these links, always in the same order; a link whose server failed is not used again."""
        with contextlib.ExitStack() as stack:
            for server in servers:
                stack.enter_context(self._locks[server])
            try:
                yield
            except UnavailableError as error:
                self._leave(error.index)
                raise
