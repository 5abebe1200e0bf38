"""`SpawnWatch`: a script that starts its processes itself, in which nobody looks unless they call `audit_hosts` themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

from workbench.errors import UsageError
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State

__all__ = ["SpawnWatch"]


class SpawnWatch:
    """Counts processes that `torch.multiprocessing.spawn` starts.

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
        refused: whether to start none: a launcher has started the ranks, and each of them would start all of them again.
    """

    def __init__(self, state: State, patches: Patches, *, refused: bool) -> None:
        self._state, self._refused = state, refused
        self._spawned = 0
        for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            for name in ("spawn", "start_processes"):
                patches.wrap(module, name, functools.partial(self._on_spawn, name))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {"spawned": self._spawned}

    def _on_spawn(self, name: str, original: Any) -> Callable[..., Any]:
        def spawn(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
            if self._refused and self._state.here:
                raise UsageError(
                    f"the script starts {nprocs} processes itself, with torch.multiprocessing.{name}: nobody observes these, and "
                    f"every one of the {self._state.world} ranks would start them again. Call {getattr(fn, '__name__', 'the function')} "
                    "with int(os.environ['RANK']) in the place of spawn, as under torchrun; or call workbench.audit_hosts() at the "
                    "top of that function, and start the script as always."
                )
            self._spawned += nprocs
            return original(fn, args, nprocs, *rest, **kwargs)

        return spawn
