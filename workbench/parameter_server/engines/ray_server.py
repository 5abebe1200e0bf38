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
from workbench.parameter_server.links.shared_memory import Where, share
from workbench.parameter_server.links.shm import Located, SharedBlock
from workbench.parameter_server.servers.server import Lying, Push, ServerRuntime, taken
from workbench.parameter_server.workers.wire import from_wire, to_wire


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
