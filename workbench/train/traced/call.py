"""`LaneCall`: one call of a program on some rows of a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.train.lane_stack import LaneStack
from workbench.train.traced.batch import SplitBatch, stack_batches
from workbench.train.traced.cache import LanePrograms
from workbench.train.traced.losses import LaneLosses
from workbench.train.traced.program import LaneProgram
from workbench.train.traced.step import Objective, lane_tensors

__all__ = ["LaneCall"]

Prepared = dict[tuple[LaneProgram, int, int], Any]
"""(program, stream, micro-batch) -> what the program needs of that batch; shared by the calls of a step."""


class LaneCall:
    """The rows from `first` on, as long as the stack is packed as it is now.

    Attributes:
        rows: of the stack.
        lanes: how many.
        programs: of this step, one for each micro-batch.
    """

    def __init__(self, stack: LaneStack, first: int, lanes: int) -> None:
        self.rows, self.lanes = slice(first, first + lanes), lanes
        self.programs: list[LaneProgram] = []
        self._streams = stack.streams[self.rows]
        self._tensors = lane_tensors(stack, first, lanes)
        self._grad = stack.grad[self.rows]
        self._bound: dict[LaneProgram, Any] = {}
        self._prepared: list[Any] = []
        self._examples: list[int] = []

    def plan(
        self,
        batches: Mapping[int, Sequence[SplitBatch]],
        programs: LanePrograms,
        objective: Objective,
        prepared: Prepared,
    ) -> None:
        """Find the programs for a step, and prepare its batches where no other call did so.

        Args:
            batches: of each stream, micro-batch by micro-batch.
            programs: where to find them.
            objective: what is computed.
            prepared: filled with what other calls can share.
        """
        stacked = len(set(self._streams)) > 1
        self.programs, self._prepared, self._examples = [], [], []
        for number, shared in enumerate(batches[self._streams[0]]):
            own = [batches[stream][number] for stream in self._streams] if stacked else []
            tensors, layout = stack_batches(own) if stacked else shared
            program = programs.get(layout, tensors, lanes=self.lanes, stacked=stacked, objective=objective)
            if program not in self._bound:
                self._bound[program] = program.bind(*self._tensors.all)
            key = (program, self._streams[0], number)
            found = None if stacked else prepared.get(key)
            if found is None:
                found = program.prepare(*tensors)
            if not stacked:
                prepared[key] = found
            self.programs.append(program)
            self._prepared.append(found)
            self._examples.append(layout.examples)

    def run(self, generators: Sequence[torch.Generator], out: LaneLosses) -> None:
        """Run the step: write the gradients into the stack and the losses into `out`, and let the buffers advance."""
        own = generators[self.rows]
        seen = 0
        for number, program in enumerate(self.programs):
            result = program.call(self._bound[program], self._prepared[number], own)
            self._collect(result.grads, add=number > 0)
            out.put(self.rows, seen, result.losses, result.weights)
            seen += self._examples[number]
            for buffer, value in zip(self._tensors.buffers, result.buffers, strict=True):
                if value is not None:
                    buffer.copy_(value)

    def _collect(self, grads: Sequence[Tensor | None], *, add: bool) -> None:
        flat = [
            self._grad.new_zeros((self.lanes, p.numel() // self.lanes)) if g is None else g.reshape(self.lanes, -1)
            for g, p in zip(grads, self._tensors.trained, strict=True)
        ]
        if add:
            self._grad.add_(torch.cat(flat, 1))
        else:
            torch.cat(flat, 1, out=self._grad)
