"""Workers and servers that die: who notices, what is done again, what is told (behaviours 47 to 65, T10, T11)."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.killed_programs import sigkill, wait_until
from tests.parameter_server.conftest import MakeCluster, PlantedError, fail
from workbench.config import TrainConfig
from workbench.errors import CheckpointError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.context import check_cancelled, get_current_worker_index
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator, merge_buffers
from workbench.parameter_server.coordinator.dispatch import HEALTH_S
from workbench.parameter_server.errors import CancelledError, ClosureInputError, GivenUpError, UnavailableError
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager

STEPS, EPOCHS = 10, 3
CONFIG = TrainConfig(peak_lr=0.01, total_steps=100, batch_size=1, optimizer="adam")


Up = Callable[..., tuple[Cluster, ParameterServerStrategy, ClusterCoordinator]]


@pytest.fixture
def up(own_cluster: MakeCluster) -> Iterator[Up]:
    made = []

    def start(workers: int = 3, servers: int = 2, **settings: Any) -> Any:
        cluster = own_cluster(workers, servers)
        strategy = ParameterServerStrategy(cluster, **settings)
        made.append(ClusterCoordinator(strategy))
        return cluster, strategy, made[-1]

    yield start
    for coordinator in made:
        coordinator.shutdown()


def wait_a_while(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        check_cancelled()
        time.sleep(0.01)


def slow_add(total: Any, started: Any = None, seconds: float = 0.3) -> int:
    """Say that it began, take a while, then add one; a second run says so again but must not add again."""
    if started is not None:
        started.assign_add(1.0)
    wait_a_while(seconds)
    total.assign_add(1.0)
    return get_current_worker_index()


def step(placed: PlacedModule, seconds: float = 0.0) -> None:
    with placed.step() as module:
        module(torch.ones(1, 5)).sum().backward()
    time.sleep(seconds)


def test_a_worker_that_was_started_anew_while_idle_makes_its_datasets_again(up: Up) -> None:
    """Behaviours 47, 50, 58, 60, T7.7: nobody was there to see it die; what it lost is made before it is used."""
    cluster, strategy, coordinator = up(1, 1)
    total, built = strategy.variable(0.0), strategy.variable(0.0)

    def source() -> list[int]:
        built.assign_add(1.0)
        return [1, 2, 3]

    batches = iter(coordinator.create_per_worker_dataset(source))
    count = coordinator.per_worker(lambda: torch.tensor(5.0))
    for number in range(3):
        if number:
            cluster.engine.kill("worker", 0)
            found = cluster.engine.check("worker", 0)
            if cluster.engine.name == "threads":  # others start them again at once
                assert isinstance(found, UnavailableError)
                assert (found.job, found.index) == ("worker", 0)
            cluster.engine.restart("worker", 0)
            assert [float(each) for each in coordinator.on_every_worker(torch.clone, [count])] == [5.0]
        assert [coordinator.schedule(next, args=(batches,)).fetch() for _ in range(2)] == [1, 2]
        assert float(built) == number + 1
        coordinator.schedule(lambda: total.assign_add(1.0))
        coordinator.join()
    assert float(total) == 3.0
    assert cluster.engine.check("worker", 0) is None


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_worker_that_dies_inside_a_closure(up: Up, exactly_once: bool) -> None:
    """Behaviour 48, T6.3, T6.4: it runs elsewhere; writes and gradients count once, or at least once where that was asked for."""
    cluster, strategy, coordinator = up(2, 2, exactly_once=exactly_once)
    total, where = strategy.variable(0.0), strategy.variable(-1.0)
    placed = strategy.place(nn.Linear(5, 4), CONFIG)

    def work() -> int:
        step(placed)
        total.assign_add(1.0)
        where.assign(float(get_current_worker_index()))
        wait_a_while(0.5)
        return get_current_worker_index()

    value = coordinator.schedule(work)
    wait_until(lambda: float(where) >= 0)
    first = int(float(where))
    cluster.engine.kill("worker", first)
    coordinator.join()
    cluster.engine.restart("worker", first)
    assert value.fetch() in (0, 1)
    assert (float(total), placed.steps) == ((1.0, 1) if exactly_once else (2.0, 2))
    assert coordinator.metrics()["worker_failures"] == 1


def test_writes_count_once_however_many_there_are(up: Up, engine: str) -> None:
    """Behaviour 48, T6.4: thousands of writes of a function whose worker dies, and one write of another that as many came after."""
    many = 5000 if engine == "threads" else 500  # the servers count alike; each of them travels between processes
    cluster, strategy, coordinator = up(2, 1)
    total, other, done = strategy.variable(0.0), strategy.variable(0.0), strategy.variable([-1.0, -1.0])

    def work(which: int, writes: int) -> None:
        for _ in range(writes):
            total.assign_add(1.0)
        if float(done[which]) < 0:
            done.assign_add([get_current_worker_index() + 1.0 if k == which else 0.0 for k in range(2)])
            wait_a_while(60.0)

    coordinator.schedule(work, args=(0, 1))
    wait_until(lambda: float(done[0]) >= 0)
    for _ in range(many // 100):
        coordinator.schedule(lambda: [total.assign_add(1.0) and None for _ in range(100)])
    coordinator.schedule(lambda: other.assign_add(1.0))
    coordinator.schedule(work, args=(1, many))
    wait_until(lambda: float(done[1]) >= 0, 120.0)
    assert (float(total), float(other)) == (2 * many + 1, 1)
    for which in range(2):
        cluster.engine.kill("worker", int(float(done[which])))
        cluster.engine.restart("worker", int(float(done[which])))
    coordinator.join(120.0)
    assert (float(total), float(other)) == (2 * many + 1, 1)
    assert coordinator.metrics()["worker_failures"] == 2


HARMED: list[Cluster] = []  # whose worker a function ends on the thread engine; what is imported takes no cluster along


def cut_off() -> None:
    here = get_current_worker_index()
    HARMED[-1].engine.kill("worker", here)
    threading.Timer(0.05, HARMED[-1].engine.restart, ("worker", here)).start()
    check_cancelled()


def test_a_function_that_ends_every_worker_is_given_up_and_named(up: Up, engine: str) -> None:
    """Others that were sent with it are not blamed, the cluster is usable afterwards, and a dataset's function is no better."""
    cluster, strategy, _ = up(2, 1)
    coordinator = ClusterCoordinator(ParameterServerStrategy(cluster), max_attempts=2)
    total = strategy.variable(0.0)

    HARMED.append(cluster)
    end = partial(os._exit, 1) if engine == "ray" else cut_off
    values = [coordinator.schedule(lambda: total.assign_add(1.0) and None) for _ in range(5)]
    coordinator.schedule(end)
    with pytest.raises(GivenUpError, match=r"(_exit|cut_off).* was given up: 2 workers died .*max_attempts") as told:
        coordinator.join(60.0)
    assert set(told.value.workers) <= {0, 1}
    assert [value.fetch() for value in values] == [None] * 5
    assert float(total) == 5.0
    with pytest.raises(GivenUpError):
        coordinator.on_every_worker(end)
    batches = iter(coordinator.create_per_worker_dataset(end))
    coordinator.schedule(next, args=(batches,))
    with pytest.raises(ClosureInputError, match="GivenUpError"):
        coordinator.join(60.0)
    del batches
    coordinator.schedule(lambda: total.assign_add(1.0) and None)
    coordinator.join(60.0)
    assert float(total) == 6.0
    coordinator.shutdown()


LEFT: list[int] = []


def counts_then_ends_its_worker(total: Any) -> int:
    here = get_current_worker_index()
    total.assign_add(1.0)
    if not LEFT:
        LEFT.append(here)
        HARMED[-1].engine.kill("worker", here)
    return here


def test_a_worker_that_dies_before_its_result_is_copied(up: Up, engine: str) -> None:
    """T11.2: the function came to its end, nobody has its value, so another worker runs it."""
    if engine != "threads":
        pytest.skip("a worker cannot end another engine's worker")
    cluster, strategy, coordinator = up(2, 1)
    HARMED.append(cluster)
    total = strategy.variable(0.0)
    assert coordinator.schedule(counts_then_ends_its_worker, args=(total,)).fetch() == 1 - LEFT[0]
    assert float(total) == 1.0
    cluster.engine.restart("worker", LEFT[0])


def test_the_users_error_is_told_not_the_workers(up: Up) -> None:
    """Behaviours 49, 53; the others go on while the worker is still away."""
    cluster, strategy, coordinator = up()
    total, started = strategy.variable(0.0), strategy.variable(0.0)
    long = coordinator.schedule(slow_add, args=(total, started, 20.0))
    wait_until(lambda: float(started) == 1)
    cluster.engine.kill("worker", 1)
    coordinator.schedule(fail)
    with pytest.raises(PlantedError):
        coordinator.join()
    with pytest.raises(CancelledError):
        long.fetch(0)
    coordinator.fetch([coordinator.schedule(slow_add, args=(total, None, 0.0)) for _ in range(3)])
    assert float(total) == 3.0
    cluster.engine.restart("worker", 1)


def test_all_workers_die_at_once_and_again(up: Up) -> None:
    """Behaviours 51, 52."""
    cluster, strategy, coordinator = up(2, 1)
    total = strategy.variable(0.0)
    for _ in range(10):
        coordinator.schedule(slow_add, args=(total, None, 0.05))
    for victims in ((0, 1), (0,)):
        time.sleep(0.06)
        for worker in victims:
            cluster.engine.kill("worker", worker)
        time.sleep(0.05)
        for worker in victims:
            cluster.engine.restart("worker", worker)
    coordinator.join()
    assert float(total) == 10.0


def test_what_was_computed_stays_when_the_worker_dies(up: Up) -> None:
    """Behaviours 54, 55, T11.1: fetched before, and for the first time after; reading a variable never fails."""
    cluster, strategy, coordinator = up(2, 1)
    held = strategy.variable(torch.arange(3.0))
    before, after = (coordinator.schedule(lambda: torch.ones(3)) for _ in range(2))
    coordinator.join()
    assert before.fetch().tolist() == [1, 1, 1]
    for worker in range(2):
        cluster.engine.kill("worker", worker)
    for _ in range(20):
        assert held.read().tolist() == [0, 1, 2]
    for value in (before, after):
        assert value.fetch(0).tolist() == [1, 1, 1]
    for worker in range(2):
        cluster.engine.restart("worker", worker)


def test_a_server_that_hesitates_is_asked_again(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviours 56, 57: three times in ten minutes, where it is healthy; the fourth time counts, and names the job that failed."""
    cluster, strategy, coordinator = up(1, 1)
    calls = strategy.variable(0.0)

    def hesitates(times: float) -> float:
        calls.assign_add(1.0)
        if float(calls) <= times:
            raise UnavailableError("ps", 0, "planted time-out")
        return float(calls)

    strategy.exactly_once = False
    calls.exactly_once = False
    assert coordinator.schedule(hesitates, args=(3.0,)).fetch() == 4.0
    monkeypatch.setattr("workbench.parameter_server.coordinator.dispatch.TRANSIENT_S", 0.0)
    calls.assign(0.0)
    assert coordinator.schedule(hesitates, args=(20.0,)).fetch() == 21.0
    monkeypatch.setattr("workbench.parameter_server.coordinator.dispatch.TRANSIENT_S", 600.0)
    calls.assign(0.0)
    coordinator.schedule(hesitates, args=(4.0,))
    with pytest.raises(UnavailableError, match=r"ps 0 does not answer: planted time-out.*checkpoint"):
        coordinator.join()
    assert "worker 3 does not answer: its process is gone. Its closure is put back" in str(
        UnavailableError("worker", 3)
    )
    assert cluster.engine.check("ps", 0) is None


@pytest.mark.slow
def test_many_closures_wait_for_the_only_worker(up: Up) -> None:
    """Behaviour 59."""
    cluster, _, coordinator = up(1, 1)
    values = [coordinator.schedule(lambda k: k, args=(k,)) for k in range(5000)]
    cluster.engine.kill("worker", 0)
    time.sleep(3.0)
    cluster.engine.restart("worker", 0)
    coordinator.join()
    assert values[-1].fetch() == 4999


@pytest.mark.parametrize(("call", "seed"), [("join", 0), ("schedule", 1)])
def test_a_dead_server_is_told_within_two_seconds_and_its_run_goes_on(
    up: Up, tmp_path: Path, call: str, seed: int
) -> None:
    """Behaviours 61, 62, 65, T10.2, T10.4: killed at a random moment; from the checkpoint the run comes to as many steps as were asked for."""
    dice = random.Random(seed)
    cluster, strategy, coordinator = up(2, 2)
    placed = strategy.place(nn.Linear(5, 4), CONFIG)
    for _ in range(STEPS):
        coordinator.schedule(step, args=(placed,))
    coordinator.join()
    CheckpointManager(placed, tmp_path).save(epoch=1)
    for _ in range(20_000):
        coordinator.schedule(step, args=(placed, 0.002))
    until, victim, looks = STEPS + dice.randint(1, 50), dice.randrange(2), []
    wait_until(lambda: placed.steps >= until, 60.0)
    time.sleep(dice.uniform(0.0, 0.05))
    check, before = cluster.engine.check, cluster.engine.incarnation("ps", victim)

    def counted(job: Any, index: int) -> UnavailableError | None:
        if (job, index, threading.current_thread().name) == ("ps", victim, "health of the servers"):
            looks.append(time.monotonic())
        return check(job, index)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cluster.engine, "check", counted)
        sigkill(cluster.engine, "ps", victim)
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=f"ps {victim}") as raised:  # noqa: PT012
            if call == "join":
                coordinator.join()
            while True:
                coordinator.schedule(int)
                time.sleep(0.005)
        told_s = time.monotonic() - begun
    print(f"told after {told_s:.2f} s, {len(looks)} looks")  # pytest -rP shows it
    assert (raised.value.job, raised.value.index) == ("ps", victim)
    assert len(looks) <= 2.0 / HEALTH_S, "as often as the coordinator looks in 2 s, whatever else the machine does"
    assert told_s < 15.0
    coordinator.shutdown()

    cluster.engine.restart("ps", victim)
    wait_until(
        lambda: cluster.engine.check("ps", victim) is None and cluster.engine.incarnation("ps", victim) != before, 120.0
    )
    strategy = ParameterServerStrategy(cluster)
    coordinator = ClusterCoordinator(strategy)
    placed = strategy.place(nn.Linear(5, 4), CONFIG)
    manager = CheckpointManager(placed, tmp_path)
    restored = manager.restore()
    assert restored is not None
    assert (restored.epoch, placed.steps) == (1, STEPS)
    for epoch in range(placed.steps // STEPS, EPOCHS):
        for _ in range(STEPS):
            coordinator.schedule(step, args=(placed,))
        coordinator.join()
        manager.save(epoch=epoch + 1)
    assert placed.steps == EPOCHS * STEPS
    coordinator.shutdown()


def test_a_loop_of_ones_own_survives_its_servers(up: Up, engine: str, tmp_path: Path) -> None:
    """T14.6: one server dies and then the other, and the same coordinator goes on from the checkpoint, each update counted once."""
    cluster, strategy, coordinator = up(2, 2)
    module = nn.Sequential(nn.Embedding(50_000, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    placed, epochs = strategy.place(module, CONFIG, embeddings="sgd"), strategy.variable(0)
    batches = iter(coordinator.create_per_worker_dataset(lambda: itertools.repeat(torch.arange(8))))
    manager = CheckpointManager(placed, tmp_path, variables={"epochs": epochs})
    with pytest.raises(CheckpointError, match="no checkpoint"):
        manager.recover(coordinator)
    manager.save(steps=0)

    def train(placed: PlacedModule, batches: Any) -> None:
        with placed.step() as module:
            (module(next(batches)) * torch.arange(8.0)[:, None]).sum().backward()
        time.sleep(0.005)

    deaths, epoch, before = {1: 0, 3: 1}, 0, placed.state_dict()["parameters"]
    told: list[tuple[str, int]] = []
    while epoch < 5:
        try:
            for _ in range(20):
                coordinator.schedule(train, args=(placed, batches))
            if epoch in deaths:
                victim = deaths.pop(epoch)
                sigkill(cluster.engine, "ps", victim)
                if engine == "threads":
                    threading.Timer(0.5, cluster.engine.restart, ["ps", victim]).start()
            coordinator.join()
            epochs.assign_add(1)
            merge_buffers(coordinator, placed)
            manager.save()
            epoch += 1
        except UnavailableError as error:
            told.append((error.job, error.index))
            assert manager.recover(coordinator).steps == 20 * epoch
    assert told == [("ps", 0), ("ps", 1)]
    assert (placed.steps, float(epochs)) == (100, 5)
    after = placed.state_dict()["parameters"]
    rows = (after["0.weight"] != before["0.weight"]).any(1)
    assert rows[:8].all()
    assert not rows[8:].any(), "the rows that no batch had are those of the checkpoint"


def test_a_server_dies_while_a_worker_is_away(up: Up) -> None:
    """Behaviour 63: the server's death is what is told."""
    cluster, strategy, coordinator = up(1, 1)
    total = strategy.variable(0.0)
    cluster.engine.kill("worker", 0)
    coordinator.schedule(slow_add, args=(total, None, 0.0))
    time.sleep(0.05)
    cluster.engine.kill("ps", 0)
    with pytest.raises(UnavailableError, match="ps 0"):
        coordinator.join(timeout_s=20.0)


@pytest.mark.parametrize("asked", ["scheduled", "on every worker", ""])
def test_a_server_that_came_back_empty_is_told_too(up: Up, asked: str) -> None:
    """Behaviour 64: not silently zero, also where nothing is scheduled and `done` alone says so."""
    cluster, strategy, coordinator = up(2, 1)
    total = strategy.variable(5.0)
    before = cluster.engine.incarnation("ps", 0)
    cluster.engine.kill("ps", 0)
    cluster.engine.restart("ps", 0)
    wait_until(lambda: cluster.engine.incarnation("ps", 0) != before)
    if asked == "on every worker":  # who asks so is told, and who schedules all the same
        with pytest.raises(UnavailableError, match="ps 0"):
            coordinator.on_every_worker(float, [total])
    with pytest.raises(UnavailableError, match="ps 0"):  # noqa: PT012 - whichever comes first
        if asked == "scheduled":
            coordinator.schedule(slow_add, args=(total, None, 0.0))
            coordinator.join(timeout_s=20.0)
        wait_until(lambda: not coordinator.done())


def test_a_servers_death_is_told_once_and_what_needed_it_does_not_run_again(up: Up, engine: str) -> None:
    """T12.3, behaviour 64: the closure sees it first, and the watch over the servers does not tell it again."""
    if engine != "threads":
        pytest.skip("another engine starts servers again by itself, at a moment of its own")
    cluster, strategy, coordinator = up(1, 2, exactly_once=False)
    lost, runs = strategy.variable(0.0), strategy.variable(0.0)

    def needs_it() -> None:
        runs.assign_add(1.0)
        lost.assign_add(1.0)

    cluster.engine.kill("ps", 0)
    cluster.engine.restart("ps", 0)
    coordinator.schedule(needs_it)
    with pytest.raises(UnavailableError, match="ps 0"):
        coordinator.join(timeout_s=20.0)
    assert float(runs) == 1.0
    time.sleep(3 * HEALTH_S)
    assert coordinator.done()


def test_no_thread_is_left(own_cluster: MakeCluster, engine: str) -> None:
    if engine != "threads":
        pytest.skip("another engine has threads of its own")
    before = set(threading.enumerate())
    cluster = own_cluster()
    for job in ("worker", "ps"):
        cluster.engine.restart(job, 0)  # type: ignore[arg-type]
        assert cluster.engine.incarnation(job, 0) == 0, "what lives is not started anew"  # type: ignore[arg-type]
    coordinator = ClusterCoordinator(ParameterServerStrategy(cluster))
    coordinator.schedule(int)
    coordinator.schedule(fail)
    with pytest.raises(PlantedError):
        coordinator.join()
    coordinator.shutdown()
    cluster.shutdown()
    assert set(threading.enumerate()) <= before
