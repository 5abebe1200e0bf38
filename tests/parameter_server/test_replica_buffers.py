"""Buffers of several replicas as one, and how far back their moving averages reach."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.parameter_server.servers.replicas import ReplicaBuffers, merged_buffers, quicken_batch_norm


def replica(updates: int, mean: float, variance: float, tracked: int, other: float = 0.0) -> ReplicaBuffers:
    values = {"0.running_mean": torch.full((2,), mean), "0.running_var": torch.full((2,), variance)}
    return ReplicaBuffers(
        updates, values | {"0.num_batches_tracked": torch.tensor(tracked), "codes": torch.tensor([other])}
    )


START = replica(0, 0.0, 1.0, 5).values


def test_statistics_are_those_of_the_examples_of_all_workers() -> None:
    """By the law of total variance; counters add up from where they began; the rest is that of whoever did most."""
    found = merged_buffers(START, {0: replica(1, -2.0, 1.0, 6, 7.0), 2: replica(3, 2.0, 3.0, 8, 8.0)})
    assert found["0.running_mean"].tolist() == pytest.approx([1.0] * 2)
    within, between = 0.25 * 1 + 0.75 * 3, 0.25 * 9 + 0.75 * 1
    assert found["0.running_var"].tolist() == pytest.approx([within + between] * 2)
    assert int(found["0.num_batches_tracked"]) == 5 + 1 + 3
    assert found["codes"].tolist() == [8.0]


def test_one_worker_is_itself_bit_for_bit_and_a_worker_without_updates_has_no_say() -> None:
    mine, idle = replica(3, 0.1, 0.3, 8), replica(0, 9.0, 9.0, 5)
    for replicas, expected in (({0: mine, 1: idle}, mine.values), ({0: idle}, START), ({}, START)):
        found = merged_buffers(START, replicas)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("workers", [1, 3])
def test_averages_of_replicas_lag_as_many_updates_behind_as_a_single_one(workers: int) -> None:
    """With a mean that rises by 1 an update, a moving average of momentum m lags (1 - m) / m behind."""
    layers = [nn.BatchNorm1d(1) for _ in range(workers)]
    for layer in layers:
        quicken_batch_norm(layer, workers)
    for step in range(600):
        layers[step % workers](torch.full((4, 1), float(step)))
    mean = sum(float(layer.running_mean) for layer in layers) / workers  # type: ignore[arg-type]
    m, q = 0.1, 1 - 0.9**workers
    assert 599 - mean == pytest.approx(workers * (1 - q) / q + (workers - 1) / 2, rel=1e-3)
    assert abs((599 - mean) - (1 - m) / m) < 1.0  # unquickened, three workers lag 28


def test_layers_without_a_momentum_are_left() -> None:
    layer = nn.BatchNorm1d(1, momentum=None)
    quicken_batch_norm(nn.Sequential(layer, nn.Linear(1, 1)), 3)
    assert layer.momentum is None
