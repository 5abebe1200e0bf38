"""`DataStream`: the batches of one trial, loaded and moved once however many lanes read them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.train.batches import train_batches
from workbench.train.gradients import MicroBatches
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all
from workbench.workloads.base import Workload
from workbench.workloads.items import plain_tensors

__all__ = ["DataStream"]


class DataStream:
    """Batches by step, with random state of their own: what augmentation draws depends on `per_host_seed` and rank (P7.6).

    Attributes:
        wait_s: how long the last batch took to come.
    """

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        device: torch.device,
        *,
        start_step: int = 0,
        state: Mapping[str, Tensor] | None = None,
        rank: int = 0,
        hosts: int = 1,
    ) -> None:
        self._draws = plain_tensors(workload.train_data, workload.collate) is None
        self._state: dict[str, Tensor] = {}
        if self._draws:
            with isolated_rng():
                # unlike the words that seed the model's initialisation and dropout
                seed_all(config.per_host_seed, 0, rank)
                self._state = capture_rng()
            self._state |= state or {}
        self._batches = train_batches(workload, config, device, start_step=start_step, rank=rank, hosts=hosts)
        self._ahead: deque[tuple[MicroBatches, dict[str, Tensor]]] = deque()
        self.wait_s = 0.0

    def next(self) -> MicroBatches:
        """Return the micro-batches of the next update."""
        start = time.perf_counter()
        batches, self._state = self._ahead.popleft() if self._ahead else self._draw(self._state)
        self.wait_s = time.perf_counter() - start
        return batches

    def peek(self, count: int) -> list[MicroBatches]:
        """Return the next batches without taking them: `next` will return them again."""
        while len(self._ahead) < count:
            self._ahead.append(self._draw(self._ahead[-1][1] if self._ahead else self._state))
        return [batches for batches, _ in list(self._ahead)[:count]]

    def state(self) -> dict[str, Tensor]:
        """Return the random state that the next batch begins with; empty where nothing is ever drawn."""
        return dict(self._state)

    def _draw(self, state: dict[str, Tensor]) -> tuple[MicroBatches, dict[str, Tensor]]:
        """Return the next batch of the data, drawn under `state`, and the state after it."""
        if not self._draws:
            return next(self._batches), {}
        with isolated_rng():
            restore_rng(state)
            return next(self._batches), capture_rng()
