"""A sweep as a person runs it, the models that it is measured on, and what its record says about where the time went."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from bare import Seconds, clock

import workbench as wb
from workbench.train.hooks import Step

_numbers = itertools.count()


class Study(NamedTuple):
    """One study of ours.

    Attributes:
        seconds: the sum over the steps of its stacks, and the whole call.
        gradients: how its stacks were trained, with how many were.
        states: how many trials ended how.
    """

    seconds: Seconds
    gradients: dict[str, int]
    states: dict[str, int]


class Synchronise(wb.hooks.Hook):
    """Waits for the device at each step, so that the time of a step is not just that of its launches."""

    def on_step(self, step: Step) -> None:
        torch.cuda.synchronize(step.loss.device)


def run_study(
    workload: wb.Workload,
    lrs: Sequence[float],
    *,
    steps: int,
    gradients: str,
    device: torch.device,
    runs: Path,
) -> Study:
    """Sweep these learning rates, evaluations, checkpoints and measuring included.

    The workload is a copy each time, and what this machine remembers is empty, so that nothing is known from the study before.
    """
    number = next(_numbers)
    fresh, out = workload.replace(name=workload.name), runs / f"study-{number}"
    os.environ["WORKBENCH_CACHE"] = str(runs / f"cache-{number}")
    hooks = [Synchronise()] if device.type == "cuda" else []
    trainer = wb.Trainer(device=str(device), gradients=gradients, hooks=hooks)
    began = clock(device)
    record = wb.lr_sweep.Study(lrs=lrs, steps=steps).run(fresh, trainer, out=out)
    whole = clock(device) - began
    stacks = list(_stacks(record))
    seconds = record.steps.groupby("trial")["step_time_s"].sum()
    training = float(sum(np.nanmax(seconds.reindex(stack)) for stack in stacks))  # lanes of one stack share their steps
    how = Counter(_gradients(record.path / "trials" / str(stack[0]) / "events.jsonl") for stack in stacks)
    shutil.rmtree(out)
    return Study(Seconds(training, whole), dict(how), record.trials["state"].value_counts().to_dict())


def _stacks(record: wb.StudyRecord) -> Iterator[list[int]]:
    """Yield the trials that trained together: stacks are filled in the order of the trials."""
    trials, place = record.trials, 0
    while place < len(trials):
        count = int(trials["lanes"].iloc[place])
        yield trials["trial"].iloc[place : place + count].tolist()
        place += count


def _gradients(path: Path) -> str:
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return str([event["gradients"] for event in events if "gradients" in event][-1])


def wide_mlp() -> torch.nn.Module:
    """Return a fresh 64-128-128-10 network."""
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def load(name: str) -> wb.Workload:
    """Return the workload of a model's name."""
    if name == "digits_mlp_128":
        return wb.load_workload("digits_mlp").replace(name=name, build_model=wide_mlp)
    return wb.load_workload(name)


def learning_rates(workload: wb.Workload, lanes: int, *, diverging: bool = False) -> list[float]:
    """Return an eighth of the baseline's lr up to the lr itself, which all train; or make every second one overflow."""
    top = workload.config.peak_lr
    lrs = [top] if lanes == 1 else np.geomspace(top / 8, top, lanes).tolist()
    return [lr * 1e20 if diverging and k % 2 else lr for k, lr in enumerate(lrs)]
