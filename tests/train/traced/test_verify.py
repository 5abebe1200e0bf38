"""The check before a traced step is trusted: it finds what differs, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.lane_models import MODELS, Caching, lane_workload, mlp
from tests.helpers.lane_stacks import lane_stack, updates
from workbench.train.gradients import LaneLoss, LoopGradients, MicroBatches
from workbench.train.lane_stack import LaneStack
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients, verify


class Wrong:
    """Plain autograd, with one thing changed afterwards."""

    def __init__(self, way: LoopGradients, change: Callable[[LaneLoss], LaneLoss]) -> None:
        self._way, self._change = way, change

    def __call__(self, batches: Sequence[MicroBatches]) -> LaneLoss:
        return self._change(self._way(batches))

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def stack_of(name: str) -> tuple[Any, LaneStack]:
    workload = lane_workload(MODELS[name], dtype=torch.float32)
    return workload, lane_stack(workload, 3)


@pytest.mark.parametrize("name", ["mlp", "batch_norm", "dropout", "buffered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_right_step_passes(name: str, dtype: torch.dtype) -> None:
    workload = lane_workload(MODELS[name], dtype=dtype)
    stack = lane_stack(workload, 3)
    verify(
        stack, LoopGradients(workload, stack), VmapGradients(workload, stack, lanes_per_call=3), updates(workload, 2)
    )


def gradient_of_lane_1(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.grad[1] *= 1.1
    return loss


def all_gradients_a_little(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.grad.mul_(1.01)
    return loss


def loss_of_lane_2(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    return loss._replace(loss=loss.loss + torch.tensor([0, 0, 0.01]))


def counter_of_lane_0(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.buffers["2.num_batches_tracked"][0] += 1
    return loss


def not_a_number(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.grad[0, 3] = float("nan")
    return loss


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (gradient_of_lane_1, "another gradient than plain autograd, in lane 1 of step 0"),
        (all_gradients_a_little, "another gradient than plain autograd, in lane 0 of step 0"),
        (loss_of_lane_2, "another loss than plain autograd, in lane 2 of step 0"),
        (counter_of_lane_0, "another 2.num_batches_tracked than plain autograd, in lane 0 of step 0"),
        (not_a_number, "another gradient than plain autograd, in lane 0 of step 0"),
    ],
)
def test_what_differs_is_named(change: Callable[[LaneStack, LaneLoss], LaneLoss], said: str) -> None:
    workload, stack = stack_of("batch_norm")
    loop = LoopGradients(workload, stack)
    with pytest.raises(CannotBatch, match=said):
        verify(stack, loop, Wrong(loop, lambda loss: change(stack, loss)), updates(workload, 2))


def test_a_kink_in_one_gradient_is_no_difference() -> None:
    workload, stack = stack_of("mlp")
    loop, calls = LoopGradients(workload, stack), []

    def once(loss: LaneLoss) -> LaneLoss:
        calls.append(0)
        if len(calls) == 2:
            stack.grad[1] *= 1.01
        return loss

    verify(stack, loop, Wrong(loop, once), updates(workload, 2))
    assert len(calls) == 2


class Clock(nn.Module):
    """Depends on something outside that changes from step to step."""

    time = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        Clock.time += 1
        out: Tensor = self.net(x) * (1 + 0.1 * Clock.time)
        return out


def test_what_changes_outside_the_model_is_found_by_the_numbers() -> None:
    workload = lane_workload(Clock)
    stack = lane_stack(workload, 2)
    way = VmapGradients(workload, stack, lanes_per_call=2)
    with pytest.raises(CannotBatch, match="another loss than plain autograd"):
        verify(stack, LoopGradients(workload, stack), way, updates(workload, 2))


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "buffered", "noisy"])
def test_it_leaves_no_trace(name: str) -> None:
    workload, stack = stack_of(name)
    values, buffers = stack.values.clone(), {name: t.clone() for name, t in stack.buffers.items()}
    states = [stack.rng.state(lane)["torch"] for lane in range(3)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    verify(
        stack, LoopGradients(workload, stack), VmapGradients(workload, stack, lanes_per_call=2), updates(workload, 2)
    )
    assert torch.equal(stack.values, values)
    assert all(torch.equal(stack.buffers[name], t) for name, t in buffers.items())
    assert all(torch.equal(stack.rng.state(lane)["torch"], state) for lane, state in enumerate(states))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for model in stack.models for module in model.modules())


def test_attributes_that_forward_fills_are_put_back() -> None:
    workload = lane_workload(Caching)
    stack = lane_stack(workload, 2)
    verify(
        stack, LoopGradients(workload, stack), VmapGradients(workload, stack, lanes_per_call=1), updates(workload, 2)
    )
    assert [model.table for model in stack.models] == [None, None]
