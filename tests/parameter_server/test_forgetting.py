"""What nobody holds any more is freed by a thread that goes on, whatever happens meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.killed_programs import wait_until
from workbench.parameter_server.coordinator.dispatch import Dispatcher
from workbench.parameter_server.servers import replicas


def test_replicas_may_be_made_and_dropped_while_others_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[Any, Any] = {}

    class Cluster(str):
        """Compared, it does what another thread may do at that moment."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            held["other", "made meanwhile", len(held)] = None
            held.pop((mine, "dropped meanwhile", 0), None)
            return str.__eq__(self, other)

    mine = "mine"
    held |= {(Cluster(mine), "module", 0): None, (mine, "dropped meanwhile", 0): None, (mine, "module", 1): None}
    monkeypatch.setattr(replicas, "_REPLICAS", held)
    replicas.forget_replicas(mine)
    assert {cluster for cluster, *_ in held} == {"other"}


def test_the_servers_are_watched_on_after_something_could_not_be_freed() -> None:
    sweeps = []

    def sweep() -> None:
        sweeps.append(1)
        raise RuntimeError

    engine: Any = SimpleNamespace(num_workers=0, num_servers=0)
    dispatcher = Dispatcher(engine, max_waiting=1, sweep=sweep)
    try:
        wait_until(lambda: len(sweeps) >= 2, 10.0)
    finally:
        dispatcher.stop()
