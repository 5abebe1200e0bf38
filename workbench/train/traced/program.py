"""`LaneProgram`: one training step, or one evaluation batch, of c lanes as a plain list of tensor operations.

It is recorded once for each shape of batch. A call of it pays neither for autograd nor for vmap, what depends on the batch
alone is computed once for all calls of a step, and calls on different lanes can run in different threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from workbench.train.lane_stack import LaneStack
from workbench.train.lane_stacks import is_out_of_memory
from workbench.train.traced.batch import BatchLayout
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.graph.draw_nodes import GENERATORS, draw_per_lane, random_nodes
from workbench.train.traced.graph.lowering import Lowered, lower
from workbench.train.traced.graph.passes import clean_up
from workbench.train.traced.graph.recorder import CannotRecord
from workbench.train.traced.graph.stages import Stage, dead_code
from workbench.train.traced.step import Objective
from workbench.train.traced.trace import Recorded, record
from workbench.workloads.base import Workload

__all__ = ["CallResult", "LaneProgram", "build_program"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # rule of thumb: difference allowed, as a share of the norm
SHORT = 5e-2  # rule of thumb: the same for types of fewer digits
SMALLEST = 1e-30  # what counts as nothing
KINK = 5e-2  # rule of thumb: what one unit of a ReLU, which rounding switches on or off, may change in a gradient


class CallResult(NamedTuple):
    """What one call returns, with a lane axis unless the program has a single lane.

    Attributes:
        grads: one for each trained parameter; None is zero.
        losses: per example.
        weights: per example, or None.
        metrics: per example, one for each metric of the workload, in evaluation.
        buffers: one for each buffer; None where it is unchanged.
        prediction: per example, in evaluation; None where the outputs say nothing that a table could hold.
    """

    grads: Sequence[Tensor | None]
    losses: Tensor
    weights: Tensor | None
    metrics: Sequence[Tensor]
    buffers: Sequence[Tensor | None]
    prediction: Tensor | None


class LaneProgram:
    """A recorded step in three parts, for what changes with the stack, with the batch, and with the lanes of a call.

    Attributes:
        lanes: in one call.
        draws: whether it draws random numbers.
        clean: whether it was cleaned up; False where that failed, and the step runs as it was recorded.
        changes: places of the buffers that it changes.
        loss_dtype: of the losses.
        peak_bytes: that a call needs at its peak beside the stack and the batch.
    """

    def __init__(
        self,
        lowered: Lowered,
        results: Sequence[Tensor | None],
        *,
        lanes: int,
        draws: bool,
        clean: bool,
        counts: tuple[int, int],
    ) -> None:
        self.clean = clean
        self.lanes, self.draws, self.peak_bytes = lanes, draws, lowered.peak_bytes
        self.bind, self.prepare, self._call = lowered.bind, lowered.prepare, lowered.call
        self._grads, self._metrics = counts
        losses, buffers = results[self._grads], results[self._grads + 2 + self._metrics : -1]
        assert losses is not None
        self.loss_dtype = losses.dtype
        self.changes = [place for place, buffer in enumerate(buffers) if buffer is not None]

    def call(self, bound: Sequence[Any], prepared: Sequence[Any], generators: Sequence[torch.Generator]) -> CallResult:
        """Run the step; nothing that it is given is written into, but the generators advance.

        Args:
            bound: what `bind` returned for the memory of the lanes; good as long as that memory stays where it is.
            prepared: what `prepare` returned for the tensors of the batch.
            generators: one per lane.
        """
        flat = self._call(*bound, *prepared, generators) if self.draws else self._call(*bound, *prepared)
        g, m = self._grads, self._grads + 2 + self._metrics
        return CallResult(flat[:g], flat[g], flat[g + 1], flat[g + 2 : m], flat[m:-1], flat[-1])


def build_program(
    workload: Workload,
    stack: LaneStack,
    layout: BatchLayout,
    batch: Sequence[Tensor],
    *,
    lanes: int,
    stacked: bool,
    objective: Objective,
) -> LaneProgram:
    """Record, clean up and check a program; the arguments are those of `record`, and the stack is left as it is.

    Raises:
        CannotBatch: lanes cannot be computed together.
    """
    for clean in (True, False):
        recorded, single = record(workload, stack, layout, batch, lanes=lanes, stacked=stacked, objective=objective)
        try:
            return _program(recorded, single, lanes=lanes, device=stack.device, clean=clean)
        except Exception as error:
            if not clean or is_out_of_memory(error):
                raise
    raise AssertionError("unreachable")


def _program(recorded: Recorded, single: Recorded, *, lanes: int, device: torch.device, clean: bool) -> LaneProgram:
    """Turn a recorded step into a program; without `clean` as it is, for what the clean-up does not get right."""
    graph = recorded.graph
    dead_code(graph)
    draws = bool(random_nodes(graph))
    try:
        draw_per_lane(graph, random_nodes(single.graph), lanes=lanes, device=device)
    except CannotRecord as reason:
        raise CannotBatch(str(reason)) from reason
    inputs = dict.fromkeys(recorded.lane_inputs, Stage.BIND) | dict.fromkeys(recorded.batch_inputs, Stage.BATCH)
    example: dict[fx.Node, Any] = dict(recorded.example)
    generators = [torch.Generator(device) for _ in range(lanes)]
    for node in graph.nodes:
        if node.op == "get_attr":
            example[node] = recorded.constants[str(node.target)]
        elif node.op == "placeholder" and node.name == GENERATORS:
            inputs[node], example[node] = Stage.CALL, generators
    if clean:
        clean_up(graph, inputs, example, lanes=lanes)
    generators[0].set_state(recorded.random_state)
    with torch.no_grad():
        lowered, results = lower(graph, inputs, example)
    if not draws or lanes == 1:  # several lanes drew from one generator while they were recorded
        _check(recorded, results)
    grads, _, _, metrics, _, _ = recorded.results
    return LaneProgram(lowered, results, lanes=lanes, draws=draws, clean=clean, counts=(len(grads), len(metrics)))


def _check(recorded: Recorded, results: Sequence[Tensor | None]) -> None:
    """Check that the program returns what the step returned while it was recorded."""
    pairs: list[tuple[Tensor, Tensor]] = []
    leaves = tree_leaves(recorded.results)[:-1]  # not the prediction: rounding decides between two equal logits
    for expected, found in zip(leaves, results[:-1], strict=True):
        if expected is not None and found is not None:
            pairs.append((expected, found))
    grads = sum(g is not None for g in recorded.results[0])
    same = all(a.shape == b.shape for a, b in pairs)
    same = same and _difference(pairs[:grads]) <= KINK  # together: some are zero but for rounding
    same = same and all(_difference([pair]) <= TOLERANCE.get(pair[0].dtype, SHORT) for pair in pairs[grads:])
    if not same:
        raise CannotBatch("the recorded step gives other numbers than the step itself")


def _difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the norm of the difference as a share of the norm of what is expected; infinite where NaN differs."""
    difference = whole = 0.0
    for expected, found in pairs:
        if not expected.is_floating_point():
            if not torch.equal(expected, found):
                return math.inf
            continue
        finite = expected.isfinite()
        if not torch.equal(finite, found.isfinite()):
            return math.inf
        a, b = (
            torch.where(finite, t, 0).to(torch.float32 if t.dtype != torch.float64 else t.dtype)
            for t in (expected, found)
        )
        difference += float((a - b).square().sum())
        whole += float(a.square().sum())
    return math.sqrt(difference / max(whole, SMALLEST)) if difference else 0.0
