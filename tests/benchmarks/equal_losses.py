"""Loss curves of one worker beside TensorFlow's, from the same initial values and the same batches.

    python tests/benchmarks/equal_losses.py --tensorflow PYTHON [--store FILE]

Two ReLU networks, three optimizers, two precisions; one update a closure, on one worker and two servers. PYTHON is an interpreter that has
tensorflow-cpu and tf_keras. `--store` writes TensorFlow's losses of the small network, against which the tests hold ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MOMENTUM = 0.875
RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": MOMENTUM},
    "nesterov": {"momentum": MOMENTUM, "nesterov": True},
}
"""Our name of an optimizer -> what TensorFlow's SGD is given."""
PRECISIONS = ("float32", "float64")


class Net(NamedTuple):
    """A network with its training; lr and momentum are the same number in every precision."""

    sizes: tuple[int, ...]
    batch: int
    steps: int
    lr: float


NETS = {"small": Net((8, 16, 4), 16, 60, 2**-4), "large": Net((1024, 512, 512, 512, 10), 32, 60, 2**-8)}


class Start(NamedTuple):
    """Weights (inputs, outputs) and biases of each layer; inputs and labels of each step."""

    weights: list[Array]
    biases: list[Array]
    x: Array
    y: Array


def start(net: Net, precision: str) -> Start:
    """Return what both begin with; float64 is the same numbers, and NumPy promises never to change what this generator draws."""
    draw = np.random.RandomState(0)
    pairs = list(itertools.pairwise(net.sizes))
    limits = [(6 / (a + b)) ** 0.5 for a, b in pairs]
    weights = [draw.uniform(-limit, limit, pair) for limit, pair in zip(limits, pairs, strict=True)]
    biases = [draw.uniform(-0.1, 0.1, b) for _, b in pairs]
    x = draw.uniform(-1.5, 1.5, (net.steps, net.batch, net.sizes[0]))
    y = (x @ draw.uniform(-1, 1, (net.sizes[0], net.sizes[-1]))).argmax(-1)
    cast = [each.astype("float32").astype(precision) for each in (*weights, *biases, x)]
    return Start(cast[: len(pairs)], cast[len(pairs) : -1], cast[-1], y)


def names() -> Iterator[tuple[str, str, str]]:
    """Return network, optimizer and precision of every curve."""
    return itertools.product(NETS, RULES, PRECISIONS)


def module(net: Net, given: Start) -> Any:
    """Return the network with these values."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for weight, bias in zip(given.weights, given.biases, strict=True):
        layer = nn.Linear(*weight.shape, dtype=torch.from_numpy(weight).dtype)
        layer.weight.data.copy_(torch.from_numpy(weight.T))
        layer.bias.data.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def scheduled_losses(cluster: Any, net: Net, rule: str, precision: str) -> list[float]:
    """Return the loss of each step of a loop of one's own on this cluster, which has one worker."""
    import torch
    from torch.nn import functional

    from workbench.config import TrainConfig
    from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
    from workbench.parameter_server.strategy import ParameterServerStrategy

    given = start(net, precision)
    strategy = ParameterServerStrategy(cluster)
    coordinator = ClusterCoordinator(strategy)
    config = TrainConfig(
        peak_lr=net.lr, total_steps=net.steps, batch_size=net.batch, optimizer=rule, momentum=MOMENTUM  # type: ignore[arg-type]
    )  # fmt: skip
    placed = strategy.place(module(net, given), config)
    batches = list(zip(torch.from_numpy(given.x), torch.from_numpy(given.y), strict=True))

    def step(placed: Any, iterator: Any) -> float:
        x, y = next(iterator)
        with placed.step() as model:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
        return float(loss.detach())

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    found = coordinator.fetch([coordinator.schedule(step, args=(placed, iterator)) for _ in batches])
    coordinator.shutdown()
    placed.delete()
    return list(found)


def tensorflow_coordinator(workers: int, servers: int) -> tuple[Any, Any, Any]:
    """Return strategy, coordinator and servers of TensorFlow's tutorial cluster in this process."""
    import tensorflow as tf

    def address() -> str:
        with socket.create_server(("127.0.0.1", 0)) as found:
            return f"127.0.0.1:{found.getsockname()[1]}"

    spec = {"worker": [address() for _ in range(workers)], "ps": [address() for _ in range(servers)]}
    cluster = tf.train.ClusterSpec(spec)
    settings = tf.compat.v1.ConfigProto()
    settings.inter_op_parallelism_threads = (
        workers + 1
    )  # the tutorial's: fewer would let its servers wait for each other
    up = [
        tf.distribute.Server(cluster, job_name=job, task_index=k, protocol="grpc", config=settings)
        for job, addresses in spec.items()
        for k in range(len(addresses))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy), up


def tensorflow_model(strategy: Any, net: Net, given: Start, rule: dict[str, Any]) -> Any:
    """Return what one replica does with inputs and labels: a step of the network with these values, and its loss."""
    import tensorflow as tf
    import tf_keras

    with strategy.scope():
        layers = [tf_keras.layers.Dense(size, activation="relu") for size in net.sizes[1:-1]]
        model = tf_keras.Sequential(
            [tf_keras.layers.InputLayer((net.sizes[0],)), *layers, tf_keras.layers.Dense(net.sizes[-1])]
        )
        model.set_weights([value for pair in zip(given.weights, given.biases, strict=True) for value in pair])
        optimizer = tf_keras.optimizers.SGD(net.lr, **rule)
        optimizer.build(model.trainable_variables)
    assert {weight.dtype.name for weight in model.trainable_variables} == {given.x.dtype.name}

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    return replica


def tensorflow_losses() -> dict[str, Any]:
    """Return every curve of TensorFlow's strategy, on one worker."""
    import tensorflow as tf
    import tf_keras

    strategy, coordinator, _servers = tensorflow_coordinator(1, 2)

    def curve(net: Net, rule: str, precision: str) -> list[float]:
        given = start(net, precision)
        tf_keras.backend.set_floatx(precision)
        replica = tensorflow_model(strategy, net, given, RULES[rule])

        @tf.function
        def step(iterator: Any) -> Any:
            return strategy.run(replica, args=next(iterator))

        data = lambda: tf.data.Dataset.from_tensor_slices((given.x, given.y)).repeat()  # noqa: E731
        iterator = iter(coordinator.create_per_worker_dataset(data))
        return [float(coordinator.schedule(step, args=(iterator,)).fetch()) for _ in range(net.steps)]

    found = {"/".join(name): curve(NETS[name[0]], *name[1:]) for name in names()}
    return {"tensorflow": tf.version.VERSION, "tf_keras": tf_keras.__version__, "losses": found}


def of_tensorflow(python: str) -> dict[str, Any]:
    """Return what an interpreter that has TensorFlow finds."""
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [python, str(Path(__file__).resolve()), "--side"]
    said = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    for line in said.stdout.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    raise RuntimeError(f"{command} ended without an answer: {said.stderr[-2000:]}")


def report(python: str, store: Path | None = None) -> None:
    """Print the largest difference of every curve."""
    from workbench.parameter_server.cluster.cluster import create_in_process_cluster

    theirs = of_tensorflow(python)
    if store is not None:
        small = {name: curve for name, curve in theirs["losses"].items() if name.startswith("small/")}
        made = {"made_by": "tests/benchmarks/equal_losses.py --store"}
        store.write_text(json.dumps(made | theirs | {"losses": small}, indent=1) + "\n")
    print("losses of one worker: first, last, largest difference from TensorFlow's")
    for engine in ("threads", "ray"):
        with create_in_process_cluster(1, 2, engine=engine) as cluster:  # type: ignore[arg-type]
            for net, rule, precision in names():
                curve = theirs["losses"][f"{net}/{rule}/{precision}"]
                found = scheduled_losses(cluster, NETS[net], rule, precision)
                difference = float(np.abs(np.subtract(found, curve)).max())
                name = f"{net}, {rule}, {precision}"
                print(f"  {engine:<8} {name:<26} {curve[0]:8.4f} {curve[-1]:8.4f}  {difference:.1e}")


def main() -> None:
    """Be one side, or print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", metavar="PYTHON")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(tensorflow_losses()), flush=True)
        os._exit(0)  # TensorFlow's servers never end by themselves
    if not options.tensorflow:
        parser.error("name an interpreter that has tensorflow-cpu and tf_keras: --tensorflow PYTHON.")
    report(options.tensorflow, options.store)


if __name__ == "__main__":
    main()
