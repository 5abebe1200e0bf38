"""One worker's part of a trial: its replica, its stream of batches, and one update (T1.2)."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.parameter_server.context import get_current_worker_index
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.replicas import ReplicaBuffers, quicken_batch_norm
from workbench.parameter_server.trials.work_time import Update
from workbench.train.batches import DataStream
from workbench.train.gradients import LoopGradients
from workbench.train.stacked_weights import LaneStack
from workbench.train.update_rules import clip_by_norm, clip_thresholds, global_norm
from workbench.workloads.base import Workload

WORKER_SEEDS = 7919
"""Apart, so that no worker shuffles as another one does under a neighbouring seed (a prime, no more)."""


class Made(NamedTuple):
    """What one closure returns: its updates, who made them, and the buffers of that replica, {} where the model has none."""

    updates: list[Update]
    worker: int
    buffers: ReplicaBuffers


GENERATORS = threading.Lock()
"""Held by who seeds the process's random generators and draws from them: workers are threads of one process, and would draw from
what another has seeded."""


class WorkerTrial:
    """Replica and batches of one worker. Worker 0 reads what training without servers reads; the others shuffle differently (T7.4).

    Args:
        start_step: updates that were made before, by all workers together.
        local: buffers and frozen parameters of the coordinator's model, by name: what is on no server; None are those of a fresh one.
    """

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        start_step: int,
        num_workers: int,
        local: Mapping[str, Tensor] | None = None,
    ) -> None:
        worker = get_current_worker_index()
        device = torch.device("cpu")
        mine = config.replace(per_host_seed=config.per_host_seed + WORKER_SEEDS * worker)
        with GENERATORS:
            self.stack = LaneStack(workload, [mine], device)
        self.stream = DataStream(workload, mine, device, start_step=start_step // num_workers)
        self.gradients = LoopGradients(workload, self.stack)
        self.thresholds = clip_thresholds([config], self.stack.values)
        pairs = list(zip(self.stack.names, self.stack.slices, strict=True))
        self.values = {name: self.stack.values[0, where] for name, where in pairs}
        self.grads = {name: self.stack.grad[0, where] for name, where in pairs}
        self.stack.models[0].train()
        quicken_batch_norm(self.stack.models[0], num_workers)
        self.updates = 0
        here = self.stack.buffers | self.stack.frozen
        for name, value in (local or {}).items():
            here[name][0].copy_(value)

    def buffers(self) -> ReplicaBuffers:
        """Return what forward passes have left in this replica: batch norm's running statistics."""
        return ReplicaBuffers(self.updates, {name: whole[0] for name, whole in self.stack.buffers.items()})


def train_steps(trial: WorkerTrial, placed: PlacedModule, count: int = 1) -> Made:
    """Make `count` updates on the worker that runs this (T13.7)."""
    updates = [_train_step(trial, placed) for _ in range(count)]
    return Made(updates, get_current_worker_index(), trial.buffers())


def _train_step(trial: WorkerTrial, placed: PlacedModule) -> Update:
    batches, at = trial.stream.next(), [time.perf_counter()]
    versions = placed.pull_into(trial.values)
    at.append(time.perf_counter())
    found, grad = trial.gradients([batches]), trial.stack.grad
    norm, clipped = global_norm(grad), False
    if trial.thresholds is not None:
        _, shortened = clip_by_norm(grad, norm, trial.thresholds, out=grad)
        clipped = bool(shortened)
    loss, se = float(found.loss), math.sqrt(float(found.squared_se))
    at.append(time.perf_counter())
    after = placed.push_flat(trial.grads, versions)
    at.append(time.perf_counter())
    trial.updates += 1
    spent = [end - begin for begin, end in itertools.pairwise(at)]
    step, staleness = after[0] - 1, after[0] - 1 - versions[0]
    return Update(
        step, get_current_worker_index(), loss, se, float(norm), clipped, staleness, trial.stream.wait_s, *spent
    )
