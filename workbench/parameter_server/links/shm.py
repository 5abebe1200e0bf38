"""`ShmLink`: on one machine a server's blocks are read where they lie, and gradients are written where the server reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.links.link import Pulled, Take, handed
from workbench.parameter_server.links.plasma import PlasmaLink
from workbench.parameter_server.links.shared_block import BlockReader
from workbench.parameter_server.links.shared_memory import SharedMemory, Witness
from workbench.parameter_server.servers.layout import Lying, extent, laid_out, lay
from workbench.parameter_server.servers.plane import Grad
from workbench.parameter_server.servers.server import Push

__all__ = ["ShmLink"]


class ShmLink:
    """The way to one server of this machine: a read is a copy and no call; a write is a call that carries no values.

    A block for which the server got no memory to share is read and written by calls.

    Args:
        calls: the way by calls.
        server: its index.
        pid: of its process.
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
