"""Evaluation of many lanes: each batch of a split is loaded once, and a traced program computes it for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.train.batches import eval_batches
from workbench.train.evaluation import Evaluation, on_host, weighted_means
from workbench.train.lane_stack import LaneStack
from workbench.train.predictions import TrackedExamples
from workbench.train.rng import isolated_rng
from workbench.train.traced.batch import BatchLayout, split_batch
from workbench.train.traced.cache import LanePrograms
from workbench.train.traced.call_runner import CallRunner
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.program import CallResult, LaneProgram
from workbench.train.traced.step import lane_tensors
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_weights
from workbench.workloads.losses import label_of

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
    room: int | None = None,
    rows: Sequence[int] | None = None,
    tracked: TrackedExamples | None = None,
) -> list[list[Evaluation]]:
    """Return for each lane what `evaluate` returns for its model, to rounding; the stack is left as it is.

    Args:
        workload: what is evaluated.
        stack: the lanes.
        split: of the data.
        batch_size: examples in a batch; the last may be smaller.
        programs: where traced programs are found.
        runner: runs the calls.
        lanes_per_call: lanes in one call, at most.
        room: bytes that the calls in progress may take; None is no bound.
        rows: lanes to evaluate; None is all.
        tracked: takes what is said of the examples that it tracks.

    Raises:
        CannotBatch: the lanes cannot be computed together.
    """
    rows = list(range(len(stack))) if rows is None else list(rows)
    start = time.perf_counter()
    found: dict[str, list[Tensor]] = {name: [] for name in ("loss", *workload.metrics)}
    weights: list[Tensor] = []
    calls: list[slice] = []
    seen = 0
    if tracked is not None:
        tracked.begin()
    with torch.no_grad(), isolated_rng():
        for batch, examples in eval_batches(workload, split, batch_size, stack.device, stack.precision):
            tensors, layout = split_batch(batch, examples)
            if not calls:  # the first batch is the largest
                fit = partial(programs.lanes_that_fit, tensors, layout, threads=runner.threads, objective="evaluate")
                calls = _calls(len(stack), rows, fit(lanes=lanes_per_call, room=room))
            results = _batch(stack, tensors, layout, programs=programs, runner=runner, calls=calls)
            columns = zip(*((result.losses, *result.metrics) for result in results), strict=True)
            for name, parts in zip(found, columns, strict=True):
                found[name].append(torch.cat([part.view(-1, examples) for part in parts]))
            seen_rows = [] if tracked is None else tracked.rows(seen, examples)
            if tracked is not None and seen_rows:
                tracked.add_labels(label_of(workload.loss, batch, examples), seen_rows)
                said, losses = _said(results, examples), found["loss"][-1]
                for lane, place in enumerate(_places(calls, rows)):
                    one = said[place]
                    tracked.add(lane, None if one is None else one[seen_rows], losses[place][seen_rows])
            seen += examples
            given = results[0].weights
            weights.append(torch.ones_like(found["loss"][-1][0]) if given is None else given.view(-1, examples)[0])
    weight = on_host(weights)
    if workload.weights is not None:
        check_weights(weight, where=f"the {split} split")
    wanted = _places(calls, rows)
    hosted = {name: on_host(parts)[wanted] for name, parts in found.items()}
    seconds = (time.perf_counter() - start) / len(rows)
    means = [weighted_means(name, values, weight, seconds) for name, values in hosted.items()]
    return [list(row) for row in zip(*means, strict=True)]


def _calls(lanes: int, rows: Sequence[int], lanes_per_call: int) -> list[slice]:
    """Return the rows of each call that holds a wanted one."""
    pieces = [slice(first, min(first + lanes_per_call, lanes)) for first in range(0, lanes, lanes_per_call)]
    return [piece for piece in pieces if any(piece.start <= row < piece.stop for row in rows)]


def _places(calls: Sequence[slice], rows: Sequence[int]) -> list[int]:
    """Return where each wanted row lies among those that the calls compute."""
    computed = [row for piece in calls for row in range(piece.start, piece.stop)]
    return [computed.index(row) for row in rows]


def _said(results: Sequence[CallResult], examples: int) -> list[Tensor | None]:
    """Return what each computed lane predicted on one batch, shape (examples, ...), or None."""
    lanes: list[Tensor | None] = []
    for result in results:
        alone = result.losses.dim() == 1
        count = 1 if alone else len(result.losses)
        if result.prediction is None:
            lanes += [None] * count
        else:
            lanes += [result.prediction] if alone else list(result.prediction)
    assert all(said is None or len(said) == examples for said in lanes)
    return lanes


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
