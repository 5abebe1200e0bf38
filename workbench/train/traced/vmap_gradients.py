"""`VmapGradients`: the gradients of K lanes by a traced program, in calls of c lanes each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.train.evaluation import Evaluation
from workbench.train.gradients import LaneLoss, MicroBatches
from workbench.train.lane_stack import LaneStack
from workbench.train.lane_stacks import is_out_of_memory
from workbench.train.predictions import TrackedExamples
from workbench.train.traced.batch import split_batch
from workbench.train.traced.cache import LanePrograms
from workbench.train.traced.call import LaneCall, Prepared
from workbench.train.traced.call_runner import CallRunner
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.lane_evaluation import evaluate_lanes
from workbench.train.traced.losses import LaneLosses
from workbench.train.traced.module_state import check_alike
from workbench.train.traced.step import Objective
from workbench.train.traced.verify import verify
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_weights

__all__ = ["CannotBatch", "VmapGradients", "verify"]


class VmapGradients:
    """Fills `LaneStack.grad` by calls of a traced program, each on some rows of the stack.

    Args:
        workload: what is computed.
        stack: its lanes; it may be re-packed between calls.
        lanes_per_call: lanes in one call of the program; 1 is a program without a lane axis, called for each lane.
        threads: calls at a time. 1 leaves all of torch's threads to each call.
        observed: whether hooks on the modules want to see the forward pass, which a traced program does not run.
        room: bytes that the calls in progress may take; where they need more, a call takes fewer lanes. None is no bound.

    Raises:
        CannotBatch: at the start or at any step; the stack is then as it was before that step, gradients aside.
    """

    def __init__(
        self,
        workload: Workload,
        stack: LaneStack,
        *,
        lanes_per_call: int,
        threads: int = 1,
        observed: bool = False,
        room: int | None = None,
    ) -> None:
        for name, value in (("lanes_per_call", lanes_per_call), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 1.")
        if observed:
            raise CannotBatch("a hook watches the model's modules, and a traced step does not run them")
        check_alike(stack.models)
        self._workload, self._stack = workload, stack
        self._lanes_per_call, self._threads = lanes_per_call, threads
        self._programs = LanePrograms(workload, stack)
        self._room = room
        self._calls: list[LaneCall] = []
        self._packed: Tensor | None = None
        self._weights_checked = False
        self._runner = CallRunner(threads)

    def __call__(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        """Return the losses of one update; the gradients are left in the stack."""
        while True:
            try:
                return self._step(batches)
            except Exception as error:
                if not is_out_of_memory(error) or self._largest_call() == 1:
                    raise
            self._lanes_per_call = math.ceil(self._largest_call() / 2)
            self._packed = None
            if self._stack.device.type == "cuda":
                torch.cuda.empty_cache()

    def prepare(self, batches: Sequence[MicroBatches]) -> None:
        """Get ready for steps with batches like these: programs are built, and calls divided so that they fit.

        Raises:
            CannotBatch: lanes cannot be computed together.
        """
        with _failures_explained():
            self._ready(batches)

    def evaluate(
        self,
        split: str,
        batch_size: int,
        *,
        rows: Sequence[int] | None = None,
        tracked: TrackedExamples | None = None,
    ) -> list[list[Evaluation]]:
        """Return the evaluations of each lane in `rows`, or of all; the stack is left as it is.

        Raises:
            CannotBatch: the lanes cannot be evaluated together.
        """
        with _failures_explained(out_of_memory=True):
            return evaluate_lanes(
                self._workload,
                self._stack,
                split,
                batch_size,
                programs=self._programs,
                runner=self._runner,
                lanes_per_call=self._largest_call(),
                room=self._room,
                rows=rows,
                tracked=tracked,
            )

    def describe(self) -> dict[str, Any]:
        """Return how it is done."""
        lanes = self._largest_call()
        calls = math.ceil(len(self._stack) / lanes)
        return {"gradients": "vmap", "lanes_per_call": lanes, "calls": calls, "threads": self._threads}

    def close(self) -> None:
        """Let the threads end, and put torch's number of threads back."""
        self._runner.close()

    def _largest_call(self) -> int:
        return min(self._lanes_per_call, len(self._stack))

    def _step(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        stack, weighted = self._stack, self._workload.weights is not None
        first = batches[stack.streams[0]]
        plain = not weighted and len(first) == 1
        with _failures_explained():
            self._ready(batches)
            dtype, examples = self._calls[0].programs[0].loss_dtype, sum(count for _, count in first)
            out = LaneLosses(len(stack), examples, dtype, stack.device, weighted=not plain)
            with self._or_as_it_was():
                self._runner.run([partial(call.run, stack.rng.generators, out) for call in self._calls])
        if plain:
            return out.mean()
        if weighted and not self._weights_checked and out.weights is not None:
            check_weights(out.weights[0], where="the first batch of the train split")  # once: it synchronises
            self._weights_checked = True
        loss, total = out.weighted()
        stack.grad.div_(total.unsqueeze(1))
        return loss

    def _ready(self, batches: Sequence[MicroBatches]) -> None:
        """Divide the lanes into calls, and find the program of each."""
        first = batches[self._stack.streams[0]]
        objective: Objective = "mean" if self._workload.weights is None and len(first) == 1 else "sum"
        if self._packed is None:
            self._lanes_per_call = self._programs.lanes_that_fit(
                *split_batch(*first[0]),
                lanes=self._largest_call(),
                threads=self._threads,
                objective=objective,
                room=self._room,
            )
        self._pack()
        self._plan(batches, objective)

    def _plan(self, batches: Sequence[MicroBatches], objective: Objective) -> None:
        split = {
            stream: [split_batch(batch, examples) for batch, examples in batches[stream]]
            for stream in sorted(set(self._stack.streams))
        }
        prepared: Prepared = {}
        with torch.no_grad():
            for call in self._calls:
                call.plan(split, self._programs, objective, prepared)

    def _pack(self) -> None:
        """Divide the rows of the stack into calls, anew when it was re-packed."""
        if self._packed is self._stack.values:
            return
        count = len(self._stack)
        size = min(self._largest_call(), math.ceil(count / self._threads))  # lanes that left must not leave a core idle
        self._calls = [LaneCall(self._stack, first, min(size, count - first)) for first in range(0, count, size)]
        self._packed = self._stack.values

    @contextmanager
    def _or_as_it_was(self) -> Iterator[None]:
        """Put buffers and generators back where the block raises."""
        programs = [program for call in self._calls for program in call.programs]
        changing = {place for program in programs for place in program.changes}
        buffers = [(t, t.clone()) for place, t in enumerate(self._stack.buffers.values()) if place in changing]
        generators = self._stack.rng.generators if any(program.draws for program in programs) else []
        states = [generator.get_state() for generator in generators]
        try:
            yield
        except BaseException:
            for tensor, before in buffers:
                tensor.copy_(before)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            raise


@contextmanager
def _failures_explained(*, out_of_memory: bool = False) -> Iterator[None]:
    """Turn an error of a traced step into `CannotBatch`: plain autograd will say better what is wrong, or do it."""
    try:
        yield
    except CannotBatch:
        raise
    except Exception as error:
        if is_out_of_memory(error) and not out_of_memory:
            raise
        message = (str(error).strip().splitlines() or ["no message"])[0]
        raise CannotBatch(f"the traced step failed ({type(error).__name__}: {message})") from error
