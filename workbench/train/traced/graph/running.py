"""Runs a graph node by node, to learn what its tensors look like and what each node can call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from workbench.train.traced.graph.code import binding, last_uses
from workbench.train.traced.graph.nodes import describe_tensor

__all__ = ["Callables", "refresh", "run_nodes"]

aten = torch.ops.aten
Callables = dict[fx.Node, Callable[..., Any]]
"""What each node calls."""


def run_nodes(nodes: Sequence[fx.Node], values: dict[fx.Node, Any], *, kept: set[fx.Node]) -> Callables:
    """Run nodes in order, let go of what is not needed any more, and return what each can be called by.

    Args:
        nodes: calls; what is known about their tensors is noted again.
        values: of all that they need; their own results are put in, and those that stay are the ones in `kept`.
        kept: what is needed afterwards.
    """
    callables: Callables = {}
    dying = last_uses(nodes, kept=kept)
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        callables[node], values[node] = _first_that_works(node, args, kwargs)
        if isinstance(values[node], Tensor):
            describe_tensor(node, values[node])
        for each in dying.get(node, ()):
            del values[each]
    return callables


def refresh(graph: fx.Graph, example: Mapping[fx.Node, Any]) -> None:
    """Note again what the tensors of a graph look like, after it was changed.

    Args:
        graph: to run once, without recording gradients.
        example: value of each placeholder and constant.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    with torch.no_grad():
        run_nodes(calls, dict(example), kept=set(graph.output_node().all_input_nodes))


def _first_that_works(node: fx.Node, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    target: Any = node.target
    if target is operator.getitem:
        return operator.getitem, args[0][args[1]]
    if target in (aten.view.default, aten._unsafe_view.default):
        try:
            return torch.Tensor.view, args[0].view(args[1])
        except RuntimeError:  # what was a view before the graph was changed may need a copy now
            return torch.reshape, torch.reshape(*args)
    fast = binding(target)
    try:
        return fast, fast(*args, **kwargs)
    except Exception:  # torch's Python binding takes the arguments in another order, or not at all
        if fast is target:
            raise
        return target._op, target._op(*args, **kwargs)
