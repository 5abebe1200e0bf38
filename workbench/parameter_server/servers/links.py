"""How values get to servers and back: `RayPlane` by shared memory on one machine, by Ray's object store between machines."""

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.server import DirectPlane, Grad, Place, Push, Take
from workbench.parameter_server.workers.closure import from_wire, to_wire
from workbench.ray.cluster import NotYet, RayCluster, WorkerLost
from workbench.ray.shared_memory import (
    BlockReader,
    SharedMemory,
    Witness,
    machine,
    offsets_of,
    pack,
    shared_memory_missing,
)

Plane = Literal["auto", "shm", "plasma"]
PLANES = ("auto", "shm", "plasma")
CONTROL = "control"  # calls of this group are answered while another call runs
LOOK_S = 0.1  # how often it is looked whether the server is there still, where that can be seen


class ServerLink:
    """The way to one server, used by one thread at a time. What is begun is ended by calling what it returned, before anything else.

    On one machine a read is a copy and no call, a write a call that carries no values. What the server found no memory to share for
    travels by calls, as everything does between machines.

    Args:
        why: values do not go through shared memory; None where they do.
        pid: of the server's process, where they do; raises `OSError` where that cannot be seen.
        reader: which line of a block's counts is this process's.
    """

    def __init__(
        self, ray: RayCluster, actor: Any, server: int, why: str | None, *, pid: int = 0, reader: int = 0
    ) -> None:
        self.name = "shm" if why is None else "plasma"
        self._ray, self._actor, self._server, self._why, self._reader = ray, actor, server, why, reader
        self._witness = Witness(pid) if why is None else None
        self._blocks: dict[str, BlockReader | None] = {}
        self._outbox: SharedMemory | None = None

    @property
    def why(self) -> str:
        """Why this way was taken."""
        if self._why is not None:
            return self._why
        by_calls = sum(block is None for block in self._blocks.values())
        more = f"; {by_calls} blocks of ps {self._server} travel by calls, because there was no memory left to share for them"
        return "both ends are on one machine" + (more if by_calls else "")

    def gone(self) -> bool:
        """Return whether the server is seen to have ended, which Ray may take seconds to notice; between machines a call alone tells."""
        return self._witness is not None and self._witness.gone()

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the server's actor and return what waits for its answer."""
        answer = self._ray.call(self._actor, method, *arguments)

        def end() -> Any:
            while True:
                try:
                    return self._ray.answer(answer, None if self._witness is None else LOOK_S)
                except WorkerLost:
                    raise UnavailableError("ps", self._server) from None
                except NotYet:
                    if self.gone():
                        raise UnavailableError("ps", self._server) from None

        return end

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        """Begin to read blocks; the end lets `take` copy the values, and returns the versions."""
        if self._witness is not None:
            return lambda: [self._read(block, partial(take, k)) for k, block in enumerate(blocks)]
        end = self.call("pull", list(blocks))

        def ended() -> list[int]:
            pulled = from_wire(end())
            for k, (values, _) in enumerate(pulled):
                take(k, values)
            return [version for _, version in pulled]

        return ended

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        """Begin to apply gradients; the end returns the new versions."""
        if self._witness is None:
            return self.call("push", list(blocks), list(pushes), to_wire([torch.cat(list(grad)) for grad in grads]))
        offsets, nbytes = offsets_of(grads)
        if self._outbox is None or self._outbox.where.nbytes < nbytes:
            self.close()
            self._outbox = SharedMemory(nbytes)
        pack(grads, offsets, self._outbox.content)
        given = list(blocks), list(pushes), self._outbox.where, offsets
        return self.call("push_shared", pickle.dumps(given, protocol=5))  # as one argument they cost Ray least

    def pull_rows(
        self, blocks: Sequence[str], rows: Sequence[Tensor], width: int
    ) -> Callable[[], list[tuple[Tensor, int]]]:
        """Begin to read some rows of each block; the end returns them, with the blocks' versions."""
        if self._witness is not None:
            return lambda: [self._read_rows(block, ids, width) for block, ids in zip(blocks, rows, strict=True)]
        ends = [self._begin("read_rows", block, ids, width) for block, ids in zip(blocks, rows, strict=True)]
        return lambda: [end() for end in ends]

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the server."""
        return self._begin(method, *arguments)()

    def _begin(self, method: str, *arguments: Any) -> Callable[[], Any]:
        end = self.call("ask", method, to_wire(list(arguments)))
        return lambda: from_wire(end())

    def _read_rows(self, block: str, rows: Tensor, width: int) -> Any:
        reader = self._block(block)
        found = None if reader is None else reader.read_rows(rows, width)
        return self.ask("read_rows", block, rows, width) if found is None else found

    def close(self) -> None:
        """Give back the memory that the link holds here."""
        if self._outbox is not None:
            self._outbox.close()

    def _read(self, block: str, take: Callable[[Tensor], object]) -> int:
        reader = self._block(block)
        version = None if reader is None else reader.read_into(take)
        if version is None:
            ((values, version),) = from_wire(self.call("pull", [block])())
            take(values)
        return int(version)

    def _block(self, name: str) -> BlockReader | None:
        if self._witness is None:
            return None
        reader = self._blocks.get(name)
        if name in self._blocks and (reader is None or not reader.deleted):
            return reader
        self._blocks.pop(name, None)
        located = self.ask("locate", name)
        try:
            self._blocks[name] = None if located is None else BlockReader(located, self._reader)
        except OSError:
            if self.gone():
                raise UnavailableError("ps", self._server) from None
            raise
        return self._blocks[name]


def connector(names: Sequence[str], plane: Plane, reader: int) -> Callable[[int], ServerLink]:
    """Return what makes the link to a server, of actors of these names; `reader` is a worker's index, and for the coordinator their number."""
    ray = RayCluster.joined()

    def connect(server: int) -> ServerLink:
        try:
            actor = ray.find(names[server])
            hello = ray.answer(ray.call(actor, "hello"))
        except WorkerLost:
            raise UnavailableError("ps", server) from None
        if plane == "plasma":
            return ServerLink(ray, actor, server, "it was asked for")
        why = shared_memory_missing() or hello.no_memory
        if hello.machine != machine():
            why = f"ps {server} is on another machine, or in another container"
        if not why:
            try:
                return ServerLink(ray, actor, server, None, pid=hello.pid, reader=reader)
            except OSError as error:
                why = f"this process cannot see that of ps {server} ({error})"
        return ServerLink(ray, actor, server, f"{why}; values travel through Ray's object store")

    return connect


class RayPlane:
    """Reaches each server by a link of its own, which `connect` makes, and all that are needed at once."""

    def __init__(self, num_servers: int, connect: Callable[[int], ServerLink]) -> None:
        self._num_servers, self._connect = num_servers, connect
        self._links: dict[int, ServerLink] = {}
        self._lock = threading.RLock()

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
        for server in range(self._num_servers):
            with self._link(server):
                pass

    def close(self) -> None:
        """Give back what all links hold, also while another thread waits for an answer."""
        while self._links:
            self._links.popitem()[1].close()

    def forget(self, server: int) -> None:
        """Find the way to a server anew when it is needed: it was started anew, or something failed on this one."""
        with self._lock:
            link = self._links.pop(server, None)
            if link is not None:
                link.close()

    def pull_into(self, places: Sequence[Place], take: Take) -> list[int]:
        return self._all(places, lambda link, blocks, at: link.pull_into(blocks, lambda k, values: take(at[k], values)))

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        return self._all(
            places, lambda link, blocks, at: link.push(blocks, [grads[k] for k in at], [pushes[k] for k in at])
        )

    def pull_rows(self, places: Sequence[Place], rows: Sequence[Tensor], width: int) -> list[tuple[Tensor, int]]:
        return self._all(places, lambda link, blocks, at: link.pull_rows(blocks, [rows[k] for k in at], width))

    def ask(self, server: int, method: str, *arguments: Any) -> Any:
        with self._link(server) as link:
            return link.ask(method, *arguments)

    def _all(
        self, places: Sequence[Place], begin: Callable[[ServerLink, list[str], list[int]], Callable[[], list[Any]]]
    ) -> list[Any]:
        """Begin with every server, then end with every server, also where one of them fails."""
        by_server: dict[int, list[int]] = {}
        for k, place in enumerate(places):
            by_server.setdefault(place.server, []).append(k)
        found: dict[int, Any] = {}
        begun: dict[int, Callable[[], list[Any]]] = {}
        errors: list[Exception] = []
        with self._lock:
            for server, at in by_server.items():
                with _collected(errors), self._link(server) as link:
                    begun[server] = begin(link, [places[k].block for k in at], at)
            for server, end in begun.items():
                with _collected(errors), self._link(server):
                    found.update(zip(by_server[server], end(), strict=True))
        if errors:
            raise next((each for each in errors if isinstance(each, UnavailableError)), errors[0])
        return [found[k] for k in range(len(places))]

    @contextlib.contextmanager
    def _link(self, server: int) -> Iterator[ServerLink]:
        """Hand out the link to a server, to one thread at a time; one on which something failed is not used again."""
        with self._lock:
            try:
                if server not in self._links:
                    self._links[server] = self._connect(server)
                elif self._links[server].gone():
                    raise UnavailableError("ps", server)
                yield self._links[server]
            except Exception:
                self.forget(server)
                raise


@contextlib.contextmanager
def _collected(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)


DataPlane = DirectPlane | RayPlane

_PLANES: dict[str, DataPlane] = {}


def set_plane(cluster: str, plane: DataPlane) -> None:
    """Let this process reach the servers of a cluster, by its id."""
    _PLANES[cluster] = plane


def forget_plane(cluster: str) -> None:
    """Forget a cluster that ended."""
    _PLANES.pop(cluster, None)


def reach_anew(cluster: str) -> None:
    """Let this process find the way to every server of a cluster again when it is needed."""
    plane = plane_of(cluster)
    if isinstance(plane, RayPlane):
        plane.close()


def plane_of(cluster: str) -> DataPlane:
    """Return how this process reaches the servers of a cluster; raises `UsageError` where it does not."""
    if cluster not in _PLANES:
        raise UsageError(
            "This variable's cluster was shut down, or was never reached from this process. Variables are used on the "
            "coordinator, and in functions that are given to schedule, while the cluster is up."
        )
    return _PLANES[cluster]
