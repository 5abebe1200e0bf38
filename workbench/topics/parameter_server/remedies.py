"""Remedies for uneven or useless load, each tried in a small loop on a cluster that is up and measured there (T11.3, T13.3, T13.4)."""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import RemoteTensor
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.load import load_facts


def measure_remedies(cluster: Cluster) -> dict[str, Any]:
    """Return facts on three remedies, before and after, on one cluster with nothing on its servers: lr, vocabulary, return_values."""
    return {
        "lr": {"before": lr_load(cluster, True), "after": lr_load(cluster, False)},
        "vocabulary": {
            "before": vocabulary_load(cluster, shuffled=None),
            "after": [vocabulary_load(cluster, shuffled=seed) for seed in range(3)],
        },
        "return_values": return_values(cluster),
    }


@contextlib.contextmanager
def _loop(cluster: Cluster) -> Iterator[tuple[ParameterServerStrategy, ClusterCoordinator]]:
    """Hand out what a loop needs, variables in a shard a server, and empty the servers afterwards."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(cluster.num_ps))
    coordinator = ClusterCoordinator(strategy)
    yield strategy, coordinator
    coordinator.shutdown()
    plane = cluster.engine.plane
    for server in range(cluster.num_ps):
        for block in plane.ask(server, "load_report"):
            plane.ask(server, "delete", block)


def _seconds(coordinator: ClusterCoordinator, calls: list[Callable[[], Any]]) -> float:
    """Schedule the functions, and return how long they took."""
    begun = time.perf_counter()
    for call in calls:
        coordinator.schedule(call)
    coordinator.join()
    return time.perf_counter() - begun


def lr_load(cluster: Cluster, as_variable: bool, *, steps: int = 60) -> dict[str, Any]:
    """Train a small net whose learning rate is a variable that every step reads, or a schedule that each server works out (T13.3)."""
    config = TrainConfig(peak_lr=0.01, total_steps=steps, batch_size=8, optimizer="sgd", schedule="cosine")
    with _loop(cluster) as (strategy, coordinator):
        placed = strategy.place(nn.Linear(16, 16), config)
        lr = strategy.variable(0.01, name="lr") if as_variable else None
        seconds = _seconds(coordinator, [partial(_step, placed, lr)] * steps)
        return load_facts(coordinator, placed, seconds=seconds)


def _step(placed: PlacedModule, lr: RemoteTensor | None) -> None:
    with placed.step() as module:
        scale = 1.0 if lr is None else float(lr) / 0.01
        (scale * module(torch.ones(8, 16)).square().mean()).backward()


def zipf_shares(words: int) -> Tensor:
    """Return how often each word of a vocabulary occurs, the most frequent first: proportional to 1 / rank."""
    weights = 1 / torch.arange(1, words + 1, dtype=torch.float64)
    return weights / weights.sum()


def vocabulary_load(
    cluster: Cluster, *, shuffled: int | None, words: int = 5000, lookups: int = 40, batch: int = 256
) -> dict[str, Any]:
    """Look up rows of an embedding that has a shard on each server, by ids that follow Zipf's law (T13.4)."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.multinomial(zipf_shares(words), lookups * batch, True, generator=generator)
    order = torch.arange(words)
    if shuffled is not None:
        order = torch.randperm(words, generator=generator.manual_seed(shuffled + 1))
    with _loop(cluster) as (strategy, coordinator):
        table = strategy.variable(torch.zeros(words, 16), name="words")
        ids = order[ranks].view(lookups, batch)
        seconds = _seconds(coordinator, [partial(table.gather, each) for each in ids])
        return load_facts(coordinator, seconds=seconds)


def return_values(cluster: Cluster, *, values: int = 250_000, closures: int = 40, rounds: int = 5) -> dict[str, Any]:
    """Time functions that return a tensor of `values` numbers against the same ones that return nothing, in turn (T11.3, T13.8)."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with _loop(cluster) as (_, coordinator):
        for _round in range(rounds + 1):
            for returns in (True, False):
                seconds[returns].append(_seconds(coordinator, [partial(_ones, values, returns)] * closures) / closures)
    # the first round warms up
    return {"values": values, "with_s": median(seconds[True][1:]), "without_s": median(seconds[False][1:])}


def _ones(values: int, returns: bool) -> Tensor | None:
    made = torch.ones(values)
    return made if returns else None
