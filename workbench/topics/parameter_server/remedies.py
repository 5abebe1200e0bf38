"""Remedies for uneven or useless load, each tried in a small loop on a cluster of its own and measured there (T11.3, T13.3, T13.4)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.partitioners import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import RemoteTensor, Variable
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.trials.load import load_facts

Engine = Literal["threads", "ray"]


def measure_remedies(*, engine: Engine = "threads") -> dict[str, Any]:
    """Return facts on three remedies, before and after, on one cluster: lr, vocabulary, return_values."""
    with create_in_process_cluster(2, 2, engine=engine) as cluster:
        return {
            "lr": {"before": lr_load(True, cluster=cluster), "after": lr_load(False, cluster=cluster)},
            "vocabulary": {
                "before": vocabulary_load(shuffled=None, cluster=cluster),
                "after": [vocabulary_load(shuffled=seed, cluster=cluster) for seed in range(3)],
            },
            "return_values": return_values(cluster=cluster),
        }


@contextlib.contextmanager
def _up(cluster: Cluster | None, workers: int, servers: int) -> Iterator[Cluster]:
    """Hand out the cluster that is up, and empty its servers afterwards, or one of threads for this loop alone."""
    if cluster is None:
        with create_in_process_cluster(workers, servers) as own:
            yield own
        return
    yield cluster
    plane = cluster.engine.plane
    for server in range(cluster.num_ps):
        for block in plane.ask(server, "load_report"):
            plane.ask(server, "delete", block)


def lr_load(as_variable: bool, *, steps: int = 60, cluster: Cluster | None = None) -> dict[str, Any]:
    """Train a small net whose learning rate is a variable that every step reads, or a schedule that each server works out (T13.3).

    Args:
        as_variable: which of the two.
        steps: updates.
        cluster: that is up, with nothing on its two servers; None is one of two workers in this process.

    Returns:
        Facts for `diagnose_parameter_server`.
    """
    with _up(cluster, 2, 2) as there:
        strategy = ParameterServerStrategy(there, variable_partitioner=FixedShardsPartitioner(2))
        coordinator = ClusterCoordinator(strategy)
        net = nn.Linear(16, 16)
        placed = strategy.place(
            net, TrainConfig(peak_lr=0.01, total_steps=steps, batch_size=8, optimizer="sgd", schedule="cosine")
        )
        lr = strategy.variable(0.01, name="lr") if as_variable else None
        begun = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(_step, args=(placed, lr))
        coordinator.join()
        found = load_facts(coordinator, placed, seconds=time.perf_counter() - begun)
        coordinator.shutdown()
    return found


def _step(placed: PlacedModule, lr: Variable | None) -> None:
    with placed.step() as module:
        scale = 1.0 if lr is None else float(lr) / 0.01
        (scale * module(torch.ones(8, 16)).square().mean()).backward()


def zipf_shares(words: int, exponent: float = 1.0) -> Tensor:
    """Return how often each word of a vocabulary occurs, the most frequent first: proportional to 1 / rank^exponent."""
    weights = torch.arange(1, words + 1, dtype=torch.float64) ** -exponent
    return weights / weights.sum()


def vocabulary_load(
    *,
    shuffled: int | None,
    words: int = 5000,
    lookups: int = 40,
    batch: int = 256,
    exponent: float = 1.0,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Look up rows of an embedding that is split over the servers, by ids that follow Zipf's law (T13.4).

    Args:
        shuffled: seed of the order in which words get their ids; None is the order of their frequencies.
        lookups: closures, each of one batch.
        batch: ids.
        cluster: that is up, with nothing on its servers, each of which gets a shard; None is one of two and two in this process.

    Returns:
        Facts for `diagnose_parameter_server`.
    """
    ranks = torch.multinomial(
        zipf_shares(words, exponent), lookups * batch, True, generator=torch.Generator().manual_seed(0)
    )
    order = (
        torch.arange(words)
        if shuffled is None
        else torch.randperm(words, generator=torch.Generator().manual_seed(shuffled + 1))
    )
    with _up(cluster, 2, 2) as there:
        strategy = ParameterServerStrategy(there, variable_partitioner=FixedShardsPartitioner(there.num_ps))
        coordinator = ClusterCoordinator(strategy)
        table = strategy.variable(torch.zeros(words, 16), name="words")
        begun = time.perf_counter()
        for ids in order[ranks].view(lookups, batch):
            coordinator.schedule(_look_up, args=(table, ids))
        coordinator.join()
        found = load_facts(coordinator, seconds=time.perf_counter() - begun)
        coordinator.shutdown()
    return found


def _look_up(table: RemoteTensor, ids: Tensor) -> None:
    table.gather(ids)


def return_values(
    *, values: int = 250_000, closures: int = 40, rounds: int = 5, cluster: Cluster | None = None
) -> dict[str, Any]:
    """Time functions that return a tensor against the same ones that return nothing (T11.3, T13.8).

    Args:
        values: float32 numbers that are returned.
        rounds: of each kind, in turn.
        cluster: that is up; None is one of two workers in this process.

    Returns:
        values, with_s and without_s: medians of the seconds of a closure.
    """
    with _up(cluster, 2, 1) as there:
        coordinator = ClusterCoordinator(ParameterServerStrategy(there))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):
            for returns in (True, False):
                begun = time.perf_counter()
                for _ in range(closures):
                    coordinator.schedule(partial(_made, values, returns))
                coordinator.join()
                if number:  # the first round warms up
                    seconds[returns].append((time.perf_counter() - begun) / closures)
        coordinator.shutdown()
    return {"values": values, "with_s": median(seconds[True]), "without_s": median(seconds[False])}


def _made(values: int, returns: bool) -> Tensor | None:
    made = torch.ones(values)
    return made if returns else None
