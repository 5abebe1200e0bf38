"""The written function is the graph: same results, nothing held longer than needed, any argument."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.graphs import assert_equal, record
from workbench.train.traced.graph.code import binding, write_function

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(-math.inf, 0.5) + torch.full((6,), math.nan).nan_to_num(),
        lambda x: x.to(torch.float64).to(memory_format=torch.contiguous_format),
        lambda x: torch.cat([x, x[:, 1:3]], 1).index_select(1, torch.tensor([0, 7])),
        lambda x: torch.stack(list(x.split([1, 2, 3], 1)[2].unbind(0))),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x: x.sum((0, 1), keepdim=True, dtype=torch.float64),
        lambda x: torch.sort(x, dim=1, descending=True).values,
        lambda x: torch.where(x > 0, x, -1.0).slice_scatter(x[:2], 0, 1, 3),
        lambda x: torch.div(x, 0.3, rounding_mode="floor").std(1, correction=0),
        lambda x: torch.logical_or(x > 1, x < -1).any(1),
    ],
)
def test_any_argument(function: Any) -> None:
    graph = record(function, batch=[X])
    assert_equal(graph.run(), graph.results, 0.0)


def test_nothing_to_compute_and_missing_results() -> None:
    run = write_function([], inputs=[], outputs=[None], constants={}, callables={})
    assert run() == (None,)
    assert write_function([], inputs=[], outputs=[], constants={}, callables={})() == ()


def test_tensors_are_let_go_after_their_last_use() -> None:
    graph = record(lambda x: x.exp().sin().cos(), batch=[X])
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    alive: list[weakref.ref[Tensor]] = []
    counts = []

    def watched(node: Any) -> Any:
        def call(*args: Any) -> Tensor:
            gc.collect()
            counts.append(sum(ref() is not None for ref in alive))
            out: Tensor = node.target(*args)
            alive.append(weakref.ref(out))
            return out

        return call

    (given,) = graph.inputs
    run = write_function(
        nodes, inputs=[given], outputs=[nodes[-1]], constants={}, callables={n: watched(n) for n in nodes}
    )
    result = run(X)
    assert counts == [0, 1, 1]
    assert_equal(result, graph.results, 0.0)


def test_a_fast_binding_is_torchs_own_function() -> None:
    aten = torch.ops.aten
    assert binding(aten.mm.default) is torch.mm
    assert binding(aten.view.default) is torch.Tensor.view
    assert binding(aten.gelu.default) is torch._C._nn.gelu
    assert binding(aten.slice.Tensor)(X, 1, 0, 2).shape == (4, 2)
    assert binding(math.sin) is math.sin
