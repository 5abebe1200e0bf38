"""Clusters for the tests: the same bodies run on threads and on actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.cluster_pool import ClusterPool
from tests.helpers.leftovers import Leftovers
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy

HAS_RAY = importlib.util.find_spec("workbench.parameter_server.engines.ray_engine") is not None
ENGINES = [
    "threads",
    pytest.param("ray", marks=[pytest.mark.cluster, pytest.mark.skipif(not HAS_RAY, reason="no engine")]),
]

MakeCluster = Callable[..., Cluster]


class PlantedError(Exception):
    """What a user's function raises."""


def fail(message: str = "planted") -> None:
    raise PlantedError(message)


@pytest.fixture(scope="session")
def nothing_left() -> Iterator[None]:
    """When every cluster of these tests has ended, also where tests failed, nothing of them is there any more (T2.1)."""
    before = Leftovers()
    yield
    sys.last_value = sys.last_traceback = None  # pytest keeps the last failure, and with it what that test had made
    assert before.found() == []


@pytest.fixture(scope="session")
def ray_up(nothing_left: None) -> Iterator[Callable[[], None]]:
    """Starts the one Ray cluster of all tests where it is first needed: it takes seconds."""
    with contextlib.ExitStack() as started:

        def up() -> None:
            from workbench.ray.cluster import RayCluster

            started.callback(RayCluster.connect().close)

        yield functools.cache(up)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, ray_up: Callable[[], None]) -> str:
    if request.param == "ray":
        ray_up()
    return str(request.param)


@pytest.fixture(scope="session")
def standing(ray_up: Callable[[], None]) -> Iterator[dict[tuple[str, int, int], Cluster]]:
    """Clusters that no test has harmed, kept up for the next one."""
    clusters: dict[tuple[str, int, int], Cluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.shutdown()


@pytest.fixture
def cluster(engine: str, standing: dict[tuple[str, int, int], Cluster]) -> Cluster:
    """Three workers and two servers, for tests that leave them alive."""
    key = (engine, 3, 2)
    if key not in standing:
        standing[key] = create_in_process_cluster(3, 2, engine=engine)  # type: ignore[arg-type]
    return standing[key]


@pytest.fixture
def lone_cluster(engine: str, standing: dict[tuple[str, int, int], Cluster]) -> Cluster:
    """One worker and two servers, for tests of what comes out bit for bit; they leave them alive."""
    key = (engine, 1, 2)
    if key not in standing:
        standing[key] = create_in_process_cluster(1, 2, engine=engine)  # type: ignore[arg-type]
    return standing[key]


@pytest.fixture(scope="session")
def pool(ray_up: Callable[[], None]) -> Iterator[ClusterPool]:
    """Clusters that tests have harmed and given back."""
    made = ClusterPool()
    yield made
    made.close()


@pytest.fixture
def own_cluster(engine: str, pool: ClusterPool) -> Iterator[MakeCluster]:
    """Make clusters of this test alone, which may be harmed; they may have been other tests' before."""
    made: list[Cluster] = []

    def make(num_workers: int = 3, num_ps: int = 2) -> Cluster:
        made.append(pool.take(engine, num_workers, num_ps))
        return made[-1]

    yield make
    for each in made:
        pool.give_back(each)


@pytest.fixture
def strategy(cluster: Cluster) -> ParameterServerStrategy:
    return ParameterServerStrategy(cluster)


@pytest.fixture
def coordinator(strategy: ParameterServerStrategy) -> Iterator[ClusterCoordinator]:
    made = ClusterCoordinator(strategy)
    yield made
    made.shutdown()
