"""`verify`: before a traced step is trusted, it is held against plain autograd on this model and these batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workbench.train.gradients import Gradients, MicroBatches
from workbench.train.lane_stack import LaneStack
from workbench.train.rng import isolated_rng
from workbench.train.traced.cannot_batch import CannotBatch

__all__ = ["verify"]

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Rule of thumb: norm of the difference that is allowed in a lane, as a share of the norm of what is expected."""
SHORT = 0.1  # rule of thumb: the same for types of fewer digits, and for forward passes in them
KINK = 0.05  # rule of thumb: the same for a gradient in which rounding switched one unit of a ReLU on or off


def verify(stack: LaneStack, loop: Gradients, traced: Gradients, batches: Sequence[Sequence[MicroBatches]]) -> None:
    """Compare loss, gradient and buffers of every lane over some steps, random draws included.

    A loss is continuous and must agree. A gradient is not, where there are ReLUs or maxima: rounding decides now and then
    what lies within a digit of a kink. At most half of the gradients may differ, and by no more than one unit can change.

    Nothing is updated between the steps; buffers and random state advance, and are put back at the end, as is what the
    modules keep in attributes. Gradients are left as they come.

    Args:
        stack: to compute on.
        loop: plain autograd.
        traced: what is to be trusted.
        batches: of each step, as `Gradients` takes them; two show what changes from one step to the next.

    Raises:
        CannotBatch: something differs; it is named.
    """
    with isolated_rng(), _attributes_kept(stack.models):
        expected = _run(stack, loop, batches)
        found = _run(stack, traced, batches)
    tolerance = SHORT if stack.precision == "bfloat16" else TOLERANCES.get(stack.values.dtype, SHORT)
    apart: list[tuple[int, int]] = []  # (step, lane) of gradients that differ by no more than a kink
    for step, (plain, ours) in enumerate(zip(expected, found, strict=True)):
        for name, value in plain.items():
            differ = _lanes_that_differ(value, ours[name], tolerance)
            if name == "gradient":
                apart += [(step, lane) for lane in differ]
                differ = _lanes_that_differ(value, ours[name], max(KINK, tolerance))
            for lane in differ:
                raise CannotBatch(_said(name, step, lane))
    if 2 * len(apart) > len(batches) * len(stack):
        raise CannotBatch(_said("gradient", *apart[0]))


def _said(name: str, step: int, lane: int) -> str:
    return f"the traced step gives another {name} than plain autograd, in lane {lane} of step {step} of a trial run"


def _run(stack: LaneStack, gradients: Gradients, batches: Sequence[Sequence[MicroBatches]]) -> list[dict[str, Tensor]]:
    seen = []
    with stack.untouched():
        for step in batches:
            loss = gradients(step)
            named = [dict(model.named_buffers()) for model in stack.models]  # a model may have replaced a buffer
            buffers = {name: torch.stack([each[name] for each in named]) for name in stack.buffers}
            values = {"loss": loss.loss, "gradient": stack.grad} | buffers
            seen.append({name: value.detach().clone() for name, value in values.items()})
    return seen


def _lanes_that_differ(expected: Tensor, found: Tensor, tolerance: float) -> list[int]:
    """Return the lanes in which two tensors (lanes, ...) differ; where both are not finite they agree."""
    expected, found = (value.reshape(len(value), -1) for value in (expected, found))
    if expected.is_floating_point():
        finite = expected.isfinite()
        difference = torch.where(finite, expected - found, 0).norm(dim=1)
        allowed = tolerance * torch.where(finite, expected, 0).norm(dim=1)
        wrong = ~(difference <= allowed) | (~finite & found.isfinite()).any(1)
    else:
        wrong = (expected != found).any(1)
    lanes: list[int] = wrong.nonzero().flatten().tolist()
    return lanes


@contextmanager
def _attributes_kept(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put the attributes of all modules back after the block."""
    before = [(module, dict(vars(module))) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
