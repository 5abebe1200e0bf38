"""`VmapGradients`: gradients and evaluations of K lanes by a traced program, in calls of c lanes each."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from workbench.errors import in_one_line
from workbench.train.evaluation import BatchValues, Evaluation, TrackedExamples, collect_values, evaluations_of
from workbench.train.forward import MicroBatches, is_out_of_memory
from workbench.train.gradients import LaneLoss, weighted_mean
from workbench.train.lanes.program import KINK, SHORT, TOLERANCES, LaneProgram, LanePrograms, differing_rows
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.step import (  # fmt: skip
    Objective,
    SplitBatch,
    StepResult,
    check_alike,
    lane_tensors,
    split_batch,
    stack_batches,
)
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_weights

Step = Callable[[Sequence[MicroBatches]], LaneLoss]


class VmapGradients:
    """Fills `LaneStack.grad` by calls of a traced program, each on some rows of the stack.

    A lane's digits are the same whichever lanes are beside it: one that is left alone is computed twice, because a program for one lane
    rounds otherwise.

    Args:
        lanes_per_call: 1 is a program without a lane axis, called for each lane.
        apart: whether batches get a lane axis, which rounds otherwise, too, though the lanes here have one data order.
        threads: calls at a time; with several, torch's own number of threads is 1 in this process until `close`.
        room: bytes that the calls in progress may take; where they need more, a call takes fewer lanes. None is no bound.
    """

    def __init__(
        self, workload: Workload, stack: LaneStack, *, lanes_per_call: int, threads: int = 1, room: int | None = None,
        apart: bool = False,
    ) -> None:  # fmt: skip
        if stack.scale is not None:
            raise CannotBatch("the loss of float16 is scaled by a factor that moves")
        check_alike(stack.models)
        self._workload, self._stack, self._room = workload, stack, room
        self._lanes_per_call, self._threads = lanes_per_call, threads
        self._apart = apart or len(set(stack.streams)) > 1
        self._programs = LanePrograms(workload, stack)
        self._calls: list[_Call] = []
        self._packed: Tensor | None = None
        self._weights_checked = False
        self._torch_threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1:
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(threads, "lanes", initializer=_begin_thread)

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
        """Build the programs for batches like these and divide the calls so that they fit."""
        with _failures_explained():
            self._plan(batches)

    def evaluate(
        self, split: str, batch_size: int, *, rows: Sequence[int], tracked: TrackedExamples | None = None
    ) -> list[list[Evaluation]]:
        """Return for each lane in `rows` what `evaluate` returns for its model, to rounding."""
        stack, start = self._stack, time.perf_counter()
        calls: list[tuple[slice, int]] = []

        def compute(batch: Any, examples: int, first: int) -> list[BatchValues]:
            tensors, layout = split_batch(batch, examples)
            if not first:  # the largest batch
                size = self._lanes_that_fit(layout, tensors, "evaluate")
                pieces = [slice(k, min(k + size, len(stack))) for k in range(0, len(stack), size)]
                wanted = [piece for piece in pieces if any(piece.start <= row < piece.stop for row in rows)]
                calls.extend((piece, max(piece.stop - piece.start, min(size, 2))) for piece in wanted)
            values: dict[int, BatchValues] = {}
            self._run([partial(self._evaluate, *call, layout, tensors, values) for call in calls])
            return [values[row] for row in rows]

        with _failures_explained(out_of_memory=True):
            hosted = collect_values(
                self._workload, compute, models=len(rows), split=split, batch_size=batch_size, device=stack.device,
                precision=stack.precision, tracked=tracked, predict=lambda found, _, __, of: None if found is None else found[of],
            )  # fmt: skip
            return evaluations_of(
                self._workload, hosted, split=split, seconds=(time.perf_counter() - start) / len(rows)
            )

    def describe(self) -> dict[str, Any]:
        """Return how it is done."""
        lanes = self._largest_call()
        calls = math.ceil(len(self._stack) / lanes)
        return {"gradients": "vmap", "lanes_per_call": lanes, "calls": calls, "threads": self._threads}

    def close(self) -> None:
        """Let the threads end, and put torch's number of threads back."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            torch.set_num_threads(self._torch_threads)

    def _largest_call(self) -> int:
        return min(self._lanes_per_call, max(len(self._stack), 2))

    def _lanes_that_fit(self, layout: Any, tensors: Sequence[Tensor], objective: Objective) -> int:
        """Return how many lanes a call may take, so that those in progress take no more than the room."""
        lanes = self._largest_call()
        if self._room is None or lanes == 1:
            return lanes
        single = self._programs.get(layout, tensors, lanes=1, stacked=False, objective=objective)
        return max(1, min(lanes, self._room // max(1, (single.peak_bytes or 0) * self._threads)))

    def _step(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        stack, weighted = self._stack, self._workload.weights is not None
        with _failures_explained():
            self._plan(batches)
            found: list[list[StepResult]] = [[] for _ in self._calls]
            with self._or_as_it_was():
                self._run([partial(call.run, stack.rng.generators, found[k]) for k, call in enumerate(self._calls)])

        def together(name: str) -> Tensor:
            """Return what all calls and micro-batches give, shape (lanes, examples)."""
            calls = zip(self._calls, found, strict=True)
            return torch.cat(
                [torch.cat([getattr(r, name).reshape(c.lanes, -1) for r in parts], 1) for c, parts in calls]
            )

        losses = together("losses")
        if not weighted and len(found[0]) == 1:
            return _mean(losses)
        weights = together("weights").to(losses.dtype) if weighted else torch.ones_like(losses)
        if weighted and not self._weights_checked:
            check_weights(weights[0], where="the first batch of the train split")  # once: it synchronises
            self._weights_checked = True
        loss, divisor = weighted_mean(losses, weights)
        stack.grad.div_(divisor.unsqueeze(1))
        return loss

    def _run(self, tasks: Sequence[Callable[[], Any]]) -> None:
        """Run all tasks without gradients; an error is raised when every thread has ended."""
        left = iter(tasks)  # shared: each thread takes the next

        def work() -> None:
            for task in left:
                task()

        if self._pool is None:
            with torch.no_grad():
                return work()
        running = [self._pool.submit(work) for _ in range(min(self._threads, len(tasks)))]
        wait(running)
        for future in running:
            future.result()

    def _plan(self, batches: Sequence[MicroBatches]) -> None:
        """Divide the lanes into calls, anew when the stack was re-packed, and find the programs of each."""
        stack = self._stack
        first = batches[stack.streams[0]]
        objective: Objective = "mean" if self._workload.weights is None and len(first) == 1 else "sum"
        split = {stream: [split_batch(*batch) for batch in batches[stream]] for stream in sorted(set(stack.streams))}
        if self._packed is None:
            tensors, layout = split[stack.streams[0]][0]
            self._lanes_per_call = self._lanes_that_fit(layout, tensors, objective)
        if self._packed is not stack.values:
            count = len(stack)  # lanes that left must not leave a core idle
            size = min(self._largest_call(), math.ceil(count / self._threads))
            least = min(self._largest_call(), 2)
            self._calls = [
                _Call(stack, first, min(size, count - first), least, apart=self._apart)
                for first in range(0, count, size)
            ]
            self._packed = stack.values
        for call in self._calls:
            call.plan(split, self._programs, objective)

    @contextmanager
    def _or_as_it_was(self) -> Iterator[None]:
        """Put buffers and generators back where the block raises."""
        programs = [program for call in self._calls for program, _ in call.planned]
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

    def _evaluate(
        self, piece: slice, lanes: int, layout: Any, tensors: Sequence[Tensor], values: dict[int, BatchValues]
    ) -> None:
        """Put what a call of so many lanes computes on one batch into `values`, lane by lane."""
        program = self._programs.get(layout, tensors, lanes=lanes, stacked=False, objective="evaluate")
        if program.draws or program.changes:
            raise CannotBatch("in evaluation the model draws random numbers or changes its buffers")
        found = program(lane_tensors(self._stack, piece.start, lanes).all, tensors, [])
        for lane in range(piece.stop - piece.start):
            own = found if lanes == 1 else tree_map_only(Tensor, itemgetter(lane), found._replace(buffers=()))
            metrics = dict(zip(self._workload.metrics, own.metrics, strict=True))
            values[piece.start + lane] = own.prediction, own.losses, own.weights, metrics


def _begin_thread() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


class _Call:
    """The rows from `first` on, as long as the stack is packed as it is now; with fewer than `least` the one is computed twice."""

    def __init__(self, stack: LaneStack, first: int, lanes: int, least: int, *, apart: bool) -> None:
        self.rows, self.lanes, self._computed = slice(first, first + lanes), lanes, max(lanes, least)
        self.planned: list[tuple[LaneProgram, list[Tensor]]] = []
        self._streams, self._apart = stack.streams[self.rows], apart and self._computed > 1
        self._find = partial(lane_tensors, stack, first, self._computed)
        self._tensors, self._buffers = self._find(), [t[self.rows] for t in stack.buffers.values()]
        self._grad = stack.grad[self.rows]
        self._twins = [torch.Generator(stack.device) for _ in range(self._computed - lanes)]

    def plan(self, batches: Mapping[int, Sequence[SplitBatch]], programs: LanePrograms, objective: Objective) -> None:
        """Find program and tensors of each micro-batch."""
        streams = [*self._streams, *self._streams[: len(self._twins)]]
        self.planned = []
        for number, batch in enumerate(batches[streams[0]]):
            tensors, layout = stack_batches([batches[s][number] for s in streams]) if self._apart else batch
            program = programs.get(layout, tensors, lanes=self._computed, stacked=self._apart, objective=objective)
            self.planned.append((program, tensors))

    def run(self, generators: Sequence[torch.Generator], found: list[StepResult]) -> None:
        """Run the step: write gradients into the stack, let buffers advance, and append the result of each micro-batch."""
        for program, tensors in self.planned:
            if self._twins:
                self._tensors = self._find()
            result = program(self._tensors.all, tensors, [*generators[self.rows], *self._twins])
            if self._twins:
                result = tree_map_only(Tensor, lambda t: t[: self.lanes], result)
            grads = [
                self._grad.new_zeros((self.lanes, p.numel() // self._computed))
                if g is None
                else g.reshape(self.lanes, -1)
                for g, p in zip(result.grads, self._tensors.trained, strict=True)
            ]
            if found:
                self._grad.add_(torch.cat(grads, 1))
            else:
                torch.cat(grads, 1, out=self._grad)
            for buffer, value in zip(self._buffers, result.buffers, strict=True):
                if value is not None:
                    buffer.copy_(value)
            found.append(result._replace(grads=(), buffers=()))


def _mean(losses: Tensor) -> LaneLoss:
    """Return plain means of losses (lanes, examples) and their squared standard errors."""
    n = losses.shape[1]
    loss = losses.mean(1, dtype=torch.float32) if losses.dtype == torch.bfloat16 else losses.mean(1)
    if n == 1:
        return LaneLoss(loss, torch.full_like(loss, math.nan))
    residuals = losses.to(loss.dtype) - loss.unsqueeze(1)
    return LaneLoss(loss, residuals.square_().sum(1).div_(n * (n - 1)))


@contextmanager
def _failures_explained(*, out_of_memory: bool = False) -> Iterator[None]:
    """Turn an error of a traced step into `CannotBatch`: plain autograd explains it better, or succeeds."""
    try:
        yield
    except CannotBatch:
        raise
    except Exception as error:
        if is_out_of_memory(error) and not out_of_memory:
            raise
        raise CannotBatch(f"the traced step failed ({in_one_line(error)})") from error


def verify(stack: LaneStack, loop: Step, traced: Step, batches: Sequence[Sequence[MicroBatches]]) -> None:
    """Compare loss, gradient and buffers of every lane over some steps, random draws included; the stack is put back.

    A loss is continuous and must agree. A gradient is not, where there are ReLUs or maxima: at most half of the gradients may differ,
    by no more than one unit can change.
    """
    attributes = [(module, dict(vars(module))) for model in stack.models for module in model.modules()]

    def run(gradients: Step) -> list[dict[str, Tensor]]:
        seen = []
        with stack.untouched():
            for step in batches:
                found = {"loss": gradients(step).loss.detach().clone(), "gradient": stack.grad.clone()}
                for name in stack.buffers:  # of the models, which may have replaced one
                    found[name] = torch.stack([model.get_buffer(name).detach() for model in stack.models])
                seen.append(found)
        return seen

    try:
        with isolated_rng():
            expected, found = run(loop), run(traced)
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
    tolerance = SHORT if stack.precision == "bfloat16" else TOLERANCES.get(stack.values.dtype, SHORT)
    said = "the traced step gives another {} than plain autograd, in lane {} of step {} of a trial run"
    apart: list[str] = []  # gradients that differ by no more than a kink
    for step, (plain, ours) in enumerate(zip(expected, found, strict=True)):
        for name, value in plain.items():
            differ = differing_rows(value, ours[name], tolerance)
            if name == "gradient":
                apart += [said.format(name, lane, step) for lane in differ]
                differ = differing_rows(value, ours[name], max(KINK, tolerance))
            for lane in differ:
                raise CannotBatch(said.format(name, lane, step))
    if 2 * len(apart) > len(batches) * len(stack):
        raise CannotBatch(apart[0])
