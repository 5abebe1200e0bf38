"""`ShmLink`: on one machine a server's blocks are read where they lie, and gradients are written where the server reads them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.links.link import Pulled, Take, handed
from workbench.parameter_server.links.plasma import PlasmaLink
from workbench.parameter_server.links.shared_memory import SharedMemory, Where, Witness, share
from workbench.parameter_server.servers.plane import Grad
from workbench.parameter_server.servers.server import Lying, Push, extent, laid_out, lay

LINE = 8  # numbers of 8 bytes in what a processor moves at once: what different processes write lies that far apart
BUSY_S = 0.02  # rule of thumb: ten times what an update of a million values takes

_SEQUENCE, _VERSION, _DELETED = range(3)
_REQUESTS, _BYTES_OUT, _BYTES_IN = range(3)


class Located(NamedTuple):
    """What a reader has to know of a block."""

    where: Where
    size: int
    dtype: torch.dtype
    readers: int


class SharedBlock:
    """Values and, before them, a line of numbers that tell whether they are being written, and a line for each reader to count in.

    Args:
        size: number of values.
        readers: processes that may read it.

    Raises:
        OSError: there is not that much memory to share.
    """

    def __init__(self, size: int, dtype: torch.dtype, readers: int) -> None:
        head = (1 + readers) * LINE
        self._memory = SharedMemory(8 * head + size * dtype.itemsize)
        self.located = Located(self._memory.where, size, dtype, readers)
        self._head = self._memory.content[: 8 * head].view(torch.int64).numpy()
        self._head[:] = 0
        self.values = self._memory.content[8 * head :].view(dtype)[:size]

    @contextlib.contextmanager
    def writing(self, version: Callable[[], int]) -> Iterator[None]:
        """Let readers wait, or read again, while the values change.

        Args:
            version: returns the block's new version afterwards.
        """
        self._head[_SEQUENCE] += 1  # odd from here
        try:
            yield
        finally:
            self._head[_VERSION] = version()
            self._head[_SEQUENCE] += 1

    def counts(self) -> dict[str, int]:
        """Return requests, bytes_out and bytes_in of all readers together."""
        lines = self._head.reshape(-1, LINE)[1:].sum(axis=0)
        return {
            "requests": int(lines[_REQUESTS]), "bytes_out": int(lines[_BYTES_OUT]), "bytes_in": int(lines[_BYTES_IN]),
        }  # fmt: skip

    def close(self) -> None:
        """Tell the readers that it is deleted."""
        self._head[_DELETED] = 1
        self._memory.close()


class BlockReader:
    """A `SharedBlock` as another process sees it.

    Args:
        reader: which line of counts is this process's.

    Raises:
        OSError: it is not there any more.
    """

    def __init__(self, located: Located, reader: int) -> None:
        content = share(located.where)
        head = (1 + located.readers) * LINE
        self._head = content[: 8 * head].view(torch.int64).numpy()
        self._counts: Any = self._head.reshape(-1, LINE)[1 + reader]
        self._values = content[8 * head :].view(located.dtype)[: located.size]

    @property
    def deleted(self) -> bool:
        """Whether the server has forgotten the block."""
        return bool(self._head[_DELETED])

    def read(self) -> tuple[Tensor, int] | None:
        """Return a copy of the values, and their version; None where the server writes without a pause."""
        out = torch.empty_like(self._values)
        version = self.read_into(out.copy_)
        return None if version is None else (out, version)

    def read_into(self, take: Callable[[Tensor], object]) -> int | None:
        """Let `take` copy the values, again where they were written meanwhile; returns their version, None as `read`."""
        version = self._unchanged(lambda: take(self._values))
        if version is not None:
            self._count(self._values.nbytes)
        return version

    def read_rows(self, rows: Tensor, width: int) -> Tensor | None:
        """Return a copy of some rows of `width` values; None where the server writes without a pause.

        Raises:
            IndexError: there is no such row.
        """
        table = self._values.view(-1, width)
        found: list[Tensor] = []
        if self._unchanged(lambda: found.append(table[rows])) is None:
            return None
        self._count(found[-1].nbytes, rows.nbytes)
        return found[-1]

    def _unchanged(self, copy: Callable[[], object]) -> int | None:
        head, until = self._head, None
        while True:
            before = head[_SEQUENCE]
            if not before & 1:
                copy()
                version = int(head[_VERSION])
                if head[_SEQUENCE] == before:
                    return version
            now = time.perf_counter()
            until = until or now + BUSY_S
            if now > until:
                return None
            time.sleep(2e-5)

    def _count(self, bytes_out: int, bytes_in: int = 0) -> None:
        self._counts[_REQUESTS] += 1
        self._counts[_BYTES_OUT] += bytes_out
        self._counts[_BYTES_IN] += bytes_in


class ShmLink:
    """The way to one server of this machine: a read is a copy and no call; a write is a call that carries no values.

    A block for which the server got no memory to share is read and written by calls.

    Args:
        server: its index.
        reader: which line of a block's counts is this process's.

    Raises:
        OSError: the server's process cannot be seen from here.
    """

    name = "shm"

    def __init__(self, calls: PlasmaLink, server: int, pid: int, reader: int) -> None:
        self._calls, self._server, self._reader = calls, server, reader
        self._witness = Witness(pid)
        calls.watch(self._witness.gone)
        self._blocks: dict[str, BlockReader | None] = {}
        self._outbox: SharedMemory | None = None

    @property
    def why(self) -> str:
        """See `Link`."""
        plain = [name for name, block in self._blocks.items() if block is None]
        if not plain:
            return "both ends are on one machine"
        return (
            f"both ends are on one machine; {len(plain)} blocks of ps {self._server} travel by calls, because there was no memory "
            "left to share for them"
        )

    def gone(self) -> bool:
        """See `Link`."""
        return self._witness.gone()

    def pull(self, blocks: Sequence[str]) -> Callable[[], Pulled]:
        """See `Link`; the values that are read are those at the end."""
        return lambda: [self._read(block) for block in blocks]

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        """See `Link`."""
        return lambda: [self._taken(block, k, take) for k, block in enumerate(blocks)]

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        """See `Link`."""
        outbox, lying = self._laid_out(grads)
        end = self._calls.begin_small("push_shared", list(blocks), list(pushes), outbox.where, lying)
        return lambda: list(end())

    def push_pull(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], Pulled]:
        """See `Link`."""
        end = self.push(blocks, grads, pushes)

        def pushed() -> Pulled:
            end()
            return [self._read(block) for block in blocks]

        return pushed

    def pull_rows(self, block: str, rows: Tensor, width: int) -> Tensor:
        """See `Link`."""
        there = self._block(block)
        found = None if there is None else there.read_rows(rows, width)
        return self._calls.pull_rows(block, rows, width) if found is None else found

    def ask(self, method: str, *arguments: Any) -> Any:
        """See `Link`."""
        return self._calls.ask(method, *arguments)

    def close(self) -> None:
        """See `Link`."""
        if self._outbox is not None:
            self._outbox.close()

    def _read(self, block: str) -> tuple[Tensor, int]:
        there = self._block(block)
        found = None if there is None else there.read()
        return self._calls.pull([block])()[0] if found is None else found

    def _taken(self, block: str, number: int, take: Take) -> int:
        there = self._block(block)
        version = None if there is None else there.read_into(lambda values: take(number, values))
        if version is not None:
            return version
        return handed(self._calls.pull([block]), lambda _, values: take(number, values))()[0]

    def _block(self, name: str) -> BlockReader | None:
        there = self._blocks.get(name)
        if name in self._blocks and (there is None or not there.deleted):
            return there
        self._blocks.pop(name, None)
        located = self._calls.begin_small("locate", name)()
        try:
            self._blocks[name] = None if located is None else BlockReader(located, self._reader)
        except OSError:
            if self.gone():
                raise UnavailableError("ps", self._server) from None
            raise
        return self._blocks[name]

    def _laid_out(self, grads: Sequence[Grad]) -> tuple[SharedMemory, list[Lying]]:
        lying, size = lay([extent(grad) for grad in grads])
        if self._outbox is None or self._outbox.where.nbytes < size:
            if self._outbox is not None:
                self._outbox.close()
            self._outbox = SharedMemory(size)
        laid_out(grads, lying, self._outbox.content)
        return self._outbox, lying
