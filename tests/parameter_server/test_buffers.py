"""Buffers of several workers as those of one model."""

from __future__ import annotations

import torch

from workbench.parameter_server.buffers import merge_buffers


def state(mean: float, variance: float, count: int) -> dict[str, torch.Tensor]:
    return {
        "0.running_mean": torch.tensor([mean]),
        "0.running_var": torch.tensor([variance]),
        "0.num_batches_tracked": torch.tensor(count),
        "table": torch.tensor([float(count)]),
    }


def test_variances_grow_by_the_spread_of_the_means() -> None:
    """Means -3, -1, 1, 3 with variance 1: 1 within and 5 between."""
    merged = merge_buffers([state(m, 1.0, 5) for m in (-3.0, -1.0, 1.0, 3.0)], [5] * 4)
    assert merged["0.running_mean"].tolist() == [0.0]
    assert merged["0.running_var"].tolist() == [6.0]


def test_workers_count_by_their_updates_and_idle_ones_do_not() -> None:
    merged = merge_buffers([state(0.0, 1.0, 1), state(4.0, 1.0, 3), state(99.0, 99.0, 0)], [1, 3, 0])
    assert merged["0.running_mean"].tolist() == [3.0]
    assert merged["0.running_var"].tolist() == [1.0 + 3.0]
    assert int(merged["0.num_batches_tracked"]) == 3
    assert merged["table"].tolist() == [3.0]


def test_one_workers_buffers_keep_their_bits() -> None:
    mine = state(0.1, 0.3, 7)
    merged = merge_buffers([state(5.0, 5.0, 0), mine], [0, 7])
    assert all(torch.equal(merged[name], mine[name]) for name in mine)
    assert merged["table"] is not mine["table"]
