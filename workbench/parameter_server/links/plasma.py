"""`PlasmaLink`: values travel with the calls, through Ray's object store where they are large; it works between any two ends."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.links.link import Pulled, Take, handed
from workbench.parameter_server.servers.plane import Grad, whole
from workbench.parameter_server.servers.server import Push
from workbench.parameter_server.workers.wire import from_wire, to_wire
from workbench.ray.cluster import NotYet, RayCluster, WorkerLost

CONTROL = "control"
"""Calls of this group are answered while another call runs."""

LOOK_S = 0.1  # how often it is looked whether the server is there still, where that can be seen


class PlasmaLink:
    """The way to one server by calls alone.

    Args:
        server: its index.
        why: why this way is taken.
    """

    name = "plasma"

    def __init__(self, cluster: RayCluster, actor: Any, server: int, why: str) -> None:
        self.why = why
        self._cluster, self._actor, self._server = cluster, actor, server
        self._gone: Callable[[], bool] | None = None

    def watch(self, gone: Callable[[], bool]) -> None:
        """Do not wait for an answer where this says that the server has ended: Ray may take seconds to notice."""
        self._gone = gone

    def gone(self) -> bool:
        """See `Link`; only a call would tell where nobody watches."""
        return self._gone is not None and self._gone()

    def begin(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the server's process and return what waits for its answer."""
        return self._end(self._cluster.call(self._actor, method, *arguments))

    def begin_small(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Do so with arguments that are no arrays: as one argument they cost less."""
        return self._end(self._cluster.call(self._actor, "small", pickle.dumps((method, arguments), protocol=5)))

    def control(self, method: str, *arguments: Any) -> Any:
        """Call a method that is answered also while the server does something else, and wait for the answer."""
        return self._end(self._cluster.call(self._actor, method, *arguments, group=CONTROL))()

    def _end(self, call: Any) -> Callable[[], Any]:
        def end() -> Any:
            while True:
                try:
                    return self._cluster.answer(call, None if self._gone is None else LOOK_S)
                except WorkerLost:
                    raise UnavailableError("ps", self._server) from None
                except NotYet:
                    if self.gone():
                        raise UnavailableError("ps", self._server) from None

        return end

    def pull(self, blocks: Sequence[str]) -> Callable[[], Pulled]:
        """See `Link`."""
        end = self.begin("pull", list(blocks))
        return lambda: from_wire(end())

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        """See `Link`."""
        return handed(self.pull(blocks), take)

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        """See `Link`."""
        end = self.begin("push", list(blocks), list(pushes), to_wire([whole(grad) for grad in grads]))
        return lambda: list(end())

    def push_pull(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], Pulled]:
        """See `Link`."""
        end = self.begin("push_pull", list(blocks), list(pushes), to_wire([whole(grad) for grad in grads]))
        return lambda: from_wire(end())

    def pull_rows(self, block: str, rows: Tensor, width: int) -> Tensor:
        """See `Link`."""
        found: Tensor = self.ask("read_rows", block, rows, width)
        return found

    def ask(self, method: str, *arguments: Any) -> Any:
        """See `Link`."""
        return from_wire(self.begin("ask", method, to_wire(list(arguments)))())

    def close(self) -> None:
        """See `Link`; nothing is held."""
