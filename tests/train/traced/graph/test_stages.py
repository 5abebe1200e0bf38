"""What runs once, with a batch, or with a call; and what need not run."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.graphs import Graph, assert_equal, record
from workbench.train.traced.graph.stages import Stage, dead_code

W = torch.randn(3, 4, dtype=torch.float64)
X = torch.randn(5, 4, dtype=torch.float64)


def stages(graph: Graph) -> dict[str, Stage]:
    found = graph.stages
    return {n.name: found[n] for n in graph.graph.nodes if n.op == "call_function"}


def test_each_node_runs_as_seldom_as_it_can() -> None:
    def function(w: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.float64).triu()  # once
        seen = x @ mask  # with the batch
        return seen @ w.t().contiguous()  # a view of memory that stays, and the call

    graph = record(function, [W], [X])
    assert stages(graph) == {
        "ones_default": Stage.ONCE,
        "triu_default": Stage.ONCE,
        "mm_default": Stage.BATCH,
        "t_default": Stage.BIND,
        "clone_default": Stage.CALL,
        "mm_default_1": Stage.CALL,
    }
    assert_equal(graph.run(), graph.results)


def test_memory_that_is_written_into_is_made_where_it_is_written() -> None:
    def function(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.zeros(4, dtype=torch.float64)
        table[1:].add_(1)  # still once: nothing but constants
        box = torch.zeros(4, dtype=torch.float64)
        box.add_(x.sum(0))
        box.add_(w.sum(0))
        return table, box

    graph = record(function, [W], [X])
    found = stages(graph)
    assert {found[name] for name in ("zeros_default", "slice_tensor", "add__tensor")} == {Stage.ONCE}
    assert {found[name] for name in ("zeros_default_1", "add__tensor_1", "add__tensor_2")} == {Stage.CALL}
    assert found["sum_dim_int_list"] is Stage.BATCH
    assert_equal(graph.run(), graph.results)


def test_what_nobody_needs_is_removed_and_random_draws_stay() -> None:
    def function(x: Tensor) -> Tensor:
        x.exp()
        torch.rand(3)
        box = torch.zeros(4, dtype=torch.float64)
        box.add_(1)  # nobody reads the box
        kept = torch.zeros(4, dtype=torch.float64)
        kept[0].add_(1)
        return x + kept

    graph = record(function, batch=[X])
    assert graph.targets() == ["rand.default", "zeros.default", "select.int", "add_.Tensor", "add.Tensor"]
    before = graph.targets()
    dead_code(graph.graph)
    assert graph.targets() == before


def test_a_write_before_the_last_read_stays_and_one_after_it_goes() -> None:
    def function(x: Tensor) -> Tensor:
        box = x.clone()
        box.mul_(2)
        out = box + 1
        box.mul_(3)
        return out

    graph = record(function, batch=[X])
    assert graph.targets() == ["clone.default", "mul_.Tensor", "add.Tensor"]
