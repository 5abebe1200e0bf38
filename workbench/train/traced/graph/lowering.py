"""From a graph to functions: one for what binds to memory, one for the batch, one for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from workbench.train.traced.graph.code import Function, write_function
from workbench.train.traced.graph.liveness import peak_bytes
from workbench.train.traced.graph.running import run_nodes
from workbench.train.traced.graph.stages import Stage, stage_of

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """A graph as functions; `call(*bind(*lane), *prepare(*batch), ...)` is what the graph returns, as a flat tuple.

    Attributes:
        bind: of the inputs of stage BIND: views of memory that stays where it is.
        prepare: of the inputs of stage BATCH: what depends on them alone.
        call: of what both return, and of the inputs of stage CALL.
        peak_bytes: that a call needs at its peak, what it is given left out.
    """

    bind: Function
    prepare: Function
    call: Function
    peak_bytes: int


def lower(
    graph: fx.Graph, inputs: Mapping[fx.Node, Stage], example: Mapping[fx.Node, Any]
) -> tuple[Lowered, list[Tensor | None]]:
    """Return the functions of a graph, and what `call` returned for the example.

    Args:
        graph: its output is nested lists of nodes and None.
        inputs: stage of each placeholder.
        example: value of each placeholder and constant; the graph is run on them once, to choose what each node calls.
    """
    stages = stage_of(graph, dict(inputs))
    outputs: list[fx.Node | None] = tree_leaves(graph.output_node().args[0])
    values = dict(example)
    by_stage: dict[Stage, list[fx.Node]] = {stage: [] for stage in Stage}
    for node in graph.nodes:
        if node.op == "call_function":
            by_stage[stages[node]].append(node)
    once = [*by_stage[Stage.ONCE], *(n for n in graph.nodes if n.op == "get_attr")]
    ordered = [node for stage in Stage for node in by_stage[stage]]
    callables = run_nodes(ordered, values, kept={*once, *(n for n in outputs if n is not None)})
    constants = {n: values[n] for n in once}

    def function(stage: Stage, given: list[fx.Node], wanted: Sequence[fx.Node | None]) -> Function:
        nodes = by_stage[stage]
        used = {n for node in nodes for n in node.all_input_nodes} | {n for n in wanted if n is not None}
        known = {n: value for n, value in constants.items() if n in used}
        return write_function(nodes, inputs=given, outputs=wanted, constants=known, callables=callables)

    given = {stage: [n for n, s in inputs.items() if s is stage] for stage in Stage}
    needed = {n for node in by_stage[Stage.CALL] for n in node.all_input_nodes} | {n for n in outputs if n is not None}
    bound, prepared = (
        [n for n in (*given[stage], *by_stage[stage]) if n in needed] for stage in (Stage.BIND, Stage.BATCH)
    )
    lowered = Lowered(
        function(Stage.BIND, given[Stage.BIND], bound),
        function(Stage.BATCH, given[Stage.BATCH], prepared),
        function(Stage.CALL, [*bound, *prepared, *given[Stage.CALL]], outputs),
        peak_bytes(by_stage[Stage.CALL], outputs),
    )
    return lowered, [None if n is None else values[n] for n in outputs]
