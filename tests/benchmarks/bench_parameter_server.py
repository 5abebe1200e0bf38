"""A parameter-server step beside TensorFlow's and beside one process without servers, in interleaved rounds.

    python tests/benchmarks/bench_parameter_server.py [--rounds 5] [--seconds 4] [--tensorflow PYTHON]

An MLP 1024-512-512-512-10 of 1,055,242 parameters, batch 32, SGD, three workers, two servers. Each side is a process of its own that
does nothing while another is measured. PYTHON is an interpreter that has tensorflow-cpu and tf_keras; without it that side is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from equal_losses import NETS, module, start, tensorflow_coordinator, tensorflow_model

WORKERS, SERVERS = 3, 2
NET = NETS["large"]._replace(steps=1, lr=0.01)
SEVERAL = 10
LOOKED_UP, ROWS, WIDTH = 64, 1_000_000, 8

Measure = Callable[[float], dict[str, float]]


def per_second(seconds: float, work: Callable[[], int]) -> float:
    """Return how many per second `work` gets done, which returns how many it did."""
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        done += work()
    return done / (time.perf_counter() - begun)


def coordinated(
    coordinator: Any, step: Any, several: Any, nothing: Any, args: tuple[Any, ...], raw: Callable[[], object] | None = None
) -> Measure:  # fmt: skip
    """Measure either coordinator: both have the same methods; `raw` is a call without any."""

    def burst(function: Callable[..., Any], given: tuple[Any, ...], count: int) -> int:
        for _ in range(count):
            coordinator.schedule(function, args=given)
        coordinator.join()
        return count

    def measure(seconds: float) -> dict[str, float]:
        found = {
            "steps/s, 1 a closure": per_second(seconds, lambda: burst(step, args, 30)),
            f"steps/s, {SEVERAL} a closure": per_second(seconds, lambda: SEVERAL * burst(several, args, 2 * WORKERS)),
            "empty closures/s": per_second(seconds / 2, lambda: burst(nothing, (), 300)),
        }
        calls: dict[str, Callable[[], object]] = {
            "schedule to fetch, ms": lambda: coordinator.schedule(nothing).fetch()
        }
        if raw is not None:
            calls["Ray's raw call, ms"] = raw
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(300):  # in turn, so that what else the machine does falls on both
            for name, call in calls.items():
                begun = time.perf_counter()
                call()
                took[name].append(1e3 * (time.perf_counter() - begun))
        found |= {name: median(each) for name, each in took.items()}
        if raw is not None:
            found["schedule to fetch / raw call"] = found["schedule to fetch, ms"] / found["Ray's raw call, ms"]
        return found

    burst(step, args, 30)
    burst(several, args, 2 * WORKERS)
    return measure


def batch() -> tuple[Any, Any]:
    import torch

    given = start(NET, "float32")
    return torch.from_numpy(given.x[0]), torch.from_numpy(given.y[0])


def batches() -> Iterator[tuple[Any, Any]]:
    return itertools.repeat(batch())


def ours(plane: str) -> Iterator[Measure]:
    """Actors of a Ray cluster on this machine."""
    import ray
    import torch
    from torch.nn import functional

    from workbench.config import TrainConfig
    from workbench.parameter_server.cluster.cluster import Cluster
    from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
    from workbench.parameter_server.engines.ray_engine import RayEngine
    from workbench.parameter_server.strategy import ParameterServerStrategy

    def step(placed: Any, iterator: Any) -> Any:
        x, y = next(iterator)
        with placed.step() as model:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
        return loss

    def several(placed: Any, iterator: Any) -> Any:
        for _ in range(SEVERAL):
            loss = step(placed, iterator)
        return loss

    engine = RayEngine(WORKERS, SERVERS, data_plane=plane)  # type: ignore[arg-type]
    with Cluster(engine) as cluster:
        strategy = ParameterServerStrategy(cluster)
        coordinator = ClusterCoordinator(strategy)
        config = TrainConfig(peak_lr=NET.lr, total_steps=1_000_000, batch_size=NET.batch, optimizer="sgd")
        placed = strategy.place(module(NET, start(NET, "float32")), config)
        iterator = iter(coordinator.create_per_worker_dataset(batches))
        actors = itertools.cycle([ray.remote(Empty).options(num_cpus=0).remote() for _ in range(WORKERS)])
        raw = lambda: ray.get(next(actors).nothing.remote())  # noqa: E731
        measure = coordinated(coordinator, step, several, Empty.nothing, (placed, iterator), raw)
        table = strategy.variable(torch.zeros(ROWS, WIDTH), name="table")
        rows = torch.randint(ROWS, (LOOKED_UP,))

        def moved() -> int:
            (shard,) = table.variables
            report = engine.plane.ask(shard.server, "load_report")[shard.name]
            return int(report["bytes_in"] + report["bytes_out"])

        def with_lookup(seconds: float) -> dict[str, float]:
            before = moved()
            coordinator.schedule(table.gather, args=(rows,)).fetch()
            share = (moved() - before) / (LOOKED_UP * WIDTH * 4)
            return measure(seconds) | {"looked up, bytes moved / bytes of the rows": share}

        yield with_lookup
        coordinator.shutdown()


class Empty:
    """What an actor holds that does nothing."""

    def nothing(self: Any = None) -> None:
        """Do nothing."""


def alone() -> Iterator[Measure]:
    """One process, no server, at the better of one thread and as many as there are processors."""
    import torch
    from torch.nn import functional

    model, (x, y) = module(NET, start(NET, "float32")), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=NET.lr)

    def step() -> int:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        return 1

    def measure(seconds: float) -> dict[str, float]:
        found = []
        for threads in (1, len(os.sched_getaffinity(0))):
            torch.set_num_threads(threads)
            step()
            found.append(per_second(seconds / 2, step))
        return {"steps/s, 1 a closure": max(found)}

    yield measure


def tensorflow() -> Iterator[Measure]:
    """The tutorial's cluster in one process."""
    import tensorflow as tf

    strategy, coordinator, _servers = tensorflow_coordinator(WORKERS, SERVERS)
    replica = tensorflow_model(strategy, NET, start(NET, "float32"), {})
    given = start(NET, "float32")  # without torch, which this interpreter need not have
    x, y = given.x[0], given.y[0]
    iterator = iter(coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.from_tensors((x, y)).repeat()))

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica, args=next(iterator))

    @tf.function
    def several(iterator: Any) -> Any:
        loss = 0.0
        for _ in tf.range(SEVERAL):
            loss = strategy.run(replica, args=next(iterator))
        return loss

    @tf.function
    def nothing() -> Any:
        return tf.constant(0)

    yield coordinated(coordinator, step, several, nothing, (iterator,))


SIDES: dict[str, Callable[[], Iterator[Measure]]] = {
    "ours": lambda: ours("auto"),
    "ours, plasma": lambda: ours("plasma"),
    "alone": alone,
    "TensorFlow": tensorflow,
}


class Side:
    """A side in its own process."""

    def __init__(self, python: str, name: str) -> None:
        quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [python, str(Path(__file__).resolve()), "--side", name]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process: Any = subprocess.Popen(
            command, env=quiet, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        self._line("ready")

    def measure(self, seconds: float) -> dict[str, float]:
        """Return what it measures."""
        print(seconds, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._line("{"))
        return found

    def end(self) -> None:
        """Let it end by itself; TensorFlow's does not always."""
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _line(self, begins: str) -> str:
        for line in self._process.stdout:
            if line.startswith(begins):
                return str(line)
        self._said.seek(0)
        raise RuntimeError(f"{self._process.args} ended before its answer: {self._said.read()[-2000:]}")


def main() -> None:
    """Be one side, or print medians, and the ratios of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tensorflow", metavar="PYTHON")
    parser.add_argument("--sides", nargs="+", default=["ours", "alone"], choices=list(SIDES))
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        for measure in SIDES[options.side]():
            print("ready", flush=True)
            for line in sys.stdin:
                print(json.dumps(measure(float(line))), flush=True)
        return
    from timing import interval, machine, ratio

    print(machine())
    names = [*options.sides, *(["TensorFlow"] if options.tensorflow else [])]
    sides: dict[str, Side] = {}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    try:
        for name in names:
            sides[name] = Side(options.tensorflow if name == "TensorFlow" else sys.executable, name)
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                for key, value in sides[name].measure(options.seconds).items():
                    found[name].setdefault(key, []).append(value)
    finally:
        for side in sides.values():
            side.end()
    for key in dict.fromkeys(key for each in found.values() for key in each):
        print(key)
        against = found.get("TensorFlow", {}).get(key)
        for name in [name for name in names if key in found[name]]:
            beside = f"   / TensorFlow {ratio(found[name][key], against)}" if against else ""
            low, high = interval(found[name][key])
            print(f"  {name:<14} {median(found[name][key]):10.2f} ({low:.2f} to {high:.2f}){beside}")


if __name__ == "__main__":
    main()
