"""`Recorder`: writes down every tensor operation that runs inside its block, below autograd and vmap, as a `torch.fx.Graph`.

`make_fx` gives the same; it imports the compiler first, which costs as much as a small training.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from workbench.train.forward import DispatchObserver, FunctionObserver

aten = torch.ops.aten
BATCH_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
"""Operations that write running mean and variance in training, arguments 3 and 4, though their schema does not say so."""
READINGS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Ways to a tensor's values that are no operations on tensors."""
INDEXING = (aten.index, aten.index_put, aten.index_put_)


class CannotBatch(Exception):
    """Lanes of this model cannot share one program; its text is the reason, fit for the record.

    Whoever raises it leaves the stack as it was, gradients aside.
    """


class TensorMeta(NamedTuple):
    """How one tensor of a graph lay in memory when it was recorded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Return what is known of a tensor."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.device, int(tensor.storage_offset()))

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie without gaps in the order of the dimensions."""
        return _without_gaps(reversed(list(zip(self.stride, self.shape, strict=True))))

    @property
    def dense(self) -> bool:
        """Whether the elements lie without gaps in any order."""
        return _without_gaps(sorted(zip(self.stride, self.shape, strict=True)))


def _without_gaps(dimensions: Iterable[tuple[int, int]]) -> bool:
    expected = 1
    for stride, size in dimensions:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def meta(node: Any) -> TensorMeta:
    """Return what is known about the tensor that `node` makes."""
    found: TensorMeta = node.meta["tensor"]
    return found


def base_of(node: fx.Node) -> fx.Node:
    """Return the node in whose memory the result of `node` lies."""
    found: fx.Node = node.meta["base"]
    return found


def is_call(node: Any, *targets: Any) -> bool:
    """Whether `node` calls one of the operations `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return bool(node.meta.get("random"))
    without = (value == 0.0 for argument, value in arguments(node) if argument.name == "dropout_p")  # fused attention
    return torch.Tag.nondeterministic_seeded in target.tags and not any(without)


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the bases that `node` writes into."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return []
    if not isinstance(target, torch._ops.OpOverload):
        return [base_of(each) for each in node.meta.get("writes", ())]
    found: list[Any] = list(node.args[3:5]) if target in BATCH_NORMS and node.args[5] else []
    if target._schema.is_mutable:
        found += [value for a, value in arguments(node) if a.alias_info is not None and a.alias_info.is_write]
    return [base_of(each) for each in tree_leaves(found) if isinstance(each, fx.Node)]


def written(graph: fx.Graph) -> set[fx.Node]:
    """Return the bases that any node writes into after they were made."""
    return {base for node in graph.nodes for base in written_by(node)}


def arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield each argument in the schema of what `node` calls, and its value."""
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        default = node.kwargs.get(argument.name, argument.default_value)
        yield argument, node.args[place] if place < len(node.args) else default


class Recorder:
    """Records operations on tensors; inputs are announced with `placeholder`, other tensors become constants.

    Attributes:
        constants: name -> tensor that was neither announced nor made inside the block.
        captured: ids of those tensors, as whoever holds them knows them.

    Args:
        hidden: tensors that must not be reached unannounced, such as the parameters that the inputs stand for.
    """

    def __init__(self, hidden: Iterable[Tensor] = ()) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.captured: set[int] = set()
        self._hidden = {_storage(tensor) for tensor in hidden}
        self._nodes: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}
        self._fixed: set[fx.Node] = set()  # memory whose content depends on no input

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside the block."""
        with DispatchObserver(self._record), FunctionObserver(self._read):
            yield

    def placeholder(self, name: str, tensor: Tensor) -> fx.Node:
        """Announce an input."""
        return self._remember(tensor, self.graph.placeholder(name))

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that made `tensor`; one that nobody announced becomes a constant of the graph."""
        known = self._nodes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise CannotBatch(f"forward or loss works with {type(tensor).__name__}, a tensor type of its own")
        if _storage(tensor) in self._hidden:
            raise CannotBatch("the model reaches a parameter or buffer by another way than its name")
        name = f"constant_{len(self.constants)}"
        node = self._remember(tensor, self.graph.get_attr(name))
        self.constants[name] = tensor.detach() if tensor.requires_grad else tensor
        self.captured.add(id(tensor))
        self._fixed.add(node)
        return node

    def _check_readable(self, nodes: list[fx.Node]) -> None:
        """Raise where the value of a tensor that depends on an input is about to be read."""
        if not self._is_fixed(nodes):
            raise CannotBatch(
                "forward or loss reads the value of a tensor (`if`, `.item()`, `.tolist()`), so that what it computes "
                "depends on the data"
            )

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call `func`, unless it reads what depends on an input, without an operation on tensors."""
        if func in READINGS:
            self._check_readable([self.node_of(args[0])])
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation and write it down."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        inputs = [self.node_of(tensor) for tensor in tensors]
        self._refuse(func, inputs, args, kwargs)
        out = func(*args, **kwargs)
        given = tree_map(lambda v: self.node_of(v) if isinstance(v, Tensor) else v, (args, dict(kwargs)))
        node = self.graph.call_function(func, *given)
        bases = {_storage(tensor): base_of(i) for tensor, i in zip(tensors, inputs, strict=True)}
        if isinstance(out, Tensor):
            self._remember(out, node, bases)
        elif isinstance(out, (tuple, list)):
            node.meta["base"] = node
            for position, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._remember(part, self.graph.call_function(operator.getitem, (node, position)), bases)
        if self._is_fixed(inputs) and not is_random(node):
            self._fixed.add(node)
        else:
            self._fixed.difference_update(written_by(node))
        return out

    def _remember(self, tensor: Tensor, node: fx.Node, bases: Mapping[int, fx.Node] | None = None) -> fx.Node:
        known = self._nodes.get(id(tensor))
        if known is None or known[0]() is not tensor:  # else it was written in place, and keeps its name
            self._nodes[id(tensor)] = (weakref.ref(tensor), node)
        node.meta["tensor"] = TensorMeta.of(tensor)
        node.meta["base"] = (bases or {}).get(_storage(tensor), node)
        return node

    def _is_fixed(self, inputs: list[fx.Node]) -> bool:
        return all(base_of(node) in self._fixed for node in inputs)

    def _refuse(self, func: Any, inputs: list[fx.Node], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not isinstance(func, torch._ops.OpOverload):
            raise CannotBatch(f"forward or loss calls {func}, which is no plain tensor operation")
        indexed = func.overloadpacket in INDEXING
        masked = indexed and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if masked or (torch.Tag.dynamic_output_shape in func.tags and not indexed):
            raise CannotBatch(f"a shape depends on the values of a tensor ({func.overloadpacket})")
        if torch.Tag.data_dependent_output in func.tags:
            self._check_readable(inputs)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CannotBatch("forward or loss draws from a generator of its own")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
