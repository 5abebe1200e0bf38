"""Evaluation of many lanes: each batch of a split is loaded once, and a traced program computes it for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.train.batches import eval_batches
from workbench.train.cannot_batch import CannotBatch
from workbench.train.evaluation import Evaluation, evaluate, on_host, weighted_means
from workbench.train.lane_batch import BatchLayout, split_batch
from workbench.train.lane_cache import LanePrograms
from workbench.train.lane_calls import CallRunner
from workbench.train.lane_program import CallResult, LaneProgram
from workbench.train.lane_step import lane_tensors
from workbench.train.lanes import LaneStack
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_weights

__all__ = ["evaluate_lanes"]


def evaluate_lanes(
    workload: Workload,
    stack: LaneStack,
    split: str,
    batch_size: int,
    *,
    programs: LanePrograms,
    runner: CallRunner,
    lanes_per_call: int,
    rows: Sequence[int] | None = None,
) -> list[list[Evaluation]]:
    """Return for each lane what `evaluate` returns for its model, to rounding; the stack is left as it is.

    Where the lanes cannot be computed together, each is evaluated by itself.

    Args:
        workload: what is evaluated.
        stack: the lanes.
        split: of the data.
        batch_size: examples in a batch; the last may be smaller.
        programs: where traced programs are found.
        runner: runs the calls.
        lanes_per_call: lanes in one call.
        rows: lanes to evaluate; None is all.
    """
    rows = list(range(len(stack))) if rows is None else list(rows)
    firsts = range(0, len(stack), lanes_per_call)
    pieces = [slice(first, min(first + lanes_per_call, len(stack))) for first in firsts]
    calls = [piece for piece in pieces if any(piece.start <= row < piece.stop for row in rows)]
    try:
        return _traced(workload, stack, split, batch_size, programs=programs, runner=runner, calls=calls, rows=rows)
    except Exception:  # plain evaluation does it, or says better what is wrong
        return [_alone(workload, stack, split, batch_size, row) for row in rows]


def _alone(workload: Workload, stack: LaneStack, split: str, batch_size: int, row: int) -> list[Evaluation]:
    with stack.rng.lane(row):
        return evaluate(
            workload,
            stack.models[row],
            split=split,
            batch_size=batch_size,
            device=stack.device,
            precision=stack.precision,
        )


def _traced(
    workload: Workload,
    stack: LaneStack,
    split: str,
    batch_size: int,
    *,
    programs: LanePrograms,
    runner: CallRunner,
    calls: Sequence[slice],
    rows: Sequence[int],
) -> list[list[Evaluation]]:
    start = time.perf_counter()
    found: dict[str, list[Tensor]] = {name: [] for name in ("loss", *workload.metrics)}
    weights: list[Tensor] = []
    with torch.no_grad(), isolated_rng():
        for batch, examples in eval_batches(workload, split, batch_size, stack.device, stack.precision):
            results = _batch(stack, *split_batch(batch, examples), programs=programs, runner=runner, calls=calls)
            columns = zip(*((result.losses, *result.metrics) for result in results), strict=True)
            for name, parts in zip(found, columns, strict=True):
                found[name].append(torch.cat([part.view(-1, examples) for part in parts]))
            given = results[0].weights
            weights.append(torch.ones_like(found["loss"][-1][0]) if given is None else given.view(-1, examples)[0])
    weight = on_host(weights)
    if workload.weights is not None:
        check_weights(weight, where=f"the {split} split")
    computed = [row for piece in calls for row in range(piece.start, piece.stop)]
    wanted = [computed.index(row) for row in rows]
    hosted = {name: on_host(parts)[wanted] for name, parts in found.items()}
    seconds = (time.perf_counter() - start) / len(rows)
    means = [weighted_means(name, values, weight, seconds) for name, values in hosted.items()]
    return [list(row) for row in zip(*means, strict=True)]


def _batch(
    stack: LaneStack,
    tensors: list[Tensor],
    layout: BatchLayout,
    *,
    programs: LanePrograms,
    runner: CallRunner,
    calls: Sequence[slice],
) -> list[CallResult]:
    """Return what each call computes on one batch."""
    results: dict[int, CallResult] = {}
    prepared: dict[LaneProgram, Any] = {}
    tasks = []

    def run(piece: slice, program: LaneProgram) -> None:
        bound = program.bind(*lane_tensors(stack, piece.start, piece.stop - piece.start).all)
        results[piece.start] = program.call(bound, prepared[program], [])

    for piece in calls:
        lanes = piece.stop - piece.start
        program = programs.get(layout, tensors, lanes=lanes, stacked=False, objective="evaluate")
        if program.draws or program.changes:
            raise CannotBatch("in evaluation the model draws random numbers or changes its buffers")
        if program not in prepared:
            prepared[program] = program.prepare(*tensors)
        tasks.append(partial(run, piece, program))
    runner.run(tasks)
    return [results[piece.start] for piece in calls]
