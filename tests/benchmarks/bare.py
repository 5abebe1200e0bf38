"""The loop that most people write, without a trainer: what every benchmark here is held against."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import median, rounds
from torch.utils.data import DataLoader

import workbench as wb
from workbench.train.batches import to_device

CPU = torch.device("cpu")


class Seconds(NamedTuple):
    """What a side took: its steps alone, and everything from the call to the result."""

    training: float
    whole: float


def clock(device: torch.device) -> float:
    """Return the time at which everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def optimizer_of(model: torch.nn.Module, config: wb.TrainConfig) -> torch.optim.Optimizer:
    """Return the torch optimizer that the workload's baseline names."""
    if config.optimizer == "momentum":
        return torch.optim.SGD(model.parameters(), lr=config.peak_lr, momentum=config.momentum)
    assert config.optimizer == "adam", config.optimizer
    return torch.optim.Adam(model.parameters(), lr=config.peak_lr)


def indexed(workload: wb.Workload, batch_size: int, device: torch.device = CPU) -> Iterator[Any]:
    """Yield batches of tensors by index, shuffled each epoch; of items where the data is no `TensorDataset`."""
    data = workload.train_data
    tensors = getattr(data, "tensors", None)
    if tensors is None:
        yield from loaded(workload, batch_size, device)
        return
    tensors = [t.to(device) for t in tensors]
    while True:
        order = torch.randperm(len(data), device=device)
        for start in range(0, len(data) - batch_size + 1, batch_size):
            indices = order[start : start + batch_size]
            yield [t[indices] for t in tensors]


def loaded(workload: wb.Workload, batch_size: int, device: torch.device = CPU) -> Iterator[Any]:
    """Yield batches of a `DataLoader`."""
    while True:
        loader = DataLoader(workload.train_data, batch_size, shuffle=True, drop_last=True, collate_fn=workload.collate)
        for batch in loader:
            yield to_device(batch, device)


def bare_loop(
    workload: wb.Workload,
    config: wb.TrainConfig,
    batches: Callable[..., Iterator[Any]] = indexed,
    checks: int = 0,
    device: torch.device = CPU,
) -> tuple[Seconds, float]:
    """Train the ordinary way; with `checks`, evaluate and save the model that often.

    Returns:
        What it took, and the validation loss of the last check, NaN without one.
    """
    began = clock(device)
    torch.manual_seed(0)
    model = workload.build_model().to(device)
    optimizer = optimizer_of(model, config)
    stream = batches(workload, config.batch_size, device)
    every = max(1, config.total_steps // checks) if checks else config.total_steps + 1
    value, paused = math.nan, 0.0
    start = clock(device)
    for step in range(config.total_steps):
        if checks and step % every == 0:
            before = clock(device)
            value = evaluate_and_save(workload, model, config, device)
            paused += clock(device) - before
        batch = next(stream)
        optimizer.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        optimizer.step()
    end = clock(device)
    return Seconds(end - start - paused, end - began), value


def evaluate_and_save(
    workload: wb.Workload, model: torch.nn.Module, config: wb.TrainConfig, device: torch.device = CPU
) -> float:
    """Do what a careful person does ten times a run; return the validation loss."""
    total = 0.0
    model.eval()
    with torch.no_grad():
        for loaded_batch in DataLoader(workload.validation_data, config.evaluation_batch, collate_fn=workload.collate):
            batch = to_device(loaded_batch, device)
            outputs = workload.forward(model, batch)
            losses = workload.loss(outputs, batch)
            for metric in workload.metrics.values():
                float(metric(outputs, batch).mean())
            total += float(losses.mean()) * len(losses)
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
    return total / len(workload.validation_data)


def fastest_threads(workload: wb.Workload, config: wb.TrainConfig, device: torch.device = CPU) -> int:
    """Return 1 or 2, whichever is faster for the bare loop."""
    best = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        short = config.replace(total_steps=max(20, config.total_steps // 10), eval_every_steps=None)
        sides = {"bare": lambda c=short: bare_loop(workload, c, device=device)}
        best[threads] = median(rounds(sides, count=3)["bare"])
    return min(best, key=lambda t: best[t])
