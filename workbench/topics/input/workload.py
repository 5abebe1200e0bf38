"""The input pipeline of a workload as the trainer runs it: its loader, and its step (P1.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from workbench.config import TrainConfig
from workbench.topics.input.audit import default_device
from workbench.topics.input.collect import Budget, Stepping, collect_input
from workbench.train.batches import to_device, train_batches
from workbench.train.forward import autocast, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.lane_stack import LaneStack
from workbench.train.rng import isolated_rng
from workbench.train.update_rules import make_updater
from workbench.train.user_code_errors import explained
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order, plain_tensors

__all__ = ["collect_workload_input", "training_loader", "training_step"]


def collect_workload_input(
    workload: Workload, config: TrainConfig, device: torch.device, budget: Budget
) -> dict[str, Any]:
    """Return JSON facts for `diagnose_input_pipeline`, of a workload as it would be trained.

    Args:
        workload: whose data and model.
        config: how it would be trained.
        device: where.
        budget: how long to look.

    Raises:
        WorkloadError: data, model or loss raised.
    """
    with isolated_rng():
        return collect_input(training_loader(workload, config), training_step(workload, config, device), budget)


def training_loader(workload: Workload, config: TrainConfig) -> Any:
    """Return a loader like the trainer's: a `DataLoader`, or, for tensors in memory, what gathers its batches."""
    data, micro = workload.train_data, config.batch_size // config.accumulate_steps
    if workload.num_workers == 0 and plain_tensors(data, workload.collate) is not None:
        return _Gathered(workload, config)
    settings: dict[str, Any] = {"batch_size": micro, "drop_last": True, "collate_fn": workload.collate}
    if in_its_own_order(data):
        workers = min(1, workload.num_workers)
    else:
        workers = workload.num_workers
        settings |= {"shuffle": True, "generator": torch.Generator().manual_seed(config.per_host_seed)}
    return DataLoader(data, num_workers=workers, persistent_workers=workers > 0, **settings)


class _Gathered:
    """The trainer's own batches of tensors that are in memory.

    Attributes:
        batch_size: examples of each.
    """

    def __init__(self, workload: Workload, config: TrainConfig) -> None:
        self.batch_size = config.batch_size // config.accumulate_steps
        self.workload, self.config = workload, config.replace(accumulate_steps=1, batch_size=self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for batches in train_batches(self.workload, self.config, torch.device("cpu")):
            yield batches[0][0]


def training_step(workload: Workload, config: TrainConfig, device: torch.device) -> Stepping:
    """Return the trainer's step on a model of its own: forward, loss, gradient and update of one batch.

    The learning rate is 0, so that what is timed for long does not diverge; it costs the same.
    """
    stack = LaneStack(workload, [config], device)
    model = stack.models[0]
    model.train()
    gradients = LoopGradients(workload, stack)
    updater = make_updater([config], stack.values, stack.parameters)
    micro = config.batch_size // config.accumulate_steps
    lr = torch.zeros((1, 1), dtype=stack.values.dtype, device=device)
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(config.precision or "")
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        with explained(workload, f"at step {count}"):
            gradients([[(to_device(batch, device, dtype), micro)]])
        stack.values.sub_(updater.update(stack.values, stack.grad, lr, count, [0.0]))
        count += 1

    def read(batch: Any) -> None:
        with torch.no_grad(), autocast(device, config.precision), explained(workload, "at the first batch"):
            outputs, _, _ = per_example(workload, model, batch, micro)
            for metric in workload.metrics.values():
                metric(outputs, batch)

    return Stepping(
        kind="workload", step=step, device=default_device(), read=read,
        prepare=lambda batch: to_device(batch, device, dtype),
    )  # fmt: skip
