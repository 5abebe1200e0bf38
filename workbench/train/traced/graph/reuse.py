"""Lets elementwise operations write into the memory of an operand that nobody reads afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from workbench.train.traced.graph.nodes import aliases, base_of, meta, set_base
from workbench.train.traced.graph.stages import Stage

__all__ = ["reuse_memory"]

aten = torch.ops.aten
IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.neg.default: aten.neg_.default,
    aten.exp.default: aten.exp_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
}
"""Operation -> the same operation on its first argument in place."""
COMMUTES = (aten.add.Tensor, aten.mul.Tensor)
LEAST = 4096  # rule of thumb: below so many elements new memory costs nothing


def reuse_memory(graph: fx.Graph, stages: Mapping[fx.Node, Stage]) -> None:
    """Change `graph` in place; what is known about its tensors must be up to date. No pass may follow."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    last = _last_reads(graph, position)
    for node in list(graph.nodes):
        place = _operand(node, last, position, stages)
        if place is None:
            continue
        operand = node.args[place]
        if node.target is aten.threshold_backward.default:
            node.target = aten.threshold_backward.grad_input
            node.kwargs = {"grad_input": operand}
        else:
            node.target = IN_PLACE[node.target]
            node.args = (operand, *(a for number, a in enumerate(node.args) if number != place))
        _move_in(graph, node, base_of(operand))
        last = _last_reads(graph, position)


def _last_reads(graph: fx.Graph, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Return base -> position of the last node that reads memory of it."""
    return {
        base: max((position[user] for node in nodes for user in node.users), default=-1)
        for base, nodes in aliases(graph).items()
    }


def _operand(
    node: fx.Node, last: dict[fx.Node, int], position: dict[fx.Node, int], stages: Mapping[fx.Node, Stage]
) -> int | None:
    """Return which argument of `node` its result can overwrite."""
    target: Any = node.target
    if target not in IN_PLACE and target is not aten.threshold_backward.default:
        return None
    if node.kwargs or meta(node).numel < LEAST:
        return None
    for place in (0, 1) if target in COMMUTES else (0,):
        operand = node.args[place]
        if not isinstance(operand, fx.Node) or not _fits(node, operand, stages):
            continue
        others = [n for n in node.all_input_nodes if n is not operand]
        base = base_of(operand)
        if last[base] == position[node] and all(base_of(n) is not base for n in others):
            return place
    return None


def _fits(node: fx.Node, operand: fx.Node, stages: Mapping[fx.Node, Stage]) -> bool:
    """Whether the result has the form of the operand, and the operand lies in memory that this call made."""
    base = base_of(operand)
    made = base.op == "call_function" and base_of(base) is base and stages[base] is Stage.CALL
    now, then = meta(node), meta(operand)
    same = (now.shape, now.stride, now.dtype) == (then.shape, then.stride, then.dtype)
    return made and same and then.dense and base_of(node) is node


def _move_in(graph: fx.Graph, node: fx.Node, base: fx.Node) -> None:
    for each in graph.nodes:
        if each.meta.get("base") is node:
            set_base(each, base)
