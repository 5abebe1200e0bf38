"""Memory is written over only where nobody looks at it any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.graphs import Graph, assert_equal, record
from workbench.train.traced.graph.reuse import reuse_memory

G = torch.Generator().manual_seed(4)
X, Y = (torch.randn(80, 80, generator=G, dtype=torch.float64) for _ in range(2))


def reused(function: Callable[..., object]) -> Graph:
    graph = record(function, [X, Y])
    reuse_memory(graph.graph, graph.stages)
    x, y = X.clone(), Y.clone()
    assert_equal(graph.run(), graph.results, 0.0)
    assert torch.equal(X, x)
    assert torch.equal(Y, y)
    return graph


def in_place(graph: Graph) -> int:
    return sum(target.split(".")[0].endswith("_") or "grad_input" in target for target in graph.targets())


def test_a_chain_works_in_one_place() -> None:
    graph = reused(lambda x, y: ((x @ y).relu() * 3 + y).div(2).neg().exp().sqrt().tanh().sigmoid())
    assert in_place(graph) == 9


def test_the_second_operand_may_be_the_one_that_dies() -> None:
    assert in_place(reused(lambda x, y: x + x @ y)) == 1
    assert in_place(reused(lambda x, y: x * (x @ y))) == 1
    assert in_place(reused(lambda x, y: x - x @ y)) == 0  # it does not commute


def test_a_gradient_of_relu_overwrites_the_gradient() -> None:
    graph = reused(lambda x, y: torch.ops.aten.threshold_backward(x @ y, x, 0))
    assert graph.targets()[-1] == "threshold_backward.grad_input"


def test_a_transposed_operand_keeps_its_layout() -> None:
    assert in_place(reused(lambda x, y: (x @ y).t().relu())) == 1


def test_a_row_of_a_product_may_be_overwritten_alone() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).view(2, 40, 80)[1].view(3200).repeat(2).relu()

    reused(function)


NOT: dict[str, Callable[[Tensor, Tensor], object]] = {
    "an input": lambda x, y: x.relu(),
    "a view of an input": lambda x, y: x.t().relu(),
    "read later": lambda x, y: [p := x @ y, p.relu()],
    "a view is read later": lambda x, y: [(p := x @ y).relu(), p.t()[0]],
    "a result": lambda x, y: [(p := x @ y), p * 2],
    "broadcast": lambda x, y: (x @ y)[:1] + y,
    "another type": lambda x, y: (x @ y).to(torch.float32) * y,
    "both operands": lambda x, y: (p := x @ y) * p.t(),
    "expanded": lambda x, y: (x @ y)[:1].expand(80, 80).relu(),
    "a constant": lambda x, y: torch.ones(80, 80, dtype=torch.float64).exp() * x,
    "alpha": lambda x, y: torch.add(x @ y, y, alpha=2),
    "small": lambda x, y: (x[:2] @ y).relu(),
}


@pytest.mark.parametrize("kind", NOT)
def test_what_someone_still_looks_at_stays(kind: str) -> None:
    assert in_place(reused(NOT[kind])) == 0
