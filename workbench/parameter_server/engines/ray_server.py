"""`ServerTask`: what the actor of a parameter server holds, around the runtime that every engine has."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.parameter_server.engines.ray_tasks import RayTask
from workbench.parameter_server.links.gloo import CONNECT_S, GlooPair, waiting
from workbench.parameter_server.links.shared_memory import Where, share
from workbench.parameter_server.links.shm import Located, SharedBlock
from workbench.parameter_server.servers.server import Lying, Push, ServerRuntime, laid_out, taken
from workbench.parameter_server.workers.wire import from_wire, to_wire

__all__ = ["ServerTask"]


class ServerTask(RayTask):
    """A server that is called through Ray, one call at a time.

    Args:
        readers: processes that may read its blocks where they lie: workers and coordinator.
        may_share: whether blocks lie in memory that others can see.
    """

    def __init__(self, index: int, readers: int, may_share: bool) -> None:
        super().__init__()
        self._readers = readers
        self._may_share = may_share and self._hello.no_memory is None
        self._shared: dict[str, SharedBlock] = {}
        self._pairs: dict[int, GlooPair] = {}
        self._notes: dict[tuple[str, str], bytes] = {}
        self._attempts: dict[int, str] = {}
        self._outboxes: dict[int, tuple[Where, Tensor]] = {}
        self._runtime = ServerRuntime(index, self._memory)

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the runtime by its name."""
        given = from_wire(arguments)
        if method in ("write", "push", "load"):
            return to_wire(self._written(given[0], lambda: getattr(self._runtime, method)(*given)))
        found = getattr(self._runtime, method)(*given)
        if method == "load_report":
            self._add_what_was_read(found)
        if method == "delete":
            self._forget(given[0])
        return to_wire(found)

    def small(self, content: bytes) -> Any:
        """Call a method of this class by its name, with arguments that came as bytes."""
        method, arguments = pickle.loads(content)
        return getattr(self, method)(*arguments)

    def locate(self, name: str) -> Located | None:
        """Return where a block lies; None where others cannot see it.

        Raises:
            UnavailableError: there is no such block.
        """
        self._runtime.version(name)
        block = self._shared.get(name)
        return None if block is None else block.located

    def pull(self, blocks: Sequence[str]) -> Any:
        """Return values and versions."""
        return to_wire([self._runtime.read(block) for block in blocks])

    def push(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Sequence[Any]) -> list[int]:
        """Apply gradients that came with the call."""
        return self._pushed(blocks, pushes, from_wire(grads))

    def push_pull(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Sequence[Any]) -> Any:
        """Apply gradients that came with the call and return what came of it."""
        self.push(blocks, pushes, grads)
        return self.pull(blocks)

    def push_shared(
        self,
        blocks: Sequence[str],
        pushes: Sequence[Push],
        outbox: Where,
        lying: Sequence[Lying],
    ) -> list[int]:
        """Apply gradients that lie in the caller's memory, which waits meanwhile."""
        where, content = self._outboxes.get(outbox.pid, (None, None))
        if where != outbox or content is None:
            content = share(outbox)
            self._outboxes[outbox.pid] = (outbox, content)
            for pid in [pid for pid in self._outboxes if not os.path.exists(f"/proc/{pid}")]:
                del self._outboxes[pid]
        return self._pushed(blocks, pushes, taken(content, lying))

    def join_pair(self, reader: int, attempt: str, address: str) -> None:
        """Wait for one of the readers and connect with it."""
        for old in [each for each in self._notes if each[0] == self._attempts.get(reader)]:
            self._notes.pop(old)
        self._attempts[reader] = attempt

        def put(key: str, content: bytes) -> None:
            self.put_note(attempt, key, content)

        self._pairs[reader] = GlooPair(0, put, lambda key: waiting(lambda: self.note(attempt, key)), address, CONNECT_S)

    def put_note(self, attempt: str, key: str, content: bytes) -> None:
        """Keep what one end of a pair has to tell the other, which may be slower."""
        self._notes[attempt, key] = content

    def note(self, attempt: str, key: str) -> bytes | None:
        """Return what was kept."""
        return self._notes.get((attempt, key))

    def size(self, name: str) -> tuple[int, torch.dtype]:
        """Return number and dtype of a block's values."""
        return self._runtime.size(name)

    def pull_gloo(self, reader: int, blocks: Sequence[str], lying: Sequence[Lying], size: int) -> list[int]:
        """Send values to a reader and return their versions."""
        read = [self._runtime.read(block) for block in blocks]
        content = torch.empty(size, dtype=torch.uint8)
        laid_out([values for values, _ in read], lying, content)
        self._pairs[reader].send(content)()
        return [version for _, version in read]

    def push_gloo(
        self, reader: int, blocks: Sequence[str], pushes: Sequence[Push], lying: Sequence[Lying], size: int
    ) -> list[int]:
        """Apply gradients that a reader sends."""
        content = torch.empty(size, dtype=torch.uint8)
        self._pairs[reader].receive(content)()
        return self._pushed(blocks, pushes, taken(content, lying))

    def _pushed(self, blocks: Sequence[str], pushes: Sequence[Push], grads: Sequence[Tensor]) -> list[int]:
        return [
            self._written(block, partial(self._runtime.push, block, grad, push))
            for block, push, grad in zip(blocks, pushes, grads, strict=True)
        ]

    def _written(self, name: str, write: Callable[[], Any]) -> Any:
        shared = self._shared.get(name)
        if shared is None:
            return write()
        with shared.writing(lambda: self._runtime.version(name)):
            return write()

    def _memory(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        self._forget(name)
        if self._may_share:
            try:
                self._shared[name] = SharedBlock(count, dtype, self._readers)
            except OSError:  # not that much: this block is read by calls
                return torch.empty(count, dtype=dtype)
            return self._shared[name].values
        return torch.empty(count, dtype=dtype)

    def _forget(self, name: str) -> None:
        block = self._shared.pop(name, None)
        if block is not None:
            block.close()

    def _add_what_was_read(self, report: Mapping[str, dict[str, Any]]) -> None:
        for name, block in self._shared.items():
            for key, count in block.counts().items():
                report[name][key] += count
