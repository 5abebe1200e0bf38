"""Records functions of tensors and runs what was recorded, before and after a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from workbench.train.traced.graph.lowering import lower
from workbench.train.traced.graph.recorder import Recorder
from workbench.train.traced.graph.running import refresh
from workbench.train.traced.graph.stages import Stage, dead_code, stage_of


class Graph(NamedTuple):
    """A recorded function."""

    graph: fx.Graph
    inputs: dict[fx.Node, Stage]
    example: dict[fx.Node, Any]
    results: list[Tensor]

    @property
    def stages(self) -> dict[fx.Node, Stage]:
        return stage_of(self.graph, self.inputs)

    def targets(self) -> list[str]:
        """Return what is called, in order, without the namespace."""
        return [str(n.target).removeprefix("aten.") for n in self.graph.nodes if n.op == "call_function"]

    def refresh(self) -> None:
        refresh(self.graph, self.example)

    def run(self) -> list[Tensor]:
        """Return what the graph gives for the example, and check that it can be asked twice."""
        with torch.no_grad():
            lowered, results = lower(self.graph, self.inputs, self.example)
            by_stage = {s: [self.example[n] for n, stage in self.inputs.items() if stage is s] for s in Stage}
            bound, prepared = lowered.bind(*by_stage[Stage.BIND]), lowered.prepare(*by_stage[Stage.BATCH])
            for _ in range(2):
                again = lowered.call(*bound, *prepared, *by_stage[Stage.CALL])
                for a, b in zip(again, results, strict=True):
                    assert (a is None and b is None) or torch.equal(a, b)
        return [t for t in results if t is not None]


def record(function: Callable[..., Any], bind: Sequence[Tensor] = (), batch: Sequence[Tensor] = ()) -> Graph:
    """Record `function(*bind, *batch)`; `bind` is memory that stays, `batch` changes from step to step."""
    recorder = Recorder()
    inputs: dict[fx.Node, Stage] = {}
    example: dict[fx.Node, Any] = {}
    for stage, tensors in ((Stage.BIND, bind), (Stage.BATCH, batch)):
        for number, tensor in enumerate(tensors):
            node = recorder.placeholder(f"{stage.name.lower()}_{number}", tensor)
            inputs[node], example[node] = stage, tensor
    with torch.no_grad(), recorder:
        out = function(*bind, *batch)
    results = tree_leaves(out)
    recorder.graph.output([recorder.node_of(t) for t in results])
    for node in recorder.graph.nodes:
        if node.op == "get_attr":
            example[node] = recorder.constants[str(node.target)]
    dead_code(recorder.graph)
    return Graph(recorder.graph, inputs, example, [t.detach().clone() for t in results])


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None = None) -> None:
    """Compare to rounding of the type: 1e-12 in float64, 1e-6 in float32, of the largest value."""
    for a, b in zip(found, expected, strict=True):
        limit = rtol if rtol is not None else {torch.float64: 1e-12, torch.float32: 2e-6}.get(b.dtype, 0.0)
        scale = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() and b.dtype != torch.bool else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=limit * scale, equal_nan=True)
