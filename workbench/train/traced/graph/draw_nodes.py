"""Puts draws from the lanes' own generators in the place of random operations, which know only the global one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from workbench.train.traced.graph.draws import Fill, New, Sample
from workbench.train.traced.graph.nodes import TensorMeta, is_random, meta, replace, set_base
from workbench.train.traced.graph.recorder import CannotRecord

__all__ = ["GENERATORS", "draw_per_lane", "random_nodes"]

aten = torch.ops.aten
GENERATORS = "generators"
"""Name of the input that holds the generators, one per lane."""

_from = getattr(aten.random_, "from")
_FILLS: dict[Any, tuple[Any, tuple[Any, ...], slice]] = {
    aten.bernoulli.p: (aten.bernoulli_.float, (), slice(1, None)),
    aten.rand.default: (aten.uniform_.default, (), slice(0)),
    aten.rand_like.default: (aten.uniform_.default, (), slice(0)),
    aten.randn.default: (aten.normal_.default, (), slice(0)),
    aten.randn_like.default: (aten.normal_.default, (), slice(0)),
    aten.randint.default: (_from, (0,), slice(1)),
    aten.randint.low: (_from, (), slice(2)),
    aten.randint_like.default: (_from, (0,), slice(1, 2)),
    aten.randint_like.low_dtype: (_from, (), slice(1, 3)),
    aten.uniform.default: (aten.uniform_.default, (), slice(1, None)),
    aten.exponential.default: (aten.exponential_.default, (), slice(1, None)),
}
"""What gives a new tensor of random numbers -> what fills a tensor with the same: its first arguments, and which follow."""

_IN_PLACE = (
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.random_.default,
    aten.random_.to,
    _from,
)


def random_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that draw, in the order they draw in."""
    return [node for node in graph.nodes if is_random(node)]


def draw_per_lane(graph: fx.Graph, alone: Sequence[fx.Node], *, lanes: int, device: torch.device) -> None:
    """Let every random node of `graph` draw from the lanes' generators; they become the last input, `GENERATORS`.

    Args:
        graph: of one call; changed in place.
        alone: the random nodes of the same step recorded for a single lane without a lane axis.
        lanes: lanes of the call; 1 means without a lane axis.
        device: of the generators.

    Raises:
        CannotRecord: the two do not match one to one, or a node draws on another device.
    """
    nodes = random_nodes(graph)
    if len(nodes) != len(alone):
        raise CannotRecord(f"a single lane draws {len(alone)} times and {lanes} lanes together {len(nodes)} times")
    if not nodes:
        return
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    with graph.inserting_after(last):
        generators = graph.placeholder(GENERATORS)
    set_base(generators, generators)
    for node, single in zip(nodes, alone, strict=True):
        if meta_of_result(node).device.type != device.type:
            raise CannotRecord(f"random numbers are drawn on {meta_of_result(node).device}, the model is on {device}")
        with graph.inserting_before(node):
            _replace(node, single, generators, lanes)


def meta_of_result(node: fx.Node) -> TensorMeta:
    """Return what is known about the result of `node`, or about the first part of it."""
    return meta(node if "tensor" in node.meta else next(iter(node.users)))


def _replace(node: fx.Node, single: fx.Node, generators: fx.Node, lanes: int) -> None:
    filled = _fill_of(node, single, lanes)
    graph = node.graph
    if filled is None:
        kwargs = {name: value for name, value in node.kwargs.items() if name != "generator"}
        new = graph.call_function(_sample_of(node, single, lanes), (generators, list(node.args), kwargs))
        new.meta = dict(node.meta)
        set_base(new, new)
    elif node.target in _IN_PLACE:
        new = graph.call_function(filled, (generators, node.args[0]))
        new.meta = dict(node.meta) | {"writes": (node.args[0],)}
    else:
        new = graph.call_function(New(filled, meta(node)), (generators,))
        new.meta = dict(node.meta)
        set_base(new, new)
    new.meta["random"] = True
    replace(node, new)


def _fill_of(node: fx.Node, single: fx.Node, lanes: int) -> Fill | None:
    ours, theirs = _as_fill(node), _as_fill(single)
    if ours is None and theirs is None:
        return None
    expected = meta(single).shape if lanes == 1 else (lanes, *meta(single).shape)
    if ours is None or ours != theirs or meta(node).shape != expected:
        raise CannotRecord(f"{node.target} draws other numbers for {lanes} lanes together than for one")
    return Fill(*ours, alone=meta(single), stacked=lanes > 1)


def _as_fill(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the operation in place that draws the same numbers, and all its arguments after the tensor."""
    op: Any = node.target
    values: tuple[Any, ...] = node.args[1:]
    if node.target in _FILLS:
        op, first, rest = _FILLS[node.target]
        values = (*first, *node.args[rest])
    elif node.target not in _IN_PLACE:
        return None
    known = [argument for argument in op._schema.arguments[1:] if not argument.kwarg_only]
    return op, (*values, *(argument.default_value for argument in known[len(values) :]))


def _sample_of(node: fx.Node, single: fx.Node, lanes: int) -> Sample:
    target: Any = node.target
    takes = any(argument.name == "generator" for argument in target._schema.arguments)
    if lanes == 1:
        return Sample(target, None, takes)
    pairs = list(zip(node.args, single.args, strict=True)) if node.target is single.target else []
    tensors = [(a, b) for a, b in pairs if isinstance(a, fx.Node) and isinstance(b, fx.Node)]
    shapes = [(meta(a).shape, meta(b).shape) for a, b in tensors]
    same = all(a == b for a, b in pairs if not isinstance(a, fx.Node))
    if target._schema.is_mutable or not tensors or not same or any(a not in (b, (lanes, *b)) for a, b in shapes):
        raise CannotRecord(f"{target} draws random numbers in a way that lanes cannot do together")
    return Sample(target, tuple(a != b for a, b in shapes), takes)
