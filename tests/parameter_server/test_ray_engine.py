"""What is true of the Ray engine alone: processes that are killed from outside, ways to the servers, what is left behind."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.held import pull
from workbench import __version__
from workbench.config import TrainConfig
from workbench.errors import ClusterError, UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.errors import CancelledError, ClosureInputError, UnavailableError
from workbench.parameter_server.servers.server import Place, Push
from workbench.parameter_server.strategy import ParameterServerStrategy

pytest.importorskip("ray")
from tests.helpers.killed_programs import wait_until
from tests.parameter_server.conftest import PlantedError
from workbench.parameter_server.engines import ray_task
from workbench.parameter_server.engines.ray_actors import Hello
from workbench.parameter_server.engines.ray_engine import RayEngine
from workbench.ray.cluster import NotYet

pytestmark = pytest.mark.cluster


@pytest.fixture
def engine(cluster: Cluster) -> RayEngine:
    assert isinstance(cluster.engine, RayEngine)
    return cluster.engine


@pytest.fixture(scope="module")
def cluster(ray_up: Callable[[], None]) -> Iterator[Cluster]:
    """Two workers, one server; tests may kill workers, which come back."""
    ray_up()
    with Cluster(RayEngine(2, 1, grace_s=0.3)) as made:
        yield made


class LocalError(ValueError):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> Any:
        return LocalError, (self.code, str(self))


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("planted")
        self.lock = threading.Lock()


def test_an_error_keeps_its_type_and_tells_where_it_was_raised(coordinator: ClusterCoordinator) -> None:
    """One that cannot be sent is told by its name."""

    def deep_inside() -> None:
        raise LocalError(7, "planted")

    coordinator.schedule(deep_inside)
    with pytest.raises(LocalError, match="planted") as caught:
        coordinator.join()
    assert caught.value.code == 7
    (note,) = caught.value.__notes__
    assert note.startswith("On worker ")
    assert "in deep_inside" in note

    def locked() -> None:
        raise HoldsALock

    coordinator.schedule(locked)
    with pytest.raises(RuntimeError, match="HoldsALock: planted"):
        coordinator.join()


class Unloadable:
    """As what needs a module that a worker's machine does not have."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("module_that_is_only_here",)


def test_a_dataset_that_cannot_be_loaded_on_a_worker_is_an_error(coordinator: ClusterCoordinator) -> None:
    """It once ended the coordinator's thread, and everything waited for ever."""
    iterators = iter(coordinator.create_per_worker_dataset([Unloadable()]))
    for _ in range(2):
        coordinator.schedule(next, args=(iterators,))
        with pytest.raises(ClosureInputError, match="ModuleNotFoundError: No module named 'module_that_is_only_here'"):
            coordinator.join(60)
    assert coordinator.schedule(int).fetch(60) == 0


class Noted:
    """Leaves a file where it is forgotten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __del__(self) -> None:
        (self.folder / f"{os.getpid()}-{id(self)}").touch()


def test_what_was_sent_and_is_gone_is_dropped(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """By every worker; that a function whose surroundings changed is sent again is in test_sendable.py."""
    for _ in range(8):
        noted = Noted(tmp_path)
        coordinator.schedule(lambda noted=noted: noted.folder.exists()).fetch()
    gc.collect()
    coordinator.fetch([coordinator.schedule(time.sleep, args=(0.1,)) for _ in range(6)])
    elsewhere = [path for path in tmp_path.iterdir() if not path.name.startswith(f"{os.getpid()}-")]
    assert len(elsewhere) >= 7, "the last one may still be held by this test"


def test_short_functions_travel_together(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """Each still runs once, an error stops those behind it, and what takes its time gives the others back."""
    total = strategy.variable(0.0)
    values = [coordinator.schedule(abs, args=(-k,)) for k in range(2000)]
    assert coordinator.fetch(values) == list(range(2000))
    coordinator.join()
    assert coordinator.metrics()["closures_executed"] == 2000

    def add(fails: bool) -> None:
        total.assign_add(1.0)
        if fails:
            raise PlantedError("planted")

    values = [coordinator.schedule(abs, args=(-k,)) for k in range(300)]
    with pytest.raises(PlantedError):  # noqa: PT012 - whichever comes first
        for k in range(600):
            values.append(coordinator.schedule(add, args=(k == 100,)))
        coordinator.join()
    ended, cancelled = 0, 0
    for value in values[300:]:
        try:
            value.fetch(0)
            ended += 1
        except CancelledError:
            cancelled += 1
        except PlantedError:
            ended += 1
    assert float(total) == ended
    assert coordinator.done()
    values = [coordinator.schedule(time.sleep, args=(1.0 if k == 60 else 0.0,)) for k in range(600)]
    begun = time.monotonic()
    coordinator.join()
    assert time.monotonic() - begun < 20.0
    assert all(value.done() for value in values)


def test_a_worker_that_is_killed_from_outside_comes_back_by_itself(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, engine: RayEngine
) -> None:
    """Behaviours 47, 48, 50, T10.1: its closure runs elsewhere, its dataset is built again, writes count once."""
    total = strategy.variable(0.0)
    before = engine.incarnation("worker", 0), engine._tasks["worker", 0].pid

    def draw(iterator: Iterator[int]) -> int:
        total.assign_add(1.0)
        time.sleep(0.02)
        return next(iterator)

    iterators = iter(coordinator.create_per_worker_dataset(itertools.count))
    values = [coordinator.schedule(draw, args=(iterators,)) for _ in range(60)]
    wait_until(lambda: float(total) > 5)
    os.kill(before[1], signal.SIGKILL)
    coordinator.join()
    assert len(coordinator.fetch(values)) == 60
    assert float(total) == 60.0
    wait_until(lambda: engine.check("worker", 0) is None and engine.incarnation("worker", 0) > before[0])
    assert engine._tasks["worker", 0].pid != before[1]
    assert coordinator.metrics()["worker_failures"] >= 1
    for worker in range(2):  # between two closures: they are told, not asked for what they cannot have
        os.kill(engine._tasks["worker", worker].pid, signal.SIGKILL)
    assert len(coordinator.fetch([coordinator.schedule(draw, args=(iterators,)) for _ in range(4)])) == 4


def _step(placed: Any, x: Tensor) -> float:
    with placed.step() as model:
        loss = (model(x) ** 2).mean()
        loss.backward()
    return float(loss)


@pytest.mark.parametrize("data_plane", ["shm", "plasma"])
def test_every_way_gives_the_same(ray_up: Callable[[], None], data_plane: Any) -> None:
    """Values, versions, rows, counts and errors, against a plain torch loop."""
    ray_up()
    torch.manual_seed(0)
    net = nn.Linear(30, 40)
    x = torch.randn(8, 30)
    with Cluster(RayEngine(1, 2, data_plane=data_plane)) as cluster:
        plane = cluster.engine.plane
        assert f"data plane {data_plane}: {plane.why}" in repr(cluster)
        assert ("one machine" in plane.why) == (data_plane == "shm")
        strategy = ParameterServerStrategy(cluster)
        coordinator = ClusterCoordinator(strategy)
        placed = strategy.place(net, TrainConfig(peak_lr=0.1, total_steps=100, batch_size=8, optimizer="sgd"))
        ours = [coordinator.schedule(_step, args=(placed, x)).fetch() for _ in range(5)]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        theirs = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (net(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            theirs.append(loss.item())
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert torch.allclose(placed.module().weight, net.weight, atol=1e-6)  # type: ignore[union-attr]
        held = strategy.variable(torch.arange(12.0).reshape(4, 3))
        place = held.place  # type: ignore[union-attr]
        assert plane.pull_rows([place], [torch.tensor([3, 1])], 3)[0][0].tolist() == [[9, 10, 11], [3, 4, 5]]
        values, again = pull(plane, [place, place])
        assert torch.equal(values, again)
        held.assign_add(1.0)
        assert plane.pull_into([place], lambda k, values: None) == [1]
        assert held.read()[0].tolist() == [1, 2, 3]
        report = plane.ask(place.server, "load_report")[place.block]
        assert (report["requests"], report["bytes_out"]) == (6, 24 + 4 * 48), "rows alone are sent (T3.7)"
        assert plane.push([placed.places[0]], [[torch.zeros(placed.parts[0][0].size)]], [Push(5)]) == [6]
        with pytest.raises(UsageError, match="without an optimizer"):
            plane.push([place], [[torch.zeros(12)]], [Push(1)])
        with pytest.raises(UnavailableError, match="ps 0.*holds no 'nothing'"):
            pull(plane, [Place(0, "nothing")])
        assert plane.pull_into([place], lambda k, values: None) == [1], "an error breaks nothing"
        plane.ask(place.server, "delete", place.block)
        with pytest.raises(UnavailableError, match="holds no"):
            pull(plane, [place])
        coordinator.shutdown()


def test_another_version_of_the_package_is_named(ray_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    ray_up()
    monkeypatch.setattr(ray_task, "__version__", "99.0")
    with pytest.raises(ClusterError, match=r"ps 0 runs workbench .*, and this process 99\.0: install the same"):
        RayEngine(1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_workers": 0}, "num_workers=0 must be"),
        ({"num_ps": True}, "num_ps=True must be"),
        ({"data_plane": "rpc"}, "data_plane='rpc' is not known. Allowed: 'auto', 'shm'"),
    ],
)
def test_what_is_not_allowed_is_said_before_anything_starts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RayEngine(**{"num_workers": 1, "num_ps": 1} | fields)


def test_where_there_is_no_memory_to_share_values_travel_by_calls(ray_up: Callable[[], None]) -> None:
    """A block for which there is no room is served all the same, and the plane says so."""
    import resource

    ray_up()
    with Cluster(RayEngine(1, 1)) as cluster:
        assert isinstance(cluster.engine, RayEngine)
        resource.prlimit(cluster.engine._tasks["ps", 0].pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        strategy = ParameterServerStrategy(cluster)
        large, small = strategy.variable(torch.ones(1 << 20)), strategy.variable(torch.ones(4))
        assert float(large.read().sum()) == 1 << 20
        assert large.gather(torch.tensor([3])).tolist() == [1.0]
        assert small.read().tolist() == [1, 1, 1, 1]
        assert cluster.engine.plane.name == "shm"
        assert "1 blocks of ps 0 travel by calls, because there was no memory left to share" in cluster.engine.plane.why


def test_a_worker_that_does_not_answer_is_not_back() -> None:
    """Behaviour 53: a machine that is cut off says nothing for a while; its thread takes no closure meanwhile."""
    answers: list[Any] = [NotYet("not yet")]

    def answer(call: Any, timeout_s: float) -> Any:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    there: Any = SimpleNamespace(call=lambda *_, **__: object(), answer=answer)
    task = ray_task.RayTask(there, "worker", 0, object())
    engine: Any = SimpleNamespace(_tasks={("worker", 0): task}, _closed=False)
    assert not RayEngine.wait_for_worker(engine, 0, 0.02)
    answers.append(Hello("a life", 2**22 + 1, "another machine", __version__, None))
    assert RayEngine.wait_for_worker(engine, 0, 0.02)
