"""Where along the real update the loss stops falling: the scale of learning rates for a model, by forward passes alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from workbench.config import TrainConfig
from workbench.train.batches import train_batches
from workbench.train.forward import autocast, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.lane_stack import LaneStack
from workbench.train.rng import isolated_rng
from workbench.train.update_rules import make_updater
from workbench.workloads.base import Workload

__all__ = ["CriticalLR", "measure_critical_lr"]


class CriticalLR(NamedTuple):
    """A bracket of the smallest lr that raises the loss along the first update.

    Attributes:
        below: largest lr tried that still lowered the loss, 0 if none did.
        above: smallest lr tried that raised it, inf if none did.
        forwards: forward passes it took.
    """

    below: float
    above: float
    forwards: int

    @property
    def value(self) -> float | None:
        """The geometric middle of the bracket, None where there is no bracket."""
        return math.sqrt(self.below * self.above) if self.below > 0 and math.isfinite(self.above) else None


def measure_critical_lr(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    *,
    factor: float = 4.0,
    tolerance: float = 1.1,
    decades: float = 12.0,
) -> CriticalLR:
    """Bracket the critical lr of a fresh model on its first batch.

    Starts at 2 |loss| / (g.u), where a parabola with its minimum at 0 would be back at its start, multiplies or
    divides by `factor` per forward pass until the loss is bracketed, then halves the bracket. The model is this
    function's own; the caller's random state is left bit for bit as it was.

    Args:
        workload: what to look at.
        config: decides the update's direction; its lr and schedule play no part.
        device: where.
        factor: step of the search.
        tolerance: the bracket's final ratio.
        decades: how far the search may go from its start, both ways.
    """
    config = config.replace(warmup_steps=0, schedule="constant")
    with isolated_rng():
        stack = LaneStack(workload, [config], device)
        stack.models[0].train()
        batches = next(train_batches(workload, config, device))
        start = float(LoopGradients(workload, stack)([batches]).loss)
        origin = stack.values.clone()
        lr = torch.full((1, 1), config.peak_lr, dtype=origin.dtype, device=device)
        updater = make_updater([config], stack.values, stack.parameters)
        direction = updater.update(stack.values, stack.grad, lr, 0) / config.peak_lr
        slope = float((stack.grad * direction).sum())
        if not math.isfinite(slope) or slope <= 0 or not math.isfinite(start):
            return CriticalLR(0.0, math.inf, 0)

        def raises(step: float) -> bool:
            stack.values.copy_(origin - step * direction)
            total = weight = 0.0
            with torch.no_grad(), isolated_rng():
                for batch, examples in batches:
                    with autocast(device, config.precision):
                        _, losses, weights = per_example(workload, stack.models[0], batch, examples)
                    weights = torch.ones_like(losses) if weights is None else weights
                    total, weight = total + float((weights * losses).sum()), weight + float(weights.sum())
            return not total / weight < start

        first = 2 * abs(start) / slope if start else 1.0
        return _bracket(raises, first, factor=factor, tolerance=tolerance, decades=decades)


def _bracket(raises: object, first: float, *, factor: float, tolerance: float, decades: float) -> CriticalLR:
    assert callable(raises)
    tries = math.ceil(decades * math.log(10) / math.log(factor))
    forwards = 1
    low, high = (0.0, first) if raises(first) else (first, math.inf)
    while (low == 0.0 or math.isinf(high)) and forwards <= tries:
        probe = high / factor if low == 0.0 else low * factor
        low, high = (low, probe) if raises(probe) else (probe, high)
        forwards += 1
    while low > 0.0 and math.isfinite(high) and high / low > tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if raises(middle) else (middle, high)
        forwards += 1
    return CriticalLR(low, high, forwards)
