"""`measure_evaluation`: the seconds that one evaluation takes, as a start and a price per example (P3.1)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.train.batches import eval_batches
from workbench.train.evaluation import eval_mode
from workbench.train.forward import autocast, per_example
from workbench.train.rng import isolated_rng
from workbench.train.user_code_errors import explained
from workbench.workloads.base import Workload
from workbench.workloads.subsets import draw_sample

__all__ = ["measure_evaluation"]


def measure_evaluation(
    workload: Workload,
    model: nn.Module,
    *,
    split: str = "validation",
    batch_size: int,
    device: torch.device,
    precision: str | None = None,
    rounds: int = 5,
    batches: int = 4,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return what an evaluation of a sample costs: loading, moving and computing.

    Each round evaluates the same few batches, drawn at random, because a sample is read item by item even where the full
    set is one tensor. The first round warms up and is left out.

    Args:
        workload: what is evaluated.
        model: on `device`.
        split: whose examples.
        batch_size: of an evaluation.
        device: where to compute.
        precision: of the config.
        rounds: that are timed.
        batches: of a round.
        clock: tells the time in seconds.

    Returns:
        seconds_per_example (median over the batches behind the first one; over the first ones where a round is one
        batch), start_s (what the first batch takes beyond that: worker processes, mostly), batch_size, batches (timed), rounds.

    Raises:
        DataError: the split has no index to draw by.
    """
    data = workload.data(split)
    few = draw_sample(data, min(len(data), batches * batch_size), seed=0).data
    part = workload.replace(**{f"{split}_data": few})
    timed: list[list[tuple[float, int]]] = []
    with torch.no_grad(), isolated_rng(), eval_mode(model):
        for _ in range(rounds + 1):
            timed.append([])
            last = clock()
            for batch, examples in eval_batches(part, split, batch_size, device, precision):
                with explained(workload, f"in a batch of the {split} split"), autocast(device, precision):
                    outputs, losses, _ = per_example(part, model, batch, examples)
                    found = [losses, *(metric(outputs, batch) for metric in workload.metrics.values())]
                for value in found:
                    value.cpu()  # waits for the device
                now = clock()
                timed[-1].append((now - last, examples))
                last = now
    rows = timed[1:]
    first = [seconds for (seconds, _), *_ in rows]
    examples = rows[0][0][1]
    later = [seconds / count for _, *behind in rows for seconds, count in behind if count == batch_size]
    each = statistics.median(later or [seconds / examples for seconds in first])
    return {
        "seconds_per_example": each,
        "start_s": max(0.0, statistics.median(first) - each * examples) if later else 0.0,
        "batch_size": batch_size,
        "batches": sum(len(row) for row in rows),
        "rounds": rounds,
    }
