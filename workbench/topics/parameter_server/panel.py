"""`parameter_server_panel`: which server carries what and how old gradients are, while a cluster runs (T1.2, T13)."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import UsageError, WorkbenchError
from workbench.findings.audited import Audit
from workbench.panels.controls import Answer, Choice, Control, controls_panel, needs, nothing
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.training.load import load_facts
from workbench.plots.svg import is_live
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server
from workbench.topics.parameter_server.figures import plot_server_load, plot_staleness

SHARE = 0.02
"""Of a core that looking and drawing may take: between two looks the thread rests so much longer than they take (rule of thumb)."""
_WATCHES: weakref.WeakKeyDictionary[ClusterCoordinator, ServerWatch] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen of a cluster at one moment."""

    audit: Audit
    updates: int
    updates_per_s: float = math.nan
    running: bool = True
    trouble: str = ""


class ServerWatch:
    """Looks at what servers and coordinator have counted; takes no lock that training waits for, and asks no worker.

    It ends when the cluster ends, when the coordinator is shut down or nobody holds it, and when `stop` is called. Another watch over the
    same coordinator takes its place, so that a cell may run twice.
    """

    def __init__(
        self,
        coordinator: ClusterCoordinator,
        placed: PlacedModule | None,
        show: Callable[[Look], object],
        refresh_s: float,
    ) -> None:
        self._coordinator, self._placed = weakref.ref(coordinator), placed
        self._show, self._refresh_s = show, refresh_s
        self._ended, self._stopped, self._seen_at = threading.Event(), False, math.nan
        self._thread: threading.Thread | None = None
        self.last = Look(audit=Audit(facts={"parameter_server": {}}, workload="a running cluster"), updates=0)
        self.look()

    def start(self) -> None:
        """Look again and again from now on."""
        coordinator = self._coordinator()
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
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    def look(self) -> Look:
        """Look once, and remember it."""
        coordinator, now, known = self._coordinator(), time.monotonic(), self.last
        if coordinator is None or self._ended.is_set():
            self.last = replace(known, updates_per_s=math.nan, running=False, trouble="")
            return self.last
        running = coordinator.running
        try:
            facts = load_facts(coordinator, self._placed, seconds=math.nan)
        except WorkbenchError as error:
            self.last = replace(known, updates_per_s=math.nan, running=running, trouble=str(error))
            return self.last
        updates, since = int(facts["steps"]), now - self._seen_at
        rate = (updates - known.updates) / since if since > 0 else math.nan
        audit = replace(known.audit, facts={"parameter_server": {"0": facts}})
        self.last, self._seen_at = Look(audit=audit, updates=updates, updates_per_s=rate, running=running), now
        return self.last

    def _watch(self) -> None:
        rest, going = self._refresh_s, True
        while going:
            self._ended.wait(rest)
            if self._stopped:
                return
            begun = time.thread_time()
            seen = self.look()
            going = seen.running
            self._show(seen)
            rest = max(self._refresh_s, (time.thread_time() - begun) / SHARE)


ALT = "The bytes that each parameter server carries in a step, beside how old gradients are when they are applied."


def parameter_server_panel(
    coordinator_or_record: Any,
    placed: PlacedModule | None = None,
    *,
    refresh_s: float = 1.0,
    live: bool | None = None,
) -> Any:
    """Return load and staleness of a cluster that is running, drawn anew while it trains; of a finished record, once.

    A thread looks at what servers and coordinator have counted. It rests for `refresh_s` between two looks, and so long that looking and
    drawing take no more than 2 % of a core. It ends with the cluster, with the coordinator, and when the panel is closed.

    Args:
        coordinator_or_record: the `ClusterCoordinator` of a loop, or a record of `ParameterServerTrainer` or `ParameterServerStudy`.
        placed: module that the loop trains; None where it trains variables alone.
        refresh_s: seconds between two looks, at least.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking; then there is one look and no thread.

    Returns:
        See `controls_panel`.

    Raises:
        UsageError: it is neither; or refresh_s is not above 0.

    Source: T1.2, T13.1, T13.2.
    """
    if not isinstance(refresh_s, (int, float)) or not 0 < refresh_s < math.inf:
        raise UsageError(f"refresh_s={refresh_s!r} must be a finite number of seconds above 0.")
    if isinstance(coordinator_or_record, ClusterCoordinator):
        return _of_cluster(coordinator_or_record, placed, refresh_s=refresh_s, live=live)
    what = "the wb.ps.ClusterCoordinator of a loop, or a record of wb.ps.Trainer"
    needs("parameter_server_panel", coordinator_or_record, "facts", what=what)
    return _of_record(coordinator_or_record, live=live)


def _of_cluster(
    coordinator: ClusterCoordinator, placed: PlacedModule | None, *, refresh_s: float, live: bool | None
) -> Any:
    watch = ServerWatch(coordinator, placed, lambda _: panel.redraw(), refresh_s)
    panel = controls_panel("parameter_server_panel", lambda: _answer(watch.last), {}, alt=ALT, live=live)
    if is_live(live):
        panel.at_close(watch.stop)
        watch.start()
    return panel


def _of_record(record: Any, *, live: bool | None) -> Any:
    trials = sorted(map(int, record.facts.get("parameter_server") or {}))
    if not trials:
        why = "nothing was trained on parameter servers here. Run wb.ps.Study().run(workload, out=...), or wb.ps.Trainer()."
        return nothing("parameter_server_panel", why, alt=ALT, live=live)
    options = [(str(trial), trial) for trial in trials]
    controls: dict[str, Control] = {"trial": Choice(label="trial", options=options, start=trials[0], slides=False)}
    return controls_panel("parameter_server_panel", lambda trial: _judged(record, trial), controls, alt=ALT, live=live)


def _judged(record: Any, trial: int | None) -> Answer:
    """Return the verdicts on a trial, None is the first, beside its two figures."""
    said = diagnose_parameter_server(record, trial=trial)
    measured = [said[code] for code in ("ps.imbalance", "ps.staleness")]
    return Answer(
        "\n".join(each.summary for each in measured if trial is not None or each.status != "not_measured"),
        [
            lambda ax: plot_server_load(record, said, trial=trial, ax=ax),
            lambda ax: plot_staleness(record, said, trial=trial, ax=ax),
        ],
    )


def _answer(seen: Look) -> Answer:
    """Say how far the training is, above what `_judged` says."""
    answer = _judged(seen.audit, None)
    rate = f", {seen.updates_per_s:.3g} a second" if math.isfinite(seen.updates_per_s) else ""
    state = f"Running: {seen.updates:,} updates{rate}."
    if seen.trouble:
        state = f"Nothing new: {seen.trouble}"
    elif not seen.running:
        state = f"Ended; after {seen.updates:,} updates was the last look."
    return answer._replace(words="\n".join(filter(None, [state, answer.words])))
