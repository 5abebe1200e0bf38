"""What is known about the tensors of a graph: shape, strides, and which of them share memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
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
    "is_dense",
    "is_random",
    "meta",
    "replace",
    "set_base",
    "written",
    "written_by",
]

aten = torch.ops.aten
BATCH_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
"""Operations that write running mean and variance in training, arguments 3 and 4, though their schema does not say so."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides, type and place of one tensor, as it was when the graph was recorded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

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
        return is_dense(self.shape, self.stride)

    @property
    def packed(self) -> TensorMeta:
        """The same tensor, contiguous in memory of its own."""
        stride = tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))
        return replace_fields(self, stride=stride, offset=0)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether each place in memory between the first and last element belongs to exactly one element."""
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True


def describe_tensor(node: fx.Node, tensor: Tensor) -> None:
    """Note shape, strides, type and place of the tensor that `node` makes."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    node.meta["tensor"] = TensorMeta(shape, stride, tensor.dtype, tensor.device, int(tensor.storage_offset()))


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
    found: list[Any] = list(node.args[3:5]) if target in BATCH_NORMS and node.args[5] else []
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


def call(
    graph: fx.Graph,
    target: Any,
    *args: Any,
    of: fx.Node | None = None,
    about: TensorMeta | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Insert a call at the graph's insertion point.

    Args:
        graph: to insert into.
        target: what is called.
        *args: with what.
        of: the node whose memory the result lies in; None for memory of its own.
        about: what the result looks like, where a later part of the same pass may ask; else `refresh` finds out.
        **kwargs: with what.
    """
    node = graph.call_function(target, args, kwargs)
    set_base(node, node if of is None else base_of(of))
    if about is not None:
        node.meta["tensor"] = about
    return node


def replace(node: fx.Node, other: fx.Node) -> None:
    """Let `other` stand in for `node`, which is removed; what lay in the memory of `node` lies in that of `other` now."""
    for each in node.graph.nodes:
        if each is not node and each.meta.get("base") is node:
            set_base(each, base_of(other))
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _nodes_in(each)
