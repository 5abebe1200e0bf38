"""`VmapGradients`: gradients and evaluations of K lanes by a traced program, in calls of c lanes each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.train.batches import eval_batches
from workbench.train.evaluation import Evaluation, TrackedExamples, on_host, weighted_means
from workbench.train.forward import MicroBatches, is_out_of_memory
from workbench.train.gradients import Gradients, LaneLoss, weighted_mean
from workbench.train.lane_stack import LaneStack
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
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_weights
from workbench.workloads.losses import label_of

Task = Callable[[], Any]


class VmapGradients:
    """Fills `LaneStack.grad` by calls of a traced program, each on some rows of the stack.

    Args:
        stack: its lanes; it may be re-packed between calls.
        lanes_per_call: 1 is a program without a lane axis, called for each lane.
        threads: calls at a time; with several, torch's own number of threads is 1 in this process until `close`.
        room: bytes that the calls in progress may take; where they need more, a call takes fewer lanes. None is no bound.

    Raises:
        CannotBatch: at the start or at any step; the stack is then as it was before that step, gradients aside.
    """

    def __init__(
        self, workload: Workload, stack: LaneStack, *, lanes_per_call: int, threads: int = 1, room: int | None = None
    ) -> None:
        check_alike(stack.models)
        self._workload, self._stack, self._room = workload, stack, room
        self._lanes_per_call, self._threads = lanes_per_call, threads
        self._programs = LanePrograms(workload, stack)
        self._calls: list[_Call] = []
        self._packed: Tensor | None = None
        self._weights_checked = False
        self._torch_threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1:
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(threads - 1, "lanes", initializer=lambda: torch.set_num_threads(1))

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
        self, split: str, batch_size: int, *, rows: Sequence[int] | None = None, tracked: TrackedExamples | None = None
    ) -> list[list[Evaluation]]:
        """Return for each lane in `rows`, or all, what `evaluate` returns for its model, to rounding."""
        wanted = list(range(len(self._stack))) if rows is None else list(rows)
        with _failures_explained(out_of_memory=True), torch.no_grad(), isolated_rng():
            return self._evaluate(split, batch_size, wanted, tracked)

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
        return min(self._lanes_per_call, len(self._stack))

    def _step(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        stack, weights = self._stack, self._workload.weights
        with _failures_explained():
            self._plan(batches)
            found: list[list[StepResult]] = [[] for _ in self._calls]
            with self._or_as_it_was():
                self._run([partial(call.run, stack.rng.generators, found[k]) for k, call in enumerate(self._calls)])
        losses = torch.cat([torch.cat([r.losses.reshape(call.lanes, -1) for r in parts], 1) for call, parts in zip(self._calls, found, strict=True)])  # fmt: skip
        if weights is None and len(found[0]) == 1:
            return _mean(losses)
        given = torch.ones_like(losses)
        for call, parts in zip(self._calls, found, strict=True):
            if weights is not None:
                torch.cat([r.weights.reshape(call.lanes, -1).to(losses.dtype) for r in parts], 1, out=given[call.rows])
        if weights is not None and not self._weights_checked:
            check_weights(given[0], where="the first batch of the train split")  # once: it synchronises
            self._weights_checked = True
        loss, divisor = weighted_mean(losses, given)
        stack.grad.div_(divisor.unsqueeze(1))
        return loss

    def _run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks without gradients; an error is raised when every thread has ended."""
        left = iter(tasks)  # shared: each thread takes the next

        def work() -> None:
            with torch.no_grad():
                for task in left:
                    task()

        helpers = min(self._threads, len(tasks)) - 1
        running = [self._pool.submit(work) for _ in range(helpers)] if self._pool is not None else []
        try:
            work()
        finally:
            wait(running)
        for future in running:
            future.result()

    def _plan(self, batches: Sequence[MicroBatches]) -> None:
        """Divide the lanes into calls, anew when the stack was re-packed, and find the programs of each."""
        stack = self._stack
        first = batches[stack.streams[0]]
        objective: Objective = "mean" if self._workload.weights is None and len(first) == 1 else "sum"
        split = {
            stream: [split_batch(batch, examples) for batch, examples in batches[stream]]
            for stream in sorted(set(stack.streams))
        }
        if self._packed is None:
            how: dict[str, Any] = {"threads": self._threads, "objective": objective, "room": self._room}
            tensors = split[stack.streams[0]][0]
            self._lanes_per_call = self._programs.lanes_that_fit(*tensors, lanes=self._largest_call(), **how)
        if self._packed is not stack.values:
            count = len(stack)  # lanes that left must not leave a core idle
            size = min(self._largest_call(), math.ceil(count / self._threads))
            self._calls = [_Call(stack, first, min(size, count - first)) for first in range(0, count, size)]
            self._packed = stack.values
        for call in self._calls:
            call.plan(split, self._programs, objective)

    @contextmanager
    def _or_as_it_was(self) -> Iterator[None]:
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
        self, split: str, batch_size: int, rows: Sequence[int], tracked: TrackedExamples | None
    ) -> list[list[Evaluation]]:
        workload, stack, start = self._workload, self._stack, time.perf_counter()
        found: dict[str, list[Tensor]] = {name: [] for name in ("loss", *workload.metrics)}
        weights: list[Tensor] = []
        calls: list[slice] = []
        places: list[int] = []  # where each wanted row lies among those that the calls compute
        seen = 0
        if tracked is not None:
            tracked.begin()
        for batch, examples in eval_batches(workload, split, batch_size, stack.device, stack.precision):
            tensors, layout = split_batch(batch, examples)
            if not calls:  # the first batch is the largest
                how: dict[str, Any] = {"threads": self._threads, "objective": "evaluate", "room": self._room}
                size = self._programs.lanes_that_fit(tensors, layout, lanes=self._largest_call(), **how)
                pieces = [slice(first, min(first + size, len(stack))) for first in range(0, len(stack), size)]
                calls = [piece for piece in pieces if any(piece.start <= row < piece.stop for row in rows)]
                computed = [row for piece in calls for row in range(piece.start, piece.stop)]
                places = [computed.index(row) for row in rows]
            results = self._evaluated(calls, (tensors, layout))
            for name, parts in zip(found, zip(*((r.losses, *r.metrics) for r in results), strict=True), strict=True):
                found[name].append(torch.cat([part.reshape(-1, examples) for part in parts]))
            tracked_rows = [] if tracked is None else tracked.rows(seen, examples)
            if tracked is not None and tracked_rows:
                tracked.add_labels(label_of(workload.loss, batch, examples), tracked_rows)
                predicted = [one for r in results for one in _predictions(r, r.losses.numel() // examples)]
                for lane, place in enumerate(places):
                    one, losses = predicted[place], found["loss"][-1][place]
                    tracked.add(lane, None if one is None else one[tracked_rows], losses[tracked_rows])
            seen += examples
            given = results[0].weights
            weights.append(torch.ones_like(found["loss"][-1][0]) if given is None else given.reshape(-1, examples)[0])
        weight = on_host(weights)
        if workload.weights is not None:
            check_weights(weight, where=f"the {split} split")
        hosted = {name: on_host(parts)[places] for name, parts in found.items()}
        seconds = (time.perf_counter() - start) / len(rows)
        means = [weighted_means(name, values, weight, seconds) for name, values in hosted.items()]
        return [list(row) for row in zip(*means, strict=True)]

    def _evaluated(self, calls: Sequence[slice], batch: SplitBatch) -> list[StepResult]:
        """Return what each call computes on one batch."""
        results: dict[int, StepResult] = {}
        tensors, layout = batch

        def run(first: int, program: LaneProgram) -> None:
            results[first] = program(lane_tensors(self._stack, first, program.lanes).all, tensors, [])

        tasks = []
        for piece in calls:
            how: dict[str, Any] = {"lanes": piece.stop - piece.start, "stacked": False, "objective": "evaluate"}
            program = self._programs.get(layout, tensors, **how)
            if program.draws or program.changes:
                raise CannotBatch("in evaluation the model draws random numbers or changes its buffers")
            tasks.append(partial(run, piece.start, program))
        self._run(tasks)
        return [results[piece.start] for piece in calls]


def _predictions(result: StepResult, lanes: int) -> Sequence[Tensor | None]:
    """Return what each lane of a call predicted on one batch, shape (examples, ...), or None."""
    if result.prediction is None:
        return [None] * lanes
    return [result.prediction] if lanes == 1 else list(result.prediction)


class _Call:
    """The rows from `first` on, as long as the stack is packed as it is now."""

    def __init__(self, stack: LaneStack, first: int, lanes: int) -> None:
        self.rows, self.lanes = slice(first, first + lanes), lanes
        self.planned: list[tuple[LaneProgram, list[Tensor]]] = []
        self._streams = stack.streams[self.rows]
        self._tensors = lane_tensors(stack, first, lanes)
        self._grad = stack.grad[self.rows]

    def plan(self, batches: Mapping[int, Sequence[SplitBatch]], programs: LanePrograms, objective: Objective) -> None:
        """Find program and tensors of each micro-batch."""
        stacked = len(set(self._streams)) > 1
        self.planned = []
        for number, batch in enumerate(batches[self._streams[0]]):
            tensors, layout = stack_batches([batches[s][number] for s in self._streams]) if stacked else batch
            program = programs.get(layout, tensors, lanes=self.lanes, stacked=stacked, objective=objective)
            self.planned.append((program, tensors))

    def run(self, generators: Sequence[torch.Generator], found: list[StepResult]) -> None:
        """Run the step: write gradients into the stack, let buffers advance, and append the result of each micro-batch."""
        for program, tensors in self.planned:
            result = program(self._tensors.all, tensors, generators[self.rows])
            grads = [
                self._grad.new_zeros((self.lanes, p.numel() // self.lanes)) if g is None else g.reshape(self.lanes, -1)
                for g, p in zip(result.grads, self._tensors.trained, strict=True)
            ]
            if found:
                self._grad.add_(torch.cat(grads, 1))
            else:
                torch.cat(grads, 1, out=self._grad)
            for buffer, value in zip(self._tensors.buffers, result.buffers, strict=True):
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
        message = (str(error).strip().splitlines() or ["no message"])[0]
        raise CannotBatch(f"the traced step failed ({type(error).__name__}: {message})") from error


def verify(stack: LaneStack, loop: Gradients, traced: Gradients, batches: Sequence[Sequence[MicroBatches]]) -> None:
    """Compare loss, gradient and buffers of every lane over some steps, random draws included; the stack is put back.

    A loss is continuous and must agree. A gradient is not, where there are ReLUs or maxima: at most half of the gradients may differ,
    by no more than one unit can change.

    Raises:
        CannotBatch: something differs; it is named.
    """
    attributes = [(module, dict(vars(module))) for model in stack.models for module in model.modules()]

    def run(gradients: Gradients) -> list[dict[str, Tensor]]:
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
