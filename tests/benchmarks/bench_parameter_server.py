"""A parameter-server step beside TensorFlow's and beside one process without servers, in interleaved rounds.

    python tests/benchmarks/bench_parameter_server.py [--rounds 5] [--seconds 4] [--tensorflow PYTHON [--losses]]

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
from typing import Any

WORKERS, SERVERS = 3, 2
SIZES = (1024, 512, 512, 512, 10)
BATCH = 32
LR = 0.01
WARMING = 30
LOOKED_UP, ROWS, WIDTH = 64, 1_000_000, 8

Measure = Callable[[float], dict[str, float]]


def for_seconds(seconds: float, work: Callable[[], int]) -> float:
    """Return how many per second `work` gets done, which returns how many it did."""
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        done += work()
    return done / (time.perf_counter() - begun)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def coordinated(
    coordinator: Any,
    step: Callable[..., Any],
    several: Callable[..., Any],
    nothing: Any,
    args: tuple[Any, ...],
    raw: Callable[[], object] | None = None,
) -> Measure:
    """Measure either coordinator: both have the same methods; `raw` is a call without any."""

    def burst(function: Callable[..., Any], given: tuple[Any, ...], count: int) -> int:
        for _ in range(count):
            coordinator.schedule(function, args=given)
        coordinator.join()
        return count

    def latency() -> None:
        coordinator.schedule(nothing).fetch()

    def measure(seconds: float) -> dict[str, float]:
        found = {
            "steps/s, 1 a closure": for_seconds(seconds, lambda: burst(step, args, WARMING)),
            "steps/s, 10 a closure": for_seconds(seconds, lambda: 10 * burst(several, args, 2 * WORKERS)),
            "empty closures/s": for_seconds(seconds / 2, lambda: burst(nothing, (), 300)),
        }
        seen: dict[str, list[float]] = {"schedule to fetch, ms": []} | (
            {} if raw is None else {"Ray's raw call, ms": []}
        )
        for _ in range(300):  # in turn, so that what else the machine does falls on both
            for times, work in zip(seen.values(), (latency, raw), strict=False):
                times.append(timed(work))
        found |= {name: 1e3 * sorted(times)[len(times) // 2] for name, times in seen.items()}
        if raw is not None:
            found["schedule to fetch / Ray's raw call"] = found["schedule to fetch, ms"] / found["Ray's raw call, ms"]
        return found

    burst(step, args, WARMING)
    burst(several, args, 2 * WORKERS)
    return measure


def module() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(SIZES):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, SIZES[0], generator=generator)
    return x, torch.randint(SIZES[-1], (BATCH,), generator=generator)


def batches() -> Iterator[tuple[Any, Any]]:
    given = batch()
    while True:
        yield given


def ours(plane: str) -> Iterator[Measure]:
    """Actors of a Ray cluster on this machine."""
    import torch
    from torch.nn import functional

    from workbench.config import TrainConfig
    from workbench.parameter_server.cluster.cluster import Cluster
    from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
    from workbench.parameter_server.engines.ray_engine import RayEngine
    from workbench.parameter_server.strategy import ParameterServerStrategy

    engine = RayEngine(WORKERS, SERVERS, cluster="benchmark", data_plane=plane)  # type: ignore[arg-type]
    with Cluster(engine, "benchmark") as cluster:
        strategy = ParameterServerStrategy(cluster)
        coordinator = ClusterCoordinator(strategy)
        placed = strategy.place(
            module(), TrainConfig(peak_lr=LR, total_steps=1_000_000, batch_size=BATCH, optimizer="sgd")
        )
        iterator = next(iter([iter(coordinator.create_per_worker_dataset(batches))]))

        def step(placed: Any, iterator: Any) -> Any:
            x, y = next(iterator)
            with placed.step() as model:
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
            return loss

        def several(placed: Any, iterator: Any) -> Any:
            for _ in range(10):
                loss = step(placed, iterator)
            return loss

        def nothing() -> None:
            return None

        measure = coordinated(coordinator, step, several, nothing, (placed, iterator), raw_call())
        table = strategy.variable(torch.zeros(ROWS, WIDTH), name="table")
        rows = torch.randint(ROWS, (LOOKED_UP,))

        def with_lookup(seconds: float) -> dict[str, float]:
            before = moved()
            coordinator.schedule(table.gather, args=(rows,)).fetch()
            return measure(seconds) | {
                "looked up, bytes moved / bytes of the rows": (moved() - before) / (LOOKED_UP * WIDTH * 4)
            }

        def moved() -> int:
            (shard,) = table.variables
            report = engine.plane.ask(shard.server, "load_report")[shard.name]
            return int(report["bytes_in"] + report["bytes_out"])

        yield with_lookup
        coordinator.shutdown()


class Empty:
    """What an actor holds that does nothing."""

    def nothing(self) -> None:
        """Do nothing."""


def raw_call() -> Callable[[], object]:
    """Return a call of an actor that does nothing, past everything of ours."""
    import ray

    actors = itertools.cycle([ray.remote(Empty).options(num_cpus=0).remote() for _ in range(WORKERS)])
    return lambda: ray.get(next(actors).nothing.remote())


def alone() -> Iterator[Measure]:
    """One process, no server, at the better of one thread and as many as there are processors."""
    import torch
    from torch.nn import functional

    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = batch()

    def steps() -> int:
        for _ in range(WARMING):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return WARMING

    def measure(seconds: float) -> dict[str, float]:
        found = []
        for threads in (1, len(os.sched_getaffinity(0))):
            torch.set_num_threads(threads)
            steps()
            found.append(for_seconds(seconds / 2, steps))
        return {"steps/s, 1 a closure": max(found)}

    yield measure


def tensorflow() -> Iterator[Measure]:
    """The tutorial's cluster in one process."""
    import socket

    import numpy as np
    import tensorflow as tf
    import tf_keras

    def port() -> int:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return int(found.getsockname()[1])

    spec = {
        "worker": [f"127.0.0.1:{port()}" for _ in range(WORKERS)],
        "ps": [f"127.0.0.1:{port()}" for _ in range(SERVERS)],
    }
    cluster = tf.train.ClusterSpec(spec)
    settings = tf.compat.v1.ConfigProto()
    settings.inter_op_parallelism_threads = (
        WORKERS + 1
    )  # the tutorial's: fewer would let its servers wait for each other
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=k, protocol="grpc", config=settings)
        for job, addresses in spec.items()
        for k in range(len(addresses))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        layers = [tf_keras.layers.Dense(size, activation="relu") for size in SIZES[1:-1]]
        model = tf_keras.Sequential(
            [tf_keras.layers.InputLayer((SIZES[0],)), *layers, tf_keras.layers.Dense(SIZES[-1])]
        )
        optimizer = tf_keras.optimizers.SGD(LR)
        optimizer.build(model.trainable_variables)
    generator = np.random.default_rng(1)
    x = generator.standard_normal((BATCH, SIZES[0]), dtype=np.float32)
    y = generator.integers(SIZES[-1], size=BATCH)

    def dataset() -> Any:
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def replica(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    def one(iterator: Any) -> Any:
        return strategy.run(replica, args=next(iterator))

    @tf.function
    def step(iterator: Any) -> Any:
        return one(iterator)

    @tf.function
    def several(iterator: Any) -> Any:
        loss = 0.0
        for _ in tf.range(10):
            loss = one(iterator)
        return loss

    @tf.function
    def nothing() -> Any:
        return tf.constant(0)

    yield coordinated(coordinator, step, several, nothing, (iterator,))
    del servers


SIDES: dict[str, Callable[[], Iterator[Measure]]] = {
    "ours": lambda: ours("auto"),
    "ours, plasma": lambda: ours("plasma"),
    "alone": alone,
    "TensorFlow": tensorflow,
}


def serve(side: str) -> None:
    """Be one side: measure for as many seconds as each line of the input says, until there are no more."""
    for measure in SIDES[side]():
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(float(line))), flush=True)


class Side:
    """A side in its own process."""

    def __init__(self, python: str, name: str) -> None:
        quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [python, str(Path(__file__).resolve()), "--side", name]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command, env=quiet, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        self._line("ready")

    def measure(self, seconds: float) -> dict[str, float]:
        """Return what it measures."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._line("{"))
        return found

    def end(self) -> None:
        """Let it end by itself; TensorFlow's does not always."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _line(self, begins: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begins):
                return line
        self._said.seek(0)
        raise RuntimeError(f"{self._process.args} ended before its answer: {self._said.read()[-2000:]}")


def main() -> None:
    """Print medians, and the ratios of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tensorflow", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--sides", nargs="+", default=["ours", "alone", "TensorFlow"], choices=list(SIDES))
    parser.add_argument(
        "--losses", action="store_true", help="hold loss curves against TensorFlow's, too: equal_losses.py"
    )
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side)
        return
    from timing import machine, median, ratio

    print(machine())
    names = list(options.sides)
    if "TensorFlow" in names and not has_tensorflow(options.tensorflow):
        print(
            f"TensorFlow is left out: {options.tensorflow} has no tensorflow-cpu and tf_keras; name one by --tensorflow."
        )
        names.remove("TensorFlow")
    sides = {}
    try:
        for name in names:
            sides[name] = Side(options.tensorflow if name == "TensorFlow" else sys.executable, name)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                for key, value in sides[name].measure(options.seconds).items():
                    found[name].setdefault(key, []).append(value)
    finally:
        for side in sides.values():
            side.end()
    for key in dict.fromkeys(key for each in found.values() for key in each):
        print(key)
        for name in names:
            if key in found[name]:
                against = found.get("TensorFlow", {}).get(key)
                beside = (
                    f"   / TensorFlow {ratio(found[name][key], against)}" if against and name != "TensorFlow" else ""
                )
                print(f"  {name:<14} {median(found[name][key]):10.2f}{beside}")
    if options.losses and "TensorFlow" in names:
        from equal_losses import report

        report(options.tensorflow)


def has_tensorflow(python: str) -> bool:
    """Return whether an interpreter has both packages."""
    look = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('tensorflow', 'tf_keras'))))"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


if __name__ == "__main__":
    main()
