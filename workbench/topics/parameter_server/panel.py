"""`parameter_server_panel`: which server carries what and how old gradients are, while a cluster runs (T1.2, T13)."""

from __future__ import annotations

import math
from typing import Any

from workbench.errors import UsageError
from workbench.panels.answers import Answer, Choice, Control
from workbench.panels.base import is_live
from workbench.panels.controls import controls_panel, needs, nothing
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server
from workbench.topics.parameter_server.figures import plot_server_load, plot_staleness
from workbench.topics.parameter_server.server_watch import Look, ServerWatch

__all__ = ["parameter_server_panel"]

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
    what = "the ClusterCoordinator of a loop, or a record of ParameterServerTrainer"
    needs("parameter_server_panel", coordinator_or_record, "facts", what=what)
    return _of_record(coordinator_or_record, live=live)


def _of_cluster(
    coordinator: ClusterCoordinator, placed: PlacedModule | None, *, refresh_s: float, live: bool | None
) -> Any:
    watch = ServerWatch.over(coordinator, placed, lambda _: panel.redraw(), refresh_s)

    def answer() -> Answer:
        seen = watch.last
        assert seen is not None
        said = diagnose_parameter_server(seen.audit)
        words = "\n".join(
            [
                _state(seen),
                *(
                    said[code].summary
                    for code in ("ps.imbalance", "ps.staleness")
                    if said[code].status != "not_measured"
                ),
            ]
        )
        return Answer(
            words,
            [lambda ax: plot_server_load(seen.audit, said, ax=ax), lambda ax: plot_staleness(seen.audit, said, ax=ax)],
        )

    panel = controls_panel("parameter_server_panel", answer, {}, alt=ALT, live=live)
    if is_live(live):
        panel.at_close(watch.stop)
        watch.start()
    return panel


def _of_record(record: Any, *, live: bool | None) -> Any:
    trials = sorted(map(int, record.facts.get("parameter_server") or {}))
    if not trials:
        why = "nothing was trained on parameter servers here. Run wb.ParameterServerStudy().run(workload, out=...), or wb.ParameterServerTrainer()."
        return nothing("parameter_server_panel", why, alt=ALT, live=live)

    def answer(trial: int) -> Answer:
        said = diagnose_parameter_server(record, trial=trial)
        return Answer(
            "\n".join(said[code].summary for code in ("ps.imbalance", "ps.staleness")),
            [
                lambda ax: plot_server_load(record, said, trial=trial, ax=ax),
                lambda ax: plot_staleness(record, said, trial=trial, ax=ax),
            ],
        )

    options = [(str(trial), trial) for trial in trials]
    controls: dict[str, Control] = {"trial": Choice(label="trial", options=options, start=trials[0], slides=False)}
    return controls_panel("parameter_server_panel", answer, controls, alt=ALT, live=live)


def _state(seen: Look) -> str:
    """Say how far the training is."""
    if seen.trouble:
        return f"Nothing new: {seen.trouble}"
    if not seen.running:
        return f"Ended; after {seen.updates:,} updates was the last look."
    rate = f", {seen.updates_per_s:.3g} a second" if math.isfinite(seen.updates_per_s) else ""
    return f"Running: {seen.updates:,} updates{rate}."
