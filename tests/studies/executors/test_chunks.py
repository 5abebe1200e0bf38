"""Every trial is in one chunk, chunks hold what can train together, and nobody stands idle."""

from __future__ import annotations

import pytest

from workbench.config import TrainConfig
from workbench.studies.executors.on_ray import plan_chunks

CONFIG = TrainConfig(peak_lr=0.1, total_steps=100, batch_size=8)


def lanes(count: int, **changes: object) -> list[TrainConfig]:
    return [CONFIG.replace(peak_lr=0.001 * 2**k, **changes) for k in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32, 33])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 100])
def test_every_trial_is_in_one_chunk_and_no_worker_gets_two(count: int, workers: int) -> None:
    chunks = plan_chunks(lanes(count), workers)
    assert sorted(position for chunk in chunks for position in chunk) == list(range(count))
    assert len(chunks) == min(count, workers, len(chunks))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-count // workers), "as long as the slowest worker must be"


def test_neighbours_are_dealt_apart() -> None:
    assert plan_chunks(lanes(6), 2) == [[0, 2, 4], [1, 3, 5]]


def test_a_chunk_has_one_stream_of_data_and_one_size_of_batch() -> None:
    configs = [*lanes(3), *lanes(3, batch_size=16), *lanes(2, per_host_seed=5)]
    for chunk in plan_chunks(configs, 2):
        assert len({(configs[p].batch_size, configs[p].per_host_seed) for p in chunk}) == 1


def test_the_longest_chunk_is_first() -> None:
    configs = [*lanes(1), *lanes(1, total_steps=5000), *lanes(1, batch_size=16)]
    assert plan_chunks(configs, 3) == [[1], [2], [0]]


def test_nothing_to_train_is_no_chunk() -> None:
    assert plan_chunks([], 4) == []
