"""Removes what changes nothing: views that are no views, products with one, what is computed twice, what is not needed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from workbench.train.traced.graph.nodes import base_of, call, is_call, is_random, meta, replace, written, written_by
from workbench.train.traced.graph.stages import dead_code

__all__ = ["tidy"]

aten = torch.ops.aten
VIEWS = (
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.select.int,
    aten.slice.Tensor,
)
"""Operations that only look at memory in another way; what they see is told by shape, strides and offset."""

_FILLED: dict[Any, Callable[..., Any]] = {
    aten.ones_like.default: lambda _: 1,
    aten.zeros_like.default: lambda _: 0,
    aten.full_like.default: lambda _, value: value,
    aten.new_zeros.default: lambda *_: 0,
    aten.new_ones.default: lambda *_: 1,
    aten.new_full.default: lambda _, size, value: value,  # noqa: ARG005
}
"""Operations that take no more than the shape and the type from a tensor -> the value that they fill with."""


def tidy(graph: fx.Graph) -> None:
    """Change `graph` in place; what is known about its tensors must be up to date, and stays so."""
    dead_code(graph)
    _make_independent(graph)
    _drop_unchanged(graph)
    _share_views(graph)
    _share_results(graph)
    dead_code(graph)


def _make_independent(graph: fx.Graph) -> None:
    """Let tensors filled with a constant depend on nothing, so that they are made once."""
    for node in list(graph.nodes):
        value = _FILLED.get(node.target)
        if value is not None and meta(node).contiguous and base_of(node) is node:
            about = meta(node)
            with graph.inserting_before(node):
                new = call(
                    graph,
                    aten.full.default,
                    list(about.shape),
                    value(*node.args),
                    dtype=about.dtype,
                    device=about.device,
                )
            new.meta["tensor"] = about
            replace(node, new)


def _drop_unchanged(graph: fx.Graph) -> None:
    """Replace what equals its first argument by that argument."""
    touched = written(graph)
    returned = {base_of(node) for node in graph.output_node().all_input_nodes}
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or "tensor" not in source.meta or "tensor" not in node.meta:
            continue
        same = meta(node) == meta(source)
        readers = node not in touched and base_of(source) not in touched
        lent = node in returned and base_of(source).op == "placeholder"  # the caller may write into what it gave
        if (node.target in VIEWS and same) or (readers and not lent and _copies(node, source, same=same)):
            replace(node, source)


def _copies(node: fx.Node, source: fx.Node, *, same: bool) -> bool:
    """Whether `node` gives the values of `source` in new memory; who only reads can as well read the old."""
    if is_call(node, aten.clone.default, aten._to_copy.default):
        return same
    if is_call(node, aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor):
        one = isinstance(node.args[1], (int, float)) and node.args[1] == 1 and not node.kwargs
        return one and meta(node).shape == meta(source).shape and meta(node).dtype == meta(source).dtype
    return False


def _share_views(graph: fx.Graph) -> None:
    """Let views of the same memory that see the same be one, and end chains of views at the first that does."""
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if "tensor" not in node.meta or "base" not in node.meta:
            continue
        about = meta(node)
        key = (base_of(node), about.shape, about.stride, about.offset, about.dtype)
        if key in seen and node.target in VIEWS:
            replace(node, seen[key])
        else:
            seen.setdefault(key, node)


def _share_results(graph: fx.Graph) -> None:
    """Compute what is computed twice only once."""
    touched = written(graph)
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        reads = [base_of(n) for n in node.all_input_nodes if "base" in n.meta]
        if node.op != "call_function" or is_random(node) or written_by(node) or node.meta.get("writes"):
            continue
        if node.target is not operator.getitem and (base_of(node) in touched or touched.intersection(reads)):
            continue
        key = (node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))))
        if key in seen:
            replace(node, seen[key])
        else:
            seen[key] = node


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(each) for each in value))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)
