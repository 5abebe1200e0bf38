"""Softmax and masks in another form give the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.helpers.graphs import Graph, assert_equal, record
from workbench.train.traced.graph.softmax import add_masks, widen_softmax

aten = torch.ops.aten
G = torch.Generator().manual_seed(2)
DTYPES = [torch.float32, torch.float64]


def narrow_nodes(graph: Graph) -> list[int]:
    """Return how far apart the values of each softmax lie in memory."""
    found = []
    for node in graph.graph.nodes:
        if "softmax" in str(node.target):
            dim = int(node.args[2] if "backward" in str(node.target) else node.args[1])
            found.append(node.args[0].meta["tensor"].stride[dim])
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("shape", [(7, 10), (3, 7, 10), (2, 3, 5, 4)])
@pytest.mark.parametrize("dim", [-1, 1])
def test_few_values_are_laid_out_apart(shape: tuple[int, ...], dim: int, log: bool, dtype: torch.dtype) -> None:
    x, g = (torch.randn(shape, generator=G, dtype=torch.float64).to(dtype) for _ in range(2))
    forward = aten._log_softmax if log else aten._softmax
    backward = aten._log_softmax_backward_data if log else aten._softmax_backward_data

    def function(x: Tensor, g: Tensor) -> list[Tensor]:
        out = forward(x, dim, False)
        return [out, backward(g, out, dim, dtype)]

    graph = record(function, [x], [g])
    widen_softmax(graph.graph)
    graph.refresh()
    assert_equal(graph.run(), graph.results)
    if dim == -1 or len(shape) == 2:
        assert all(stride > 1 for stride in narrow_nodes(graph))


@pytest.mark.parametrize("layout", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_any_layout_in_memory(layout: tuple[int, int, int]) -> None:
    base = torch.randn(3, 7, 10, generator=G)
    x, g = base.permute(layout), torch.randn(base.permute(layout).shape, generator=G)

    def function(x: Tensor, g: Tensor) -> list[Tensor]:
        out = aten._log_softmax(x, 2, False)
        return [out, aten._log_softmax_backward_data(g, out, 2, torch.float32)]

    graph = record(function, [x], [g])
    widen_softmax(graph.graph)
    graph.refresh()
    assert_equal(graph.run(), graph.results)


def test_many_values_stay_where_they_are() -> None:
    graph = record(lambda x: x.softmax(-1), [torch.randn(4, 32, generator=G)])
    before = graph.targets()
    widen_softmax(graph.graph)
    assert graph.targets() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_are_added_or_multiplied(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 4, generator=G, dtype=torch.float64).to(dtype)

    def function(x: Tensor) -> list[Tensor]:
        future = torch.ones(4, 4, dtype=torch.bool).triu(1)
        return [x.masked_fill(future, -math.inf), x.masked_fill(future, 0)]

    graph = record(function, [x])
    add_masks(graph.graph, graph.stages)
    graph.refresh()
    assert not any("masked_fill" in t for t in graph.targets())
    assert_equal(graph.run(), graph.results, 0.0)
    assert sorted(t for t in graph.targets() if t in ("add.Tensor", "mul.Tensor")) == ["add.Tensor", "mul.Tensor"]


def test_a_mask_of_the_batch_counts_as_shared() -> None:
    x, keep = torch.randn(3, 5, generator=G), torch.tensor([True, False, True, True, False])
    graph = record(lambda x, keep: x.masked_fill(~keep, -math.inf).softmax(-1), [x], [keep])
    add_masks(graph.graph, graph.stages)
    graph.refresh()
    assert not any("masked_fill" in t for t in graph.targets())
    assert_equal(graph.run(), graph.results)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(x > 0, -math.inf),  # the mask is the lane's own
        lambda x: x.masked_fill(torch.ones(5, dtype=torch.bool), 3.0),  # neither zero nor infinite
        lambda x: (x * 10).long().masked_fill(torch.ones(5, dtype=torch.bool), 0),  # integers
    ],
)
def test_other_masks_stay(function: object) -> None:
    graph = record(function, [torch.randn(3, 5, generator=G)])  # type: ignore[arg-type]
    add_masks(graph.graph, graph.stages)
    assert graph.targets().count("masked_fill.Scalar") == 1
    assert_equal(graph.run(), graph.results)
