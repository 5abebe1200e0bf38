"""How trials are dealt out: as few chunks as keep every worker busy, because lanes that train together cost less."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from workbench.config import TrainConfig
from workbench.train.lane_groups import SHARED

__all__ = ["plan_chunks"]


def plan_chunks(configs: Sequence[TrainConfig], workers: int) -> list[list[int]]:
    """Return positions in `configs`, chunk by chunk, the most work first.

    A chunk holds trials that can train as lanes of one stack on one stream of data. Neighbours go to different chunks:
    in a sweep those with the highest learning rates end early, and their workers would stand idle.

    Args:
        configs: of the trials to train.
        workers: how many chunks can train at once.
    """
    groups: dict[Hashable, list[int]] = {}
    for position, config in enumerate(configs):
        key = (config.per_host_seed, *(getattr(config, name) for name in SHARED))
        groups.setdefault(key, []).append(position)
    lanes = math.ceil(len(configs) / max(1, workers))
    chunks: list[list[int]] = []
    for group in groups.values():
        count = math.ceil(len(group) / lanes)
        chunks += [group[first::count] for first in range(count)]
    return sorted(chunks, key=lambda chunk: -sum(_cost(configs[position]) for position in chunk))


def _cost(config: TrainConfig) -> int:
    return config.total_steps * config.batch_size
