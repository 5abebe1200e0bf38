"""What runs is written down: every operation, constants, memory that is shared; what cannot be repeated is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.graphs import assert_equal, record
from workbench.train.traced.graph.nodes import base_of, meta, written
from workbench.train.traced.graph.recorder import CannotRecord, Recorder

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_operations_below_autograd_are_recorded_with_their_gradients() -> None:
    weight = torch.randn(3, 6, dtype=torch.float64)
    recorder = Recorder()
    leaf = weight.clone().requires_grad_()
    inputs = [recorder.placeholder("w", leaf), recorder.placeholder("x", X)]
    with recorder:
        (grad,) = torch.autograd.grad((X @ leaf.t()).square().mean(), [leaf])
    recorder.graph.output([recorder.node_of(grad)])
    assert [node.op for node in recorder.graph.nodes][:2] == ["placeholder"] * 2
    assert meta(recorder.node_of(grad)).shape == (3, 6)
    module = torch.fx.GraphModule(nn.Module(), recorder.graph)
    assert_equal(module(weight, X), [2 / 12 * (X @ weight.t()).t() @ X])
    assert inputs[0].name == "w"


def test_a_captured_tensor_becomes_a_constant() -> None:
    scale = torch.tensor(3.0, dtype=torch.float64)
    graph = record(lambda x: x * scale + torch.tensor(1.0), batch=[X])
    assert_equal(graph.run(), [X * 3 + 1])
    assert len([n for n in graph.graph.nodes if n.op == "get_attr"]) == 2


def test_views_know_whose_memory_they_are_and_writes_are_seen() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y.t()[0].add_(1)
        return y

    graph = record(function, batch=[X])
    clone = next(n for n in graph.graph.nodes if "clone" in str(n.target))
    assert all(base_of(n) is clone for n in graph.graph.nodes if n.op == "call_function")
    assert written(graph.graph) == {clone}
    expected = X.clone()
    expected[:, 0] += 1
    assert_equal(graph.run(), [expected])


def test_running_statistics_are_writes_in_training_only() -> None:
    for training in (True, False):
        mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        graph = record(lambda x, m, v: F.batch_norm(x, m, v, training=training), batch=[X, mean, var])  # noqa: B023
        assert {n.name for n in written(graph.graph)} == ({"batch_1", "batch_2"} if training else set())


def test_results_in_several_parts() -> None:
    graph = record(lambda x: [*x.split(2, 1), *torch.max(x, 1), *x.unbind(0)], batch=[X])
    assert_equal(graph.run(), [*X.split(2, 1), *X.max(1), *X.unbind(0)])


def reads(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "if": (reads, r"reads the value of a tensor .*line \d+: return x if x\.sum\(\) > 0"),
    "item": (lambda x: x * x[0, 0].item(), "reads the value"),
    "written constant": (lambda x: x * float(torch.zeros(()).add_(x.sum())), "reads the value"),
    "tolist": (lambda x: x * x.sum(1).tolist()[0], "reads the value"),
    "numpy": (lambda x: x * x.detach().numpy().sum(), "reads the value"),
    "nonzero": (lambda x: x.nonzero(), "a shape depends on the values"),
    "mask": (lambda x: x[x > 0], "a shape depends on the values"),
    "unique": (lambda x: x.unique(), "a shape depends on the values"),
    "generator": (lambda x: torch.rand(3, generator=torch.Generator()), "a generator of its own"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_depends_on_values_is_refused(kind: str) -> None:
    function, reason = REFUSED[kind]
    with pytest.raises(CannotRecord, match=reason):
        record(function, batch=[X])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.linspace(1, 2, 3).sum().item(),
        lambda x: x * torch.linspace(1, 2, 3).tolist()[1],
        lambda x: x[torch.tensor([2, 0])],
        lambda x: x.sum(1)[torch.arange(3)],
        lambda x: F.dropout(x, 0.0),
    ],
)
def test_values_that_depend_on_no_input_may_be_read(function: Callable[[Tensor], Tensor]) -> None:
    assert_equal(record(function, batch=[X]).run(), [function(X)])


def test_hidden_tensors_are_refused() -> None:
    layer = nn.Linear(6, 2).double()
    recorder = Recorder(hidden=layer.parameters())
    recorder.placeholder("x", X)
    with pytest.raises(CannotRecord, match="by another way than its name"), recorder:
        layer(X)
