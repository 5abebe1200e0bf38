"""The panel over a running cluster: it looks by itself, sees what was done, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.leftovers import Leftovers
from tests.helpers.panels import said
from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import create_in_process_cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.topics.parameter_server import panel as server_watch
from workbench.topics.parameter_server.panel import ServerWatch, parameter_server_panel

CONFIG = TrainConfig(peak_lr=0.1, total_steps=10_000, batch_size=1, optimizer="sgd")
FAST = {"refresh_s": 0.01, "live": True}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread, process, port or file stays; nobody waits for a look."""
    monkeypatch.setattr(server_watch, "SHARE", 1.0)
    before = Leftovers()
    yield
    assert before.found() == []


class Loop:
    """A training of one's own on two workers and two servers."""

    def __init__(self) -> None:
        self.cluster = create_in_process_cluster(2, 2)
        strategy = ParameterServerStrategy(self.cluster)
        self.coordinator = ClusterCoordinator(strategy)
        self.placed: PlacedModule = strategy.place(nn.Linear(2, 2), CONFIG)

    def train(self, updates: int) -> None:
        for _ in range(updates):
            self.coordinator.schedule(step, args=(self.placed,))
        self.coordinator.join()

    def train_past_a_late_one(self, updates: int) -> None:
        """One gradient is as old as can be, so that the picture is another one for certain."""
        done = threading.Event()

        def late(placed: PlacedModule) -> None:
            with placed.step() as module:
                assert done.wait(60)
                module(torch.ones(1, 2)).sum().backward()

        def last(placed: PlacedModule) -> None:
            step(placed)
            done.set()

        for each in (late, *[step] * (updates - 2), last):
            self.coordinator.schedule(each, args=(self.placed,))
        self.coordinator.join()


def step(placed: PlacedModule) -> None:
    with placed.step() as module:
        module(torch.ones(1, 2)).sum().backward()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.cluster.shutdown()


def watching() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "parameter server panel"]


def until(true: Callable[[], Any], within_s: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_it_follows_the_training_by_itself(loop: Loop) -> None:
    loop.train(40)
    panel = parameter_server_panel(loop.coordinator, loop.placed, **FAST)
    assert said(panel).startswith("Running: 40 updates.")
    before = panel.picture.value
    loop.train_past_a_late_one(60)
    until(lambda: "Running: 100 updates" in said(panel))
    until(lambda: panel.picture.value != before)
    assert "updates old on average" in said(panel)
    panel.close()
    assert watching() == []


def test_it_ends_with_the_cluster() -> None:
    loop = Loop()
    loop.train(40)
    panel = parameter_server_panel(loop.coordinator, loop.placed, **FAST)
    (thread,) = watching()
    loop.cluster.shutdown()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert said(panel).startswith("Ended; after 40 updates was the last look.")
    assert "<svg" in panel.picture.value


def test_a_server_that_is_away_is_told_and_waited_for(loop: Loop) -> None:
    loop.train(40)
    seen: list[Any] = []
    watch = ServerWatch(loop.coordinator, loop.placed, seen.append, 0.01)
    counted = watch.last.audit.facts["parameter_server"]["0"]
    lags = [count for server in counted["staleness_steps"] for count in server.values()]
    assert sum(lags) == 40 * len(loop.placed.places)
    loop.cluster.engine.kill("ps", 1)
    assert watch.last.updates == counted["steps"] == 40
    look = watch.look()
    assert look.trouble
    assert look.running
    assert look.updates == 40, "what was seen before stays"


def test_it_rests_so_long_that_looking_costs_a_small_share_of_a_core(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look of 0.1 s at 2 % is followed by 5 s of rest, a quick one by what was asked for."""
    monkeypatch.setattr(server_watch, "SHARE", 0.02)
    times, rests = iter([0.0, 0.1, 3.0, 3.01, 4.0, 4.0]), []
    watch = ServerWatch(loop.coordinator, loop.placed, lambda _: None, 1.0)
    seen = watch.look()
    looks = iter([seen, seen, replace(seen, running=False)])
    monkeypatch.setattr(server_watch, "time", SimpleNamespace(thread_time=lambda: next(times)))
    monkeypatch.setattr(watch, "look", lambda: next(looks))
    monkeypatch.setattr(watch, "_ended", SimpleNamespace(wait=rests.append))
    watch._watch()
    assert rests == pytest.approx([1.0, 5.0, 1.0])
