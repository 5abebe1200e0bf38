"""`ServerWatch`: a thread that looks at a running parameter-server cluster now and then, and ends by itself."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.findings.audited import Audit
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.trials.load import load_facts

__all__ = ["Look", "ServerWatch"]

SHARE = 0.02
"""Of a core that looking and drawing may take: between two looks the thread rests so much longer than they take (rule of thumb)."""
_WATCHES: weakref.WeakKeyDictionary[ClusterCoordinator, ServerWatch] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen of a cluster at one moment.

    Attributes:
        audit: facts since the cluster began, as `audit_parameter_server` has them, without the workers' times: nobody asks them.
        updates: that were made until then.
        updates_per_s: since the look before; NaN for the first one.
        running: False in the last one.
        trouble: why there is nothing new, "" where there is.
    """

    audit: Audit
    updates: int
    updates_per_s: float = math.nan
    running: bool = True
    trouble: str = ""


@dataclass
class ServerWatch:
    """Looks at what servers and coordinator have counted; takes no lock that training waits for, and asks no worker.

    It ends when the cluster ends, when the coordinator is shut down or nobody holds it, and when `stop` is called. Another watch over the
    same coordinator takes its place, so that a cell may run twice.

    Args:
        coordinator: of the cluster; not kept alive.
        placed: module that is trained; None where variables alone are.
        show: called with every new `Look`, in the thread of the watch.
        refresh_s: between two looks, at least.
    """

    coordinator: weakref.ref[ClusterCoordinator]
    placed: PlacedModule | None
    show: Callable[[Look], object]
    refresh_s: float = 1.0
    last: Look | None = None
    looks: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _stopped: bool = False
    _thread: threading.Thread | None = None
    _seen_at: float = math.nan

    @classmethod
    def over(
        cls,
        coordinator: ClusterCoordinator,
        placed: PlacedModule | None,
        show: Callable[[Look], object],
        refresh_s: float,
    ) -> ServerWatch:
        """Return a watch that has looked once."""
        watch = cls(weakref.ref(coordinator), placed, show, refresh_s)
        watch.look()
        return watch

    @property
    def watching(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Look again and again from now on."""
        coordinator = self.coordinator()
        if coordinator is None or not coordinator.running:
            return
        before = _WATCHES.get(coordinator)
        if before is not None:
            before.stop()
        _WATCHES[coordinator] = self
        coordinator.strategy.cluster.ends_with(self._ended.set)
        self._thread = threading.Thread(target=self._watch, name="parameter server panel", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it; what was shown last stays."""
        self._stopped = True
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=10.0)

    def look(self) -> Look:
        """Look once, and remember it."""
        coordinator, now = self.coordinator(), time.monotonic()
        running = coordinator is not None and coordinator.running
        known = self.last or Look(audit=_audit({}), updates=0)
        if coordinator is None or self._ended.is_set():
            self.last = Look(audit=known.audit, updates=known.updates, running=False)
            return self.last
        try:
            facts = load_facts(coordinator, self.placed, seconds=math.nan)
        except WorkbenchError as error:
            self.last = Look(audit=known.audit, updates=known.updates, running=running, trouble=str(error))
            return self.last
        updates = int(facts["steps"])
        since = now - self._seen_at
        rate = (updates - known.updates) / since if since > 0 else math.nan
        self.last = Look(audit=_audit({"0": facts}), updates=updates, updates_per_s=rate, running=running)
        self._seen_at, self.looks = now, self.looks + 1
        return self.last

    def _watch(self) -> None:
        rest, going = self.refresh_s, True
        while going:
            self._ended.wait(rest)
            if self._stopped:
                return
            begun = time.thread_time()
            seen = self.look()
            going = seen.running
            self.show(seen)
            rest = max(self.refresh_s, (time.thread_time() - begun) / SHARE)


def _audit(facts: dict[str, Any]) -> Audit:
    return Audit(facts={"parameter_server": facts}, workload="a running cluster")
