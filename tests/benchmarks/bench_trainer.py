"""What the trainer costs: default instruments against a bare loop over the same model, batches and optimizer.

    python tests/benchmarks/bench_trainer.py [WORKLOAD ...]

Three bare loops: over tensors that are indexed directly (the hardest to beat), the same with the ten evaluations and
checkpoints that a trial makes, and over a `DataLoader`, which is what most people write.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import machine, median, ratio, rounds
from torch.utils.data import DataLoader, Subset

import workbench as wb

CPU = torch.device("cpu")
STEPS = {"digits_mlp": 4000, "digits_cnn": 4000, "source_text": 1500}
BUDGET = {"digits_mlp": 1.15, "digits_cnn": 1.03, "source_text": 1.03}


def optimizer_of(model: torch.nn.Module, config: wb.TrainConfig) -> torch.optim.Optimizer:
    """Return the torch optimizer that the workload's baseline names."""
    if config.optimizer == "momentum":
        return torch.optim.SGD(model.parameters(), lr=config.peak_lr, momentum=config.momentum)
    assert config.optimizer == "adam", config.optimizer
    return torch.optim.Adam(model.parameters(), lr=config.peak_lr)


def indexed(workload: wb.Workload, batch_size: int) -> Iterator[Any]:
    """Yield batches of tensors by index, shuffled each epoch; of items where the data is no `TensorDataset`."""
    data = workload.train_data
    tensors = getattr(data, "tensors", None)
    if tensors is None:
        yield from loaded(workload, batch_size)
        return
    while True:
        order = torch.randperm(len(data))
        for start in range(0, len(data) - batch_size + 1, batch_size):
            indices = order[start : start + batch_size]
            yield [t[indices] for t in tensors]


def loaded(workload: wb.Workload, batch_size: int) -> Iterator[Any]:
    """Yield batches of a `DataLoader`."""
    while True:
        yield from DataLoader(
            workload.train_data, batch_size, shuffle=True, drop_last=True, collate_fn=workload.collate
        )


def bare_loop(
    workload: wb.Workload, config: wb.TrainConfig, batches: Callable[..., Iterator[Any]], checks: int
) -> None:
    """Train the ordinary way; with `checks`, evaluate and save the model that often."""
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = optimizer_of(model, config)
    stream = batches(workload, config.batch_size)
    for step in range(config.total_steps):
        if checks and step % (config.total_steps // checks) == 0:
            evaluate_and_save(workload, model, config)
        batch = next(stream)
        optimizer.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        optimizer.step()


def evaluate_and_save(workload: wb.Workload, model: torch.nn.Module, config: wb.TrainConfig) -> None:
    """Do what a careful person does ten times a run."""
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(workload.validation_data, config.evaluation_batch, collate_fn=workload.collate):
            outputs = workload.forward(model, batch)
            for value in (workload.loss(outputs, batch), *(m(outputs, batch) for m in workload.metrics.values())):
                float(value.mean())
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")


def ours(workload: wb.Workload, config: wb.TrainConfig, runs: Path) -> None:
    """Train with the workbench, default instruments, into a folder of studies that has its ledger already."""
    wb.Trainer(device="cpu").run(workload, config, out=runs / f"run-{len(list(runs.iterdir()))}")


def compare(name: str, runs: Path) -> None:
    """Print one table row per way of counting.

    "steps" has eight validation examples, evaluated at the start and at the end: the loop, its records and its start.
    "whole" evaluates the whole split and saves a checkpoint ten times.
    """
    workload = wb.load_workload(name)
    few = workload.replace(validation_data=Subset(workload.validation_data, range(8)))
    steps = STEPS[name]
    whole = workload.config.replace(total_steps=steps)
    alone = whole.replace(eval_every_steps=steps, checkpoint_every_steps=steps)
    threads = fastest_threads(workload, alone)
    torch.set_num_threads(threads)
    seconds = rounds(
        {
            "bare": lambda: bare_loop(workload, alone, indexed, 0),
            "bare with DataLoader": lambda: bare_loop(workload, alone, loaded, 0),
            "bare with checks": lambda: bare_loop(workload, whole, indexed, 10),
            "ours, steps": lambda: ours(few, alone, runs),
            "ours, whole": lambda: ours(workload, whole, runs),
        },
        count=5,
    )
    print(f"{name}: {steps} steps, {threads} thread(s), bare {1e3 * median(seconds['bare']) / steps:.3f} ms a step")
    for mine, theirs in (
        ("ours, steps", "bare"),
        ("ours, steps", "bare with DataLoader"),
        ("ours, whole", "bare with checks"),
        ("ours, whole", "bare"),
    ):
        print(f"  {mine} / {theirs:<22} {ratio(seconds[mine], seconds[theirs])}   budget of steps {BUDGET[name]}")


def fastest_threads(workload: wb.Workload, config: wb.TrainConfig) -> int:
    """Return 1 or 2, whichever is faster for the bare loop."""
    best = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        short = config.replace(total_steps=max(20, config.total_steps // 10), eval_every_steps=None)
        best[threads] = median(rounds({"bare": lambda c=short: bare_loop(workload, c, indexed, 0)}, count=3)["bare"])
    return min(best, key=lambda t: best[t])


if __name__ == "__main__":
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for chosen in sys.argv[1:] or STEPS:
            compare(chosen, Path(folder))
