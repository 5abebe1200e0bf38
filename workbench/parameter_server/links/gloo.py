"""`GlooLink`: calls say what is to be done, and values travel beside them, straight from one process to the other."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.links.link import Pulled, Take, handed
from workbench.parameter_server.links.plasma import PlasmaLink
from workbench.parameter_server.servers.plane import Grad
from workbench.parameter_server.servers.server import Push, extent, laid_out, lay, taken

__all__ = ["CONNECT_S", "GlooLink", "waiting"]


class GlooPair:
    """One end of the pair. Making it waits for the other end; no port is open but that of the connection.

    Args:
        rank: 0 at one end, 1 at the other.
        put: (key, content): lets the other end know something.
        get: key -> what the other end, or this one, put there; waits for it.
        address: of this machine, as the other end reaches it.
        timeout_s: for making it, and for each message.

    Raises:
        OSError: the other end was not found in time, or gloo cannot listen at that address.
    """

    def __init__(
        self, rank: int, put: Callable[[str, bytes], None], get: Callable[[str], bytes], address: str, timeout_s: float
    ) -> None:
        self._other = 1 - rank
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            options._devices = [gloo.create_device(hostname=address)]
            self._group = gloo(_Notes(put, get), rank, 2, options)
        except (RuntimeError, TimeoutError) as error:
            raise OSError(f"gloo: {error}") from error

    def send(self, content: Tensor) -> Callable[[], None]:
        """Begin to send; call what is returned before `content` changes.

        Both raise `OSError` where the other end is gone.
        """
        with _as_os_error():
            work = self._group.send([content], self._other, 0)
        return lambda: _end(work)

    def receive(self, content: Tensor) -> Callable[[], None]:
        """Begin to fill `content` with what the other end sends; it is there when what is returned was called."""
        with _as_os_error():
            work = self._group.recv([content], self._other, 0)
        return lambda: _end(work)


class _Notes(torch.distributed.Store):  # type: ignore[name-defined,misc]
    """What gloo asks of a store while it connects, by two functions."""

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put, self._get = put, get

    def set(self, key: str, value: Any) -> None:
        self._put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        for key in keys:
            self._get(key)

    def has_extended_api(self) -> bool:
        return False


def _end(work: Any) -> None:
    with _as_os_error():
        work.wait()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"gloo: {error}") from error


CONNECT_S = 15.0  # until the way is given up, as where a machine's own address cannot be reached from elsewhere
STEP_S = 0.005


class GlooLink:
    """The way to one server of another machine.

    Args:
        server: its index.
        reader: which of the processes this is.
        address: of this machine, as the server reaches it.
        there: of the server's machine, as this process reaches it.
        why: why this way is taken.

    Raises:
        OSError: the two cannot connect.
    """

    name = "gloo"

    def __init__(self, calls: PlasmaLink, server: int, reader: int, *, address: str, there: str, why: str) -> None:
        self.why = why
        self._calls, self._server, self._reader = calls, server, reader
        self._sizes: dict[str, tuple[int, torch.dtype]] = {}
        attempt = uuid.uuid4().hex  # notes of an earlier one say where nobody is any more
        joined = calls.begin_small("join_pair", reader, attempt, there)

        def put(key: str, content: bytes) -> None:
            calls.control("put_note", attempt, key, content)

        def get(key: str) -> bytes:
            found: bytes = waiting(lambda: calls.control("note", attempt, key))
            return found

        self._pair = GlooPair(1, put, get, address, CONNECT_S)
        joined()

    def gone(self) -> bool:
        """See `Link`; only a call would tell."""
        return False

    def pull(self, blocks: Sequence[str]) -> Callable[[], Pulled]:
        """See `Link`."""
        content, lying, received = self._expect(blocks)
        end = self._calls.begin_small("pull_gloo", self._reader, list(blocks), lying, content.nbytes)

        def ended() -> Pulled:
            versions = end()
            with self._lost():
                received()
            return list(zip(taken(content, lying), versions, strict=True))

        return ended

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        """See `Link`."""
        return handed(self.pull(blocks), take)

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        """See `Link`."""
        lying, size = lay([extent(grad) for grad in grads])
        content = torch.empty(size, dtype=torch.uint8)
        laid_out(grads, lying, content)
        end = self._calls.begin_small("push_gloo", self._reader, list(blocks), list(pushes), lying, size)
        with self._lost():
            sent = self._pair.send(content)

        def ended() -> list[int]:
            versions = list(end())
            with self._lost():
                sent()
            return versions

        return ended

    def push_pull(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], Pulled]:
        """See `Link`."""
        pushed = self.push(blocks, grads, pushes)

        def ended() -> Pulled:
            pushed()
            return self.pull(blocks)()

        return ended

    def pull_rows(self, block: str, rows: Tensor, width: int) -> Tensor:
        """See `Link`; rows are few, and travel with the answer."""
        return self._calls.pull_rows(block, rows, width)

    def ask(self, method: str, *arguments: Any) -> Any:
        """See `Link`."""
        if method == "delete":
            self._sizes.pop(arguments[0], None)
        return self._calls.ask(method, *arguments)

    def close(self) -> None:
        """See `Link`."""

    def _expect(self, blocks: Sequence[str]) -> tuple[Tensor, Any, Callable[[], None]]:
        for block in blocks:
            if block not in self._sizes:
                self._sizes[block] = self._calls.begin_small("size", block)()
        lying, size = lay([self._sizes[block] for block in blocks])
        content = torch.empty(size, dtype=torch.uint8)
        with self._lost():
            return content, lying, self._pair.receive(content)

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError("ps", self._server, str(error)) from error


def waiting(look: Callable[[], Any], timeout_s: float = CONNECT_S) -> Any:
    """Look until there is something.

    Raises:
        TimeoutError: there was nothing.
    """
    until = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"the other end was not there within {timeout_s:g} s")
        time.sleep(STEP_S)
    return found
