"""What is known about the tensors of a graph: shape, strides, and which of them share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

__all__ = [
    "TensorMeta",
    "aliases",
    "base_of",
    "call",
    "describe_tensor",
    "is_call",
    "is_random",
    "meta",
    "set_base",
    "written",
    "written_by",
]

aten = torch.ops.aten
HIDDEN_WRITES = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
"""Operations that write into arguments although their schema does not say so: running mean and variance."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides, type and place of one tensor, as it was when the graph was recorded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in memory in the order of the last dimension first, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def dense(self) -> bool:
        """Whether each place in memory between the first and last element belongs to exactly one element."""
        expected = 1
        for stride, size in sorted((s, n) for s, n in zip(self.stride, self.shape, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return True


def describe_tensor(node: fx.Node, tensor: Tensor) -> None:
    """Note shape, strides, type and place of the tensor that `node` makes."""
    node.meta["tensor"] = TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def set_base(node: fx.Node, base: fx.Node) -> None:
    """Note whose memory the result of `node` lies in: its own, or that of an earlier node."""
    node.meta["base"] = base


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that the memory of `node` was made by."""
    found: fx.Node = node.meta["base"]
    return found


def meta(node: fx.Node) -> TensorMeta:
    """Return what is known about the tensor that `node` makes."""
    found: TensorMeta = node.meta["tensor"]
    return found


def is_call(node: Any, *targets: Any) -> bool:
    """Whether `node` calls one of the operations `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return bool(node.meta.get("random"))
    return torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node, target)


def _without_dropout(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """Whether an operation that can drop out, such as fused attention, is asked not to."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(value == 0.0)
    return False


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the bases that `node` writes into."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return []
    if not isinstance(target, torch._ops.OpOverload):
        return [base_of(a) for a in node.meta.get("writes", ())]
    found: list[Any] = [node.args[i] for i in HIDDEN_WRITES.get(target, ())]
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    return [base_of(each) for value in found for each in _nodes_in(value)]


def written(graph: fx.Graph) -> set[fx.Node]:
    """Return the bases that any node writes into after they were made."""
    return {base for node in graph.nodes for base in written_by(node)}


def aliases(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return base -> all nodes that lie in its memory, itself included."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if "base" in node.meta:
            found.setdefault(base_of(node), []).append(node)
    return found


def call(like: fx.Node, target: Any, *args: Any, base: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call whose result has the shape and strides of `like`'s, before the graph's insertion point."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta["tensor"] = like.meta["tensor"]
    set_base(node, node if base is None else base)
    return node


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _nodes_in(each)
