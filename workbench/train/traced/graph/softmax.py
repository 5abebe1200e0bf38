"""Softmax and masks: the same numbers without the slow paths of a CPU.

Measured with torch 2.13: softmax over a last dimension of fewer than 16 values takes four to ten times as long as over
another dimension of the same tensor; filling where a mask says so takes eight times as long as adding a tensor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from workbench.train.traced.graph.nodes import call, is_call, meta, replace, written
from workbench.train.traced.graph.stages import Stage

__all__ = ["add_masks", "widen_softmax"]

aten = torch.ops.aten
NARROW = 16  # measured: floats in the widest register; below it a row is taken value by value
FORWARD = (aten._softmax.default, aten._log_softmax.default)
BACKWARD = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)


def widen_softmax(graph: fx.Graph) -> None:
    """Compute a softmax over few values with those values far apart in memory, as they may lie already."""
    for node in list(graph.nodes):
        if is_call(node, *FORWARD):
            _lay_out(node, tensors=1, dim=1)
        elif is_call(node, *BACKWARD):
            _lay_out(node, tensors=2, dim=2)


def _lay_out(node: fx.Node, *, tensors: int, dim: int) -> None:
    """Permute the tensors of a softmax so that they are contiguous and its dimension is not the last."""
    about, axis = meta(node.args[tensors - 1]), int(node.args[dim])  # type: ignore[arg-type]
    axis %= max(1, len(about.shape))
    if not about.dense or len(about.shape) < 2 or about.device.type != "cpu":
        return
    order = sorted(range(len(about.shape)), key=lambda d: -about.stride[d])
    if order[-1] == axis:
        if about.shape[axis] >= NARROW:
            return
        order[-1], order[-2] = order[-2], order[-1]
    elif about.contiguous:
        return
    graph = node.graph
    back = [order.index(d) for d in range(len(order))]
    with graph.inserting_before(node):
        given = [_contiguous(graph, argument, order) for argument in node.args[:tensors]]
        new = call(graph, node.target, *given, order.index(axis), *node.args[dim + 1 :])
        stride = tuple(math.prod(about.shape[d] for d in order[place + 1 :]) for place in back)
        result = call(graph, aten.permute.default, new, back, of=new, about=dataclasses.replace(about, stride=stride))
    replace(node, result)


def _contiguous(graph: fx.Graph, node: Any, order: list[int]) -> fx.Node:
    """Return `node` with its dimensions in this order, copied where they do not lie so."""
    permuted = call(graph, aten.permute.default, node, order, of=node)
    stride = [meta(node).stride[d] for d in order]
    shape = [meta(node).shape[d] for d in order]
    expected = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if all(size == 1 or have == want for size, have, want in zip(shape, stride, expected, strict=True)):
        return permuted
    return call(graph, aten.clone.default, permuted, memory_format=torch.contiguous_format)


def add_masks(graph: fx.Graph, stages: dict[fx.Node, Stage]) -> None:
    """Turn filling by a mask that all lanes share into arithmetic with numbers that are made once.

    Minus infinity is added where the mask is; for zero it is multiplied. Values that are infinite under the mask give NaN
    then: a lane that has them has left the finite already.
    """
    touched = written(graph)
    for node in list(graph.nodes):
        if not is_call(node, aten.masked_fill.Scalar) or node in touched or stages[node] is not Stage.CALL:
            continue
        source, mask, value = node.args
        if stages[mask] not in (Stage.ONCE, Stage.BATCH) or value not in (0, -math.inf) or _is_int(source):
            continue
        about = meta(source)
        with graph.inserting_before(node):
            kept = call(graph, aten.full.default, [], 0.0 if value else 1.0, dtype=about.dtype, device=about.device)
            filled = call(graph, aten.full.default, [], float(value), dtype=about.dtype, device=about.device)
            numbers = call(graph, aten.where.self, mask, filled, kept)
            new = call(graph, aten.add.Tensor if value else aten.mul.Tensor, source, numbers)
        replace(node, new)


def _is_int(node: Any) -> bool:
    return not meta(node).dtype.is_floating_point
