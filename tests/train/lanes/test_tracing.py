"""What is recorded, and what is refused: values that are read, attributes that change, models that differ; the clean-up is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tests.helpers.lane_models import MODELS, lane_workload
from tests.helpers.lane_stacks import lane_stack, updates
from workbench.train.lanes import program
from workbench.train.lanes.recorder import CannotBatch, Recorder
from workbench.train.lanes.run import VmapGradients
from workbench.train.lanes.step import (  # fmt: skip
    ClassLosses,
    check_alike,
    split_batch,
    stack_batches,
)

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Own(Tensor):
    pass


def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def recorded(function: Callable[[Tensor], Any]) -> None:
    recorder = Recorder()
    recorder.placeholder("x", X)
    with torch.no_grad(), recorder:
        function(X)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branch, r"reads the value of a tensor .*line \d+: .*x\.sum\(\) > 0"),
        (lambda x: x * float(torch.zeros(()).add_(x.sum())), "reads the value"),  # a constant that was written into
        (lambda x: x * x.sum(1).tolist()[0], "reads the value"),
        (lambda x: x * x.detach().numpy().sum(), "reads the value"),
        (lambda x: x.nonzero(), "a shape depends on the values"),
        (lambda x: x[x > 0], "a shape depends on the values"),
        (lambda x: torch.rand(3, generator=torch.Generator()), "a generator of its own"),
        (lambda x: x * torch.ones(()).as_subclass(Own), "a tensor type of its own"),
    ],
)
def test_what_depends_on_values_is_refused(function: Callable[[Tensor], Any], reason: str) -> None:
    with pytest.raises(CannotBatch, match=reason):
        recorded(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.linspace(1, 2, 3).sum().item(),
        lambda x: x * torch.linspace(1, 2, 3).tolist()[1],
        lambda x: x.sum(1)[torch.arange(3)],
        lambda x: F.dropout(x, 0.0),
    ],
)
def test_values_that_depend_on_no_input_may_be_read(function: Callable[[Tensor], Tensor]) -> None:
    recorded(function)


def wrong(graph: fx.Graph, *args: Any, **kwargs: Any) -> None:
    """Stand in for a clean-up that doubles a result."""
    output = graph.output_node()
    grads, *rest = output.args[0]
    with graph.inserting_before(output):
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (grads[0], 2))
    twice.meta = dict(grads[0].meta) | {"base": twice}
    output.args = (type(output.args[0])([twice, *grads[1:]], *rest),)


def raises(graph: fx.Graph, *args: Any, **kwargs: Any) -> None:
    raise KeyError("a bug")


@pytest.mark.parametrize("broken", [wrong, raises])
def test_a_clean_up_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    workload = lane_workload(MODELS["mlp"])
    monkeypatch.setattr(program, "clean_up", broken)
    way = VmapGradients(workload, lane_stack(workload, 3), lanes_per_call=3)
    way(updates(workload, 1)[0])
    assert [found.clean for found, _ in way._calls[0].planned] == [False]


@pytest.mark.parametrize("part", ["losses", "grads"])
def test_a_program_that_gives_other_numbers_than_the_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    lower = program._lower

    def off(*args: Any) -> Any:
        function, result, size = lower(*args)
        value = getattr(result, part)
        changed = value + 0.01 if part == "losses" else [1.1 * g for g in value]
        return function, result._replace(**{part: changed}), size

    monkeypatch.setattr(program, "_lower", off)
    workload = lane_workload(MODELS["mlp"])
    with pytest.raises(CannotBatch, match="gives other numbers than the step itself"):
        VmapGradients(workload, lane_stack(workload, 3), lanes_per_call=3)(updates(workload, 1)[0])


def test_rows_differ_by_their_norm_and_by_what_is_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    expected = torch.tensor([[3.0, 4.0], [3.0, 4.0], [inf, 1.0], [nan, 1.0], [1.0, 1.0]])
    found = torch.tensor([[3.0, 4.4], [3.0, 4.6], [1.0, 1.0], [nan, 1.0], [nan, 1.0]])
    assert program.differing_rows(expected, found, 0.1) == [1, 2, 4]
    assert program.differing_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]), 1.0) == [1]


class Holder(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.kept = value  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "alike"),
    [
        (lambda k: torch.arange(4), True),
        (lambda k: lambda x: x, True),
        (lambda k: float("nan"), True),
        (lambda k: torch.arange(4) + k, False),
        (lambda k: torch.arange(4).to(torch.int32 if k else torch.int64), False),
        (lambda k: [nn.Linear(2, 2)], False),  # a module that nobody trains
        (lambda k: 0.1 * k, False),
    ],
)
def test_models_that_differ_in_more_than_parameters_are_named(make: Callable[[int], Any], alike: bool) -> None:
    models = [Holder(make(k)) for k in range(2)]
    if alike:
        check_alike(models)
    else:
        with pytest.raises(CannotBatch, match=r"'inner\.kept' of the model is not the same in all trials"):
            check_alike(models)


def test_a_batch_is_put_together_as_it_was_and_its_layout_tells_what_differs() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
    batch = {"a": [x, {"b": (y, None)}], "c": 3, "d": [1, 2.5, True, b"x"]}
    tensors, layout = split_batch(batch, 3)
    assert str(layout.rebuild(tensors)) == str(batch)
    plain = split_batch([x, y, 1], 3)[1]
    assert plain == split_batch([x + 5, y * 2, 1], 3)[1]
    others: list[Any] = [[x, y, 2], [x, y, 1.0], [x, y, True], [x[:2], y, 1], [x.double(), y, 1], [x.t().contiguous().t(), y, 1], (x, y, 1), [y, x, 1]]  # fmt: skip
    assert plain not in [split_batch(other, 3)[1] for other in others]
    (packed,), found = split_batch([x.expand(4, 3, 2)], 4)
    assert packed.is_contiguous()
    assert found.tensors[0][1] == packed.stride()
    stacked, shared = stack_batches([split_batch([x + k, y], 3) for k in range(4)])
    assert torch.equal(stacked[0][2], x + 2)
    assert shared == split_batch([x, y], 3)[1]
    with pytest.raises(CannotBatch, match="batches of different shapes at the same step"):
        stack_batches([split_batch([x], 3), split_batch([x[:2]], 2)])


@pytest.mark.parametrize("form", [{"reduction": "none"}, {}, {"reduction": "sum"}, {"ignore_index": 3}, {"weight": torch.arange(1.0, 5).double()}, {"label_smoothing": 0.1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_losses_of_classes_are_torchs(function: Any, shape: tuple[int, ...], form: dict[str, Any]) -> None:
    if function is F.nll_loss and "label_smoothing" in form:
        return  # it does not smooth
    targets = torch.tensor([0, 3, 3 if "ignore_index" in form else -100, 2, 1])
    targets = targets if len(shape) == 2 else targets.unsqueeze(1).expand(5, 3)
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).requires_grad_()
    expected = function(leaf, targets, **form)
    with ClassLosses():
        found = function(leaf, targets, **form)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(loss.sum(), leaf)[0] for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)
