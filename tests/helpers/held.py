"""What workers and servers of a cluster hold."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import Tensor

from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.links import DataPlane
from workbench.parameter_server.servers.server import Place
from workbench.parameter_server.workers.worker import WorkerRuntime


def held(coordinator: ClusterCoordinator) -> list[int]:
    """Count datasets, iterators and other values, by the workers' indices; on Ray each worker looks for its own runtime."""
    engine = coordinator.strategy.cluster.engine
    if engine.name == "threads":
        return [_held_by(engine._tasks["worker", worker].runtime) for worker in range(engine.num_workers)]
    return coordinator.on_every_worker(_held_here)


def _held_here() -> int:
    (runtime,) = [each for each in gc.get_objects() if isinstance(each, WorkerRuntime)]
    return _held_by(runtime)


def _held_by(runtime: WorkerRuntime) -> int:
    return len(runtime._resources)


def pull(plane: DataPlane, places: Sequence[Place]) -> list[Tensor]:
    """Return copies of the values of blocks, each flat."""
    found: dict[int, Tensor] = {}
    plane.pull_into(places, lambda k, values: found.update({k: values.clone()}))
    return [found[k] for k in range(len(places))]
