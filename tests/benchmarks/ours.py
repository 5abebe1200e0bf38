"""A sweep as a person runs it, and what its record says about where the time went."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bare import Seconds, clock

import workbench as wb
from workbench.train.hooks import Step

_numbers = itertools.count()
UNSAID = {"event", "state", "step", "pid", "ray_node"}


class Study(NamedTuple):
    """One study of ours.

    Attributes:
        seconds: the sum over the steps of its stacks, and the whole call.
        arrangement: how its trials were trained, in words.
        states: how many trials ended how.
    """

    seconds: Seconds
    arrangement: str
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
    executor: str = "local",
    address: str | None = None,
) -> Study:
    """Sweep these learning rates, ledger, evaluations, checkpoints and measuring included.

    The workload is a copy each time, and what this machine remembers is empty, so that nothing is known from the study before.
    """
    number = next(_numbers)
    fresh, out = workload.replace(name=workload.name), runs / f"study-{number}"
    os.environ["WORKBENCH_CACHE"] = str(runs / f"cache-{number}")
    hooks = [Synchronise()] if device.type == "cuda" else []
    trainer = wb.Trainer(device=str(device), gradients=gradients, hooks=hooks)
    began = clock(device)
    record = wb.lr_sweep.Study(lrs=lrs, steps=steps).run(fresh, trainer, executor, out, address=address)
    whole = clock(device) - began
    study = Study(
        Seconds(training_seconds(record), whole), arrangement(record), record.trials["state"].value_counts().to_dict()
    )
    shutil.rmtree(out)
    return study


def training_seconds(record: wb.StudyRecord) -> float:
    """Return the sum over the steps of the longest lane of each stack: lanes of one stack share their steps."""
    seconds = record.steps.groupby("trial")["step_time_s"].sum()
    return float(sum(np.nanmax(seconds.reindex(stack)) for stack in stacks(record)))


def stacks(record: wb.StudyRecord) -> Iterator[list[int]]:
    """Yield the trials that trained together: stacks are filled in the order of the trials."""
    trials = record.trials
    place = 0
    while place < len(trials):
        count = int(trials["lanes"].iloc[place])
        yield trials["trial"].iloc[place : place + count].tolist()
        place += count


def arrangement(record: wb.StudyRecord) -> str:
    """Return the ways that the stacks were trained in, with how many did so."""
    ways: dict[str, int] = {}
    for stack in stacks(record):
        way = _way(record.path / "trials" / str(stack[0]) / "events.jsonl")
        ways[way] = ways.get(way, 0) + 1
    return "; ".join(f"{count} x ({way})" if count > 1 else way for way, count in ways.items())


def _way(path: Path) -> str:
    """Return what the last event that names a way says of it."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = [event for event in events if "gradients" in event][-1]
    return ", ".join(f"{key} {_text(value)}" for key, value in last.items() if key not in UNSAID)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(v)}" for key, v in value.items()) + "}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
