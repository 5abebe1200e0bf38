"""A program is cleaned up for every model, checked against the step it was recorded from, and touches nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.helpers.lane_models import MODELS, lane_workload
from tests.helpers.lane_stacks import lane_stack, loop, updates
from workbench.train.traced import program as lane_program
from workbench.train.traced.batch import split_batch
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.graph.recorder import CannotRecord
from workbench.train.traced.program import LaneProgram, build_program
from workbench.train.traced.step import Objective, lane_tensors
from workbench.workloads.registry import load_workload

ALONE = ("lstm", "gru", "spectral_norm")


def program(name: str, lanes: int, objective: Objective = "mean", dtype: torch.dtype = torch.float32) -> LaneProgram:
    workload = lane_workload(MODELS[name], dtype=dtype)
    (batch,) = updates(workload, 1)[0][0]
    tensors, layout = split_batch(*batch)
    stack = lane_stack(workload, max(lanes, 2))
    return build_program(workload, stack, layout, tensors, lanes=lanes, stacked=False, objective=objective)


@pytest.mark.parametrize("objective", ["mean", "sum", "evaluate"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALONE])
def test_every_model_is_cleaned_up(name: str, lanes: int, objective: Objective) -> None:
    assert program(name, lanes, objective).clean


@pytest.mark.parametrize("name", ALONE)
def test_recurrent_ones_are_cleaned_up_alone(name: str) -> None:
    assert program(name, 1).clean


@pytest.mark.parametrize(
    "name", ["digits_mlp", "digits_cnn", "digits_resnet", "source_text", "breast_cancer", "quadratic"]
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_bundled_workload(name: str, lanes: int) -> None:
    workload = load_workload(name)
    steps = updates(workload, 1)
    stack = lane_stack(workload, 2)
    tensors, layout = split_batch(*steps[0][0][0])
    built = build_program(workload, stack, layout, tensors, lanes=lanes, stacked=False, objective="mean")
    assert built.clean
    with torch.no_grad():
        bound, prepared = built.bind(*lane_tensors(stack, 0, lanes).all), built.prepare(*tensors)
        result = built.call(bound, prepared, stack.rng.generators[:lanes])
    (expected,) = loop(workload, stack, steps)
    losses = result.losses.view(lanes, -1).mean(1)
    torch.testing.assert_close(losses, expected.loss[:lanes], rtol=1e-5, atol=0)
    flat = torch.cat([g.reshape(lanes, -1) for g in result.grads if g is not None], 1)
    wrong = (flat - expected.grad[:lanes]).abs() > 2e-5 * expected.grad.abs().max()
    assert wrong.double().mean() < 0.1  # rounding switches a unit on or off now and then


def test_what_a_program_knows_about_itself() -> None:
    plain, noisy = program("mlp", 3), program("buffered", 3)
    assert (plain.lanes, plain.draws, plain.changes, plain.loss_dtype) == (3, False, [], torch.float32)
    assert noisy.changes == [0, 1, 2]
    assert program("dropout", 3).draws
    assert not program("dropout", 3, "evaluate").draws
    assert program("batch_norm", 1, "evaluate").changes == []


def wrong(graph: fx.Graph, *args: Any, **kwargs: Any) -> None:
    """Stand in for a clean-up that doubles a result."""
    output = graph.output_node()
    grads, *rest = output.args[0]
    with graph.inserting_before(output):
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (grads[0], 2))
    twice.meta = dict(grads[0].meta) | {"base": twice}
    output.args = ([[twice, *grads[1:]], *rest],)


def raises(graph: fx.Graph, *args: Any, **kwargs: Any) -> None:
    raise KeyError("a bug")


@pytest.mark.parametrize("broken", [wrong, raises])
def test_a_clean_up_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    monkeypatch.setattr(lane_program, "clean_up", broken)
    assert not program("mlp", 3).clean


def test_numbers_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = lane_program.lower

    def off(*args: Any) -> Any:
        lowered, results = lower(*args)
        return lowered, [None if t is None else t + 0.01 for t in results]

    monkeypatch.setattr(lane_program, "lower", off)
    with pytest.raises(CannotBatch, match="gives other numbers than the step itself"):
        program("mlp", 3)


def test_out_of_memory_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lane_program, "lower", full)
    with pytest.raises(torch.OutOfMemoryError):
        program("mlp", 3)


def test_draws_that_do_not_pair_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CannotRecord("draws differ")

    monkeypatch.setattr(lane_program, "draw_per_lane", refuse)
    with pytest.raises(CannotBatch, match="draws differ"):
        program("dropout", 3)
