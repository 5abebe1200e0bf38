"""A stage of a graph as a Python function, with as little around the operations as there can be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx

__all__ = ["binding", "last_uses", "write_function"]

Function = Callable[..., tuple[Any, ...]]


def binding(target: Any) -> Callable[..., Any]:
    """Return the fastest callable for an operation: torch's own Python binding, or else the operation itself.

    The binding reads its arguments in half the time that the operation takes; both end in the same kernel.
    """
    if not isinstance(target, torch._ops.OpOverload):
        found: Callable[..., Any] = target
        return found
    name = target.overloadpacket.__name__
    if target.namespace == "aten":
        for place in (torch, torch.Tensor, torch._C._nn):
            found = getattr(place, name, None)  # type: ignore[assignment]
            if isinstance(found, (BuiltinFunctionType, MethodDescriptorType)):
                return found
    return target._op


def write_function(
    nodes: Sequence[fx.Node],
    *,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node | None],
    constants: Mapping[fx.Node, Any],
    callables: Mapping[fx.Node, Callable[..., Any]],
) -> Function:
    """Return a function that runs `nodes` in order and lets go of each tensor after its last use.

    Args:
        nodes: calls, in the order they run in.
        inputs: what the function is called with.
        outputs: what it returns, a tuple; None stays None.
        constants: value of each node that is neither computed nor an input.
        callables: what each node calls.
    """
    names = {node: f"v{number}" for number, node in enumerate((*inputs, *constants, *nodes))}
    world: dict[str, Any] = {names[node]: value for node, value in constants.items()}
    dying = last_uses(nodes, kept={*constants, *(n for n in outputs if n is not None)})
    lines = []
    for node in nodes:
        call = _call(node, names, world, callables)
        lines.append(f"{names[node]} = {call}")
        if node in dying:
            lines.append("del " + ", ".join(names[n] for n in dying[node]))
    results = "".join(f"{'None' if node is None else names[node]}, " for node in outputs)
    body = "\n ".join([*lines, f"return ({results})"])
    exec(f"def run({', '.join(names[n] for n in inputs)}):\n {body}", world)
    run: Function = world["run"]
    return run


def last_uses(nodes: Sequence[fx.Node], *, kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return node -> what nobody needs once it has run, `kept` aside."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last[node] = node
        for each in node.all_input_nodes:
            last[each] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for each, node in last.items():
        if each not in kept:
            dying.setdefault(node, []).append(each)
    return dying


def _call(
    node: fx.Node, names: dict[fx.Node, str], world: dict[str, Any], callables: Mapping[fx.Node, Callable[..., Any]]
) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], names, world)}[{node.args[1]}]"
    function = _text(callables[node], names, world)
    arguments = [_text(value, names, world) for value in node.args]
    arguments += [f"{name}={_text(value, names, world)}" for name, value in node.kwargs.items()]
    return f"{function}({', '.join(arguments)})"


def _text(value: Any, names: dict[fx.Node, str], world: dict[str, Any]) -> str:
    """Return the source of an argument; what has none is put into the world that the function runs in."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each, names, world) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(each, names, world)}" for key, each in value.items()) + "}"
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    name = next((known for known, each in world.items() if each is value), None)
    if name is None:
        name = f"w{len(world)}"
        world[name] = value
    return name
