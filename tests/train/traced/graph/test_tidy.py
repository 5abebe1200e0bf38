"""Tidying gives the same numbers from fewer operations."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.graphs import Graph, assert_equal, record
from workbench.train.traced.graph.tidy import tidy

W = torch.randn(3, 4, dtype=torch.float64)
X = torch.randn(5, 4, dtype=torch.float64)


def tidied(graph: Graph) -> list[str]:
    tidy(graph.graph)
    assert_equal(graph.run(), graph.results, 0.0)
    return graph.targets()


def test_views_that_change_nothing_go() -> None:
    graph = record(lambda x: x.detach().view(5, 4).expand(5, 4).transpose(0, 1).t().exp(), batch=[X])
    assert tidied(graph) == ["exp.default"]


def test_a_product_with_one_goes_and_with_two_stays() -> None:
    assert tidied(record(lambda x: (x * 1).div(1.0).exp() * 2, batch=[X])) == ["exp.default", "mul.Tensor"]
    whole = record(lambda x: torch.arange(3) * 1.0 + x[0, :3], batch=[X])
    assert "mul.Tensor" in tidied(whole)  # it makes floats of integers


def test_a_copy_that_is_only_read_goes_and_one_that_is_written_stays() -> None:
    assert tidied(record(lambda x: x.clone().exp(), batch=[X])) == ["exp.default"]

    def writes(x: Tensor) -> Tensor:
        y = x.clone()
        z = y * 1
        y.add_(1)
        return y + z

    assert tidied(record(writes, batch=[X])).count("clone.default") == 1
    assert "mul.Tensor" in tidied(record(writes, batch=[X]))


def test_what_takes_only_a_shape_is_made_once() -> None:
    graph = record(lambda w: torch.ones_like(w) + torch.zeros_like(w) + w.new_full((3, 4), 2.0), [W])
    tidied(graph)
    assert all("like" not in t and "new" not in t for t in graph.targets())
    strided = record(lambda w: torch.ones_like(w.t()).view(-1), [W.t().contiguous().t()])
    assert_equal(strided.run(), strided.results)


def test_the_same_is_computed_once_unless_it_draws() -> None:
    graph = record(lambda x: x.exp() * 2 + x.exp() * 2.0, batch=[X])
    assert tidied(graph).count("exp.default") == 1
    assert graph.targets().count("mul.Tensor") == 2  # 2 and 2.0 are not the same
    draws = record(lambda x: torch.rand(3) + torch.rand(3), batch=[X])
    tidy(draws.graph)
    assert draws.targets().count("rand.default") == 2


def test_zeros_that_are_written_into_stay_apart() -> None:
    def function(x: Tensor) -> Tensor:
        a, b = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        a.add_(x[0])
        return a + b

    assert tidied(record(function, batch=[X])).count("zeros.default") == 2


def test_signs_of_zero_are_not_the_same() -> None:
    graph = record(
        lambda x: torch.copysign(x, torch.full((4,), 0.0)) + torch.copysign(x, torch.full((4,), -0.0)), batch=[X]
    )
    tidied(graph)
