"""What the trainer costs: default instruments against a bare loop over the same model, batches and optimizer.

    python tests/benchmarks/bench_trainer.py [WORKLOAD ...]

Three bare loops: over tensors that are indexed directly (the hardest to beat), the same with the ten evaluations and
checkpoints that a trial makes, and over a `DataLoader`, which is what most people write.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from bare import bare_loop, fastest_threads, indexed, loaded
from timing import machine, median, ratio, rounds
from torch.utils.data import Subset

import workbench as wb

STEPS = {"digits_mlp": 4000, "digits_cnn": 4000, "source_text": 1500}
BUDGET = {"digits_mlp": 1.15, "digits_cnn": 1.03, "source_text": 1.03}


def ours(workload: wb.Workload, config: wb.TrainConfig, runs: Path) -> None:
    """Train with the workbench, default instruments, into a folder of studies."""
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


if __name__ == "__main__":
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for chosen in sys.argv[1:] or STEPS:
            compare(chosen, Path(folder))
