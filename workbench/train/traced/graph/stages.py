"""Which part of a graph has to run how often: once, with every batch, or with every call."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import fx

from workbench.train.traced.graph.nodes import aliases, base_of, is_random, written, written_by

__all__ = ["Stage", "dead_code", "is_view", "stage_of"]

aten = torch.ops.aten


class Stage(IntEnum):
    """When a node runs.

    ONCE: it depends on no input. BIND: it is a view of memory that stays where it is from step to step. BATCH: it depends
    on the batch alone, so that all calls of a step share it. CALL: everything else.
    """

    ONCE = 0
    BIND = 1
    BATCH = 2
    CALL = 3


def is_view(node: fx.Node) -> bool:
    """Whether the result of `node` lies in memory that another node made, and `node` writes nothing."""
    return node.op == "call_function" and base_of(node) is not node and not written_by(node)


def stage_of(graph: fx.Graph, placeholders: dict[fx.Node, Stage]) -> dict[fx.Node, Stage]:
    """Return the stage of every node.

    Args:
        graph: of one call.
        placeholders: stage of each input: BIND for memory that stays where it is, BATCH, or CALL.
    """
    groups = aliases(graph)
    touched = written(graph)
    stages: dict[fx.Node, Stage] = {}
    least: dict[fx.Node, Stage] = {}  # of memory that is written into, which all of its nodes must share
    while True:
        for node in graph.nodes:
            stages[node] = max(_stage(node, stages, placeholders), _least_of(node, least))
        before = dict(least)
        for base in touched:
            least[base] = max(stages[node] for node in (*groups[base], *_writers(graph, base)))
        if least == before:
            return stages


def dead_code(graph: fx.Graph, kept: Iterable[fx.Node] = ()) -> None:
    """Remove what nobody needs; what draws random numbers stays, or later draws would be others.

    Args:
        graph: changed in place; its last node is the output.
        kept: nodes that stay whatever happens.
    """
    live = set(kept)
    read: set[fx.Node] = set()  # memory that a live node further down reads
    for node in reversed(graph.nodes):
        if (
            node.op == "output"
            or any(user in live for user in node.users)
            or is_random(node)
            or read.intersection(written_by(node))
        ):
            live.add(node)
        if node in live:
            read.update(base_of(n) for n in node.all_input_nodes)
    for node in reversed(graph.nodes):
        if node not in live and node.op != "placeholder":
            graph.erase_node(node)


def _stage(node: fx.Node, stages: dict[fx.Node, Stage], placeholders: dict[fx.Node, Stage]) -> Stage:
    if node.op == "placeholder":
        return placeholders[node]
    if node.op == "output" or is_random(node):
        return Stage.CALL
    found = max((stages[n] for n in node.all_input_nodes), default=Stage.ONCE)
    below = {stages[n] for n in node.all_input_nodes}
    if Stage.BIND in below and not (found == Stage.BIND and (is_view(node) or _part_of_views(node))):
        return Stage.CALL
    return found


def _part_of_views(node: fx.Node) -> bool:
    return node.target is operator.getitem and base_of(node) is not node


def _least_of(node: fx.Node, least: dict[fx.Node, Stage]) -> Stage:
    bases = [base_of(node)] if "base" in node.meta else []
    return max((least.get(base, Stage.ONCE) for base in [*bases, *written_by(node)]), default=Stage.ONCE)


def _writers(graph: fx.Graph, base: fx.Node) -> list[fx.Node]:
    return [node for node in graph.nodes if base in written_by(node)]
