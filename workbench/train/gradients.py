"""Loss and gradient of one step for all lanes; `LoopGradients` takes them by plain autograd, one lane after the other."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError, WorkloadError
from workbench.train.evaluation import Evaluation, TrackedExamples, evaluate_each, values_of
from workbench.train.forward import MicroBatches, autocast, has_diverged, is_out_of_memory, per_example
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack, build_model
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_weights

Excuse = Callable[[int, Exception, MicroBatches, bool], bool]
"""(lane, what was raised, batches, training) -> whether that lane counts as diverged instead."""

IN_PLACE_BYTES = 32 * 2**20
"""Gradients that are larger together go to their place one by one as they are taken, and no second set is in memory (rule of thumb)."""
SHORT = (torch.bfloat16, torch.float16)
_LENGTHS = {"total_steps", "warmup_steps", "eval_every_steps", "checkpoint_every_steps", "keep_best"}


def is_own_config(workload: Workload, config: TrainConfig) -> bool:
    """Tell whether a trial trains as the workload's own config does, over whatever length."""
    own = workload.config
    return all(getattr(own, f.name) == getattr(config, f.name) for f in fields(own) if f.name not in _LENGTHS)


def fault_of_weights(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    *,
    error: Exception,
    batches: MicroBatches,
    training: bool,
    update: Callable[[Workload, LaneStack, TrainConfig, MicroBatches], object],
) -> bool:
    """Tell whether weights that training has led astray are at fault for an error on these batches: untrained ones do not raise.

    `binary_cross_entropy` asserts that its inputs lie in [0, 1], a Cholesky factor asks for a positive definite matrix: at a learning
    rate that is too high they raise before a loss is NaN. Such a trial has diverged. `update` makes one where the workload has its own step.
    """
    numeric = isinstance(error, (ArithmeticError, AssertionError, RuntimeError, ValueError))
    if not numeric or isinstance(error, WorkbenchError) or is_out_of_memory(error):
        return False
    try:
        with isolated_rng(), torch.set_grad_enabled(training):
            model = build_model(workload, config, device)
            for batch, examples in batches:
                if training and workload.step is not None:
                    update(workload, LaneStack(workload, [config], device), config, [(batch, examples)])
                elif training:
                    with autocast(device, config.precision):
                        _, losses, _ = per_example(workload, model.train(), batch, examples)
                    losses.sum().backward()  # type: ignore[no-untyped-call]
                else:
                    values_of(workload, model.eval(), batch, examples, device=device, precision=config.precision)
    except Exception:
        return False
    return True


def needs_gradient(workload: Workload) -> None:
    """Raise a `WorkloadError` where the updates are a custom step."""
    if workload.step is not None:
        raise WorkloadError("the updates are made by a custom step, and this takes the gradient of a loss")


class LaneLoss(NamedTuple):
    """Weighted mean loss of one update's batch, the squared standard error of that mean, and the sum of weights, each shape (lanes,).

    A step of one's own knows more: what is recorded in place of norm and clipping of `stack.grad`, and further columns.
    """

    loss: Tensor
    squared_se: Tensor
    weight: Tensor | None = None
    core: Mapping[str, Tensor] = {}
    recorded: Mapping[str, Tensor | float] = {}


class LoopGradients:
    """Plain autograd, one lane after the other: for every model, and the measure of every other backend.

    Args:
        share: batches are this process's share of those of many, in which no example need count.
        excused: whether a lane that raises, though its numbers are finite, has diverged; its loss and gradient are NaN then.
    """

    def __init__(
        self, workload: Workload, stack: LaneStack, *, share: bool = False, excused: Excuse | None = None
    ) -> None:
        self._workload, self._stack, self._share, self._excused = workload, stack, share, excused
        self._weights_checked = False
        self.lane = 0

    def __call__(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        """Fill `stack.grad`, let buffers and random state advance, and return the losses; the micro-batches are those of each stream."""
        needs_gradient(self._workload)
        stack = self._stack
        parts = []
        for self.lane, stream in enumerate(stack.streams):
            micro_batches = batches[stream]
            plain = len(micro_batches) == 1 and self._workload.weights is None
            try:
                with stack.rng.lane(self.lane):
                    found = self._single(*micro_batches[0]) if plain else self._weighted(micro_batches)
                    while self._overflown() and stack.scale is not None and stack.scale.settle():
                        found = self._single(*micro_batches[0]) if plain else self._weighted(micro_batches)
                    parts.append(found)
            except Exception as error:
                if not self._diverged(self.lane, error, micro_batches, True):
                    raise
                nothing = stack.grad[self.lane].fill_(math.nan)[0].clone()
                parts.append((nothing, nothing, torch.ones_like(nothing)))
        loss, squared_se, weight = zip(*parts, strict=True)
        weighted = self._workload.weights is not None
        return LaneLoss(torch.stack(loss), torch.stack(squared_se), torch.stack(weight) if weighted else None)

    def evaluate(
        self, split: str, batch_size: int, *, rows: Sequence[int], tracked: TrackedExamples | None = None
    ) -> list[list[Evaluation]]:
        """Return the evaluations of the lanes in `rows`, made one after the other."""
        stack = self._stack
        random = [stack.rng.state(row) for row in rows]

        @contextmanager
        def within(place: int) -> Iterator[None]:
            with stack.rng.lane(rows[place], training=False):
                yield
            if place == len(rows) - 1:
                stack.rng.check_host()

        try:
            return evaluate_each(
                self._workload,
                [stack.models[row] for row in rows],
                split=split,
                batch_size=batch_size,
                device=stack.device,
                precision=stack.precision,
                within=within,
                tracked=tracked,
                diverged=lambda place, error, *batch: self._diverged(rows[place], error, [batch], False),
            )
        finally:
            for row, state in zip(rows, random, strict=True):
                stack.rng.load(row, state)

    def describe(self) -> dict[str, Any]:
        """Return how it is done."""
        return {"gradients": "loop"}

    def close(self) -> None:
        """Do nothing."""

    def _overflown(self) -> bool:
        """Tell whether a scaled gradient is to be taken again: training itself skips it instead."""
        scaled = self._stack.scale is not None and self._excused is None
        return scaled and not bool(torch.isfinite(self._stack.grad[self.lane]).all())

    def _diverged(self, lane: int, error: Exception, batches: MicroBatches, training: bool) -> bool:
        if has_diverged(error, self._stack.models[lane]):
            return True
        return self._excused is not None and self._excused(lane, error, batches, training)

    def _forward(self, batch: Any, examples: int) -> tuple[Tensor, Tensor | None]:
        with autocast(self._stack.device, self._stack.precision):
            _, losses, weights = per_example(self._workload, self._stack.models[self.lane], batch, examples)
        return losses, weights

    def _differentiate(self, value: Tensor, *, add: bool) -> None:
        parameters, scale = self._stack.parameters[self.lane], self._stack.scale
        grads: Sequence[Tensor | None]
        if scale is None and self._stack.grad[self.lane].nbytes > IN_PLACE_BYTES:
            torch.autograd.backward(value, inputs=self._stack.accumulators(self.lane, add=add))
            return
        if scale is None:
            grads = torch.autograd.grad(value, parameters, allow_unused=True)
        else:
            grads = scale.differentiate(value, parameters)
        self._stack.collect(self.lane, grads, add=add)

    def _single(self, batch: Any, examples: int) -> tuple[Tensor, Tensor, Tensor | None]:
        losses, _ = self._forward(batch, examples)
        if not losses.dim():
            self._differentiate(losses, add=False)
            loss = losses.detach().clone()
            loss = loss.float() if loss.dtype in SHORT else loss
            return loss, torch.full_like(loss, math.nan), None
        loss = losses.mean(dtype=torch.float32) if losses.dtype in SHORT else losses.mean()
        self._differentiate(loss, add=False)
        each = losses.detach().to(loss.dtype)
        spread = each.var() if examples > 1 else each.new_full((), math.nan)
        return loss.detach(), spread / examples, None

    def _weighted(self, micro_batches: MicroBatches) -> tuple[Tensor, Tensor, Tensor | None]:
        kept: list[tuple[Tensor, Tensor]] = []
        per_batch = False
        for number, (batch, examples) in enumerate(micro_batches):
            losses, given = self._forward(batch, examples)
            per_batch = per_batch or not losses.dim()
            losses = losses.expand(examples) if per_batch else losses  # a micro-batch weighs as much as it has examples
            weights = torch.ones_like(losses) if given is None else given.to(losses.dtype)
            self._differentiate((weights * losses).sum(), add=number > 0)
            kept.append((losses.detach(), weights))
        losses, weights = (torch.cat(parts) for parts in zip(*kept, strict=True))
        if not self._weights_checked and self._workload.weights is not None:
            # the values only once: it synchronises
            check_weights(weights, where="the first batch of the train split", share=self._share)
            self._weights_checked = True
        mean, divisor = weighted_mean(losses.unsqueeze(0), weights.unsqueeze(0))
        self._stack.grad[self.lane].div_(divisor[0])
        squared_se = torch.full_like(mean.loss[0], math.nan) if per_batch else mean.squared_se[0]
        return mean.loss[0], squared_se, weights.sum()


def weighted_mean(losses: Tensor, weights: Tensor) -> tuple[LaneLoss, Tensor]:
    """Return weighted means of (lanes, examples) with their squared standard errors, and what the summed gradients are divided by."""
    total, n = weights.sum(1), losses.shape[1]
    divisor = torch.where(total > 0, total, 1)
    loss = (weights * losses).sum(1) / divisor
    residuals = weights * (losses - loss.unsqueeze(1))
    squared_se = (residuals**2).sum(1) / divisor**2 * (n / (n - 1) if n > 1 else math.nan)
    return LaneLoss(loss, squared_se), divisor
