"""Lanes evaluated together give what each gives alone, and nothing of theirs moves."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.lane_models import MODELS, REFUSED, lane_workload
from tests.helpers.lane_stacks import CPU, lane_stack, run, updates
from workbench.train.evaluation import Evaluation, evaluate
from workbench.train.lane_stack import LaneStack
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients
from workbench.workloads.base import Workload


def alone(workload: Workload, stack: LaneStack, split: str = "validation") -> list[list[Evaluation]]:
    size = workload.config.evaluation_batch
    precision = workload.config.precision
    return [
        evaluate(workload, model, split=split, batch_size=size, device=CPU, precision=precision)
        for model in stack.models
    ]


def assert_same(found: list[list[Evaluation]], expected: list[list[Evaluation]], rtol: float = 1e-10) -> None:
    for ours, plain in zip(found, expected, strict=True):
        for a, b in zip(ours, plain, strict=True):
            assert a._replace(value=0, seconds=0) == b._replace(value=0, seconds=0)
            assert a.value == pytest.approx(b.value, rel=rtol)
            assert a.seconds > 0


@pytest.mark.parametrize("per_call", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, per_call: int) -> None:
    if name in ("lstm", "gru", "spectral_norm") and per_call > 1:
        return  # torch.func.vmap knows no rule for what these call
    workload = lane_workload(MODELS[name])
    stack = lane_stack(workload, 3)
    way = VmapGradients(workload, stack, lanes_per_call=per_call)
    way(updates(workload, 1)[0])  # so that running statistics differ
    assert_same(way.evaluate("validation", 12), alone(workload, stack))


def test_weights_splits_and_chosen_rows() -> None:
    workload = lane_workload(MODELS["batch_norm"]).replace(weights=lambda batch: (batch[1] % 3).double())
    stack = lane_stack(workload, 5)
    way = VmapGradients(workload, stack, lanes_per_call=2, threads=2)
    for split in ("train", "validation"):
        expected = alone(workload, stack, split)
        assert_same(way.evaluate(split, 12), expected)
        assert_same(way.evaluate(split, 12, rows=[4, 1]), [expected[4], expected[1]])
    way.close()


def test_half_precision() -> None:
    workload = lane_workload(MODELS["mlp"], dtype=torch.float32, precision="bfloat16")
    stack = lane_stack(workload, 3)
    found = VmapGradients(workload, stack, lanes_per_call=3).evaluate("validation", 12)
    assert_same([row[:1] for row in found], [row[:1] for row in alone(workload, stack)], 0.02)


@pytest.mark.parametrize("name", ["branching", "python_random"])
def test_what_cannot_be_traced_is_refused(name: str) -> None:
    workload = lane_workload(REFUSED[name][0])
    way = VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2)
    with pytest.raises(CannotBatch):
        way.evaluate("validation", 12)


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "noisy", "caching"])
def test_nothing_moves(name: str) -> None:
    workload = lane_workload(MODELS[name])
    stack, steps = lane_stack(workload, 3), updates(workload, 2)
    way = VmapGradients(workload, stack, lanes_per_call=3)
    expected = run(stack, way, steps)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    way.evaluate("validation", 12)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for model in stack.models for module in model.modules())
    for a, b in zip(run(stack, way, steps), expected, strict=True):
        assert torch.equal(a.grad, b.grad)
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
        assert all(torch.equal(x, y) for x, y in zip(a.random, b.random, strict=True))
