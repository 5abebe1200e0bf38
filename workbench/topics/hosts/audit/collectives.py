"""`CollectiveWatch`: when the process group begins, and how long this rank waits in collectives of the script's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State

__all__ = ["CollectiveWatch"]

_JOINING = (
    "all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor", "all_gather_object", "gather_object",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
)  # fmt: skip
_OTHERS = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier", "monitored_barrier")


class CollectiveWatch:
    """Counts collectives that join what ranks hold, in training and in evaluation (`hosts.evaluation`).

    Attributes:
        on_group: called when a process group has begun.

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._depth = 0
        state.on_train_call.append(self._on_train_call)
        self.on_group: list[Callable[[], None]] = []
        self._joined: dict[str, list[int]] = {"training": [], "evaluation": []}
        if dist.is_available() and dist.is_initialized():
            self._begun()
        for module in (dist, distributed_c10d):
            patches.wrap(module, "init_process_group", self._on_init)
            for name in _JOINING + _OTHERS:
                patches.wrap(module, name, functools.partial(self._on_call, name))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {"joined": {name: steps[:10_000] for name, steps in self._joined.items()}}

    def _begun(self) -> None:
        state = self._state
        state.initialised, state.rank, state.world = True, dist.get_rank(), dist.get_world_size()
        state.backend = str(dist.get_backend())

    def _on_train_call(self, _: Any) -> None:
        """Notice a group that something else has begun, as `init_device_mesh` may."""
        if not self._state.initialised and dist.is_available() and dist.is_initialized():
            self._begun()

    def _on_init(self, original: Any) -> Callable[..., Any]:
        def init(*args: Any, **kwargs: Any) -> Any:
            self._state.tick("waiting in init_process_group")
            found = original(*args, **kwargs)
            self._begun()
            for heard in self.on_group:
                heard()
            self._state.tick("after init_process_group")
            return found

        return init

    def _on_call(self, name: str, original: Any) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            state = self._state
            if name in _JOINING and not self._depth:
                self._joined["evaluation" if state.looking else "training"].append(state.step)
                for heard in () if state.looking else state.on_joining:
                    heard()
            self._depth += 1  # all_gather_object is made of others
            try:
                with state.waiting(name):
                    return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return collective
