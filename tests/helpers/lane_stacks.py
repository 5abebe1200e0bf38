"""Stacks of lanes and batches for them, and what plain autograd computes on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.train.batches import train_batches
from workbench.train.forward import MicroBatches
from workbench.train.gradients import LoopGradients
from workbench.train.lanes.vmap_gradients import Step
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload

CPU = torch.device("cpu")


class Seen(NamedTuple):
    """What one step leaves behind."""

    loss: Tensor
    squared_se: Tensor
    grad: Tensor
    buffers: dict[str, Tensor]
    random: list[Tensor]


def lane_stack(workload: Workload, lanes: int, *, streams: Sequence[int] = ()) -> LaneStack:
    """Return a stack of lanes that differ in their seed, in training mode."""
    configs = [workload.config.replace(shared_seed=k) for k in range(lanes)]
    stack = LaneStack(workload, configs, CPU, streams=streams)
    for model in stack.models:
        model.train()
    return stack


def updates(workload: Workload, count: int, *, streams: int = 1) -> list[list[MicroBatches]]:
    """Return the batches of some updates, for each stream its own order."""
    orders = [train_batches(workload, workload.config.replace(per_host_seed=s), CPU) for s in range(streams)]
    return [[next(order) for order in orders] for _ in range(count)]


def run(stack: LaneStack, gradients: Step, steps: Sequence[Sequence[MicroBatches]]) -> list[Seen]:
    """Return what each step leaves, and put the stack back; parameters do not move, buffers may be replaced."""
    seen = []
    with stack.untouched():
        for step in steps:
            loss = gradients(step)
            buffers = {n: torch.stack([m.get_buffer(n) for m in stack.models]).detach().clone() for n in stack.buffers}
            random = [stack.rng.state(lane)["torch"].clone() for lane in range(len(stack))]
            seen.append(Seen(loss.loss.clone(), loss.squared_se.clone(), stack.grad.clone(), buffers, random))
    return seen


def loop(workload: Workload, stack: LaneStack, steps: Sequence[Sequence[MicroBatches]]) -> list[Seen]:
    """Return what plain autograd leaves."""
    return run(stack, LoopGradients(workload, stack), steps)


def assert_same(found: Sequence[Seen], expected: Sequence[Seen], rtol: float) -> None:
    """Compare each step: numbers to `rtol` of the largest, random state bit for bit."""
    for ours, plain in zip(found, expected, strict=True):
        for a, b in ((ours.loss, plain.loss), (ours.squared_se, plain.squared_se), (ours.grad, plain.grad)):
            torch.testing.assert_close(a, b, rtol=0, atol=rtol * float(b.abs().nan_to_num().max()), equal_nan=True)
        for name, buffer in plain.buffers.items():
            torch.testing.assert_close(ours.buffers[name], buffer, rtol=rtol, atol=rtol)
        for a, b in zip(ours.random, plain.random, strict=True):
            assert torch.equal(a, b), "the lanes' generators went elsewhere"
