"""`Recorder`: writes down every tensor operation that runs inside its block, below autograd and vmap.

The record is a `torch.fx.Graph` of ATen operations. `make_fx` gives the same; it imports the compiler first, which costs
as much as a small training, and takes several times as long for each graph.
"""

from __future__ import annotations

import operator
import traceback
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from workbench.train.traced.graph.nodes import base_of, describe_tensor, is_random, set_base, written_by

__all__ = ["CannotRecord", "Recorder"]


class CannotRecord(Exception):
    """The step cannot be written down as a list of operations, for a reason in plain words."""


class _Readings(TorchFunctionMode):
    """Notices the ways to a tensor's values that are no operations on tensors."""

    WAYS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.WAYS:
            self._recorder.check_readable([self._recorder.node_of(args[0])])
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on tensors; inputs are announced with `placeholder`, other tensors become constants.

    Attributes:
        graph: the operations so far, in the order they ran in.
        constants: name -> tensor that was neither announced nor made inside the block.
        captured: ids of those tensors, as whoever holds them knows them.

    Args:
        hidden: tensors that must not be reached unannounced, such as the parameters that the inputs stand for.
    """

    def __init__(self, hidden: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.captured: set[int] = set()
        self._hidden = {_storage(tensor) for tensor in hidden}
        self._nodes: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}
        self._fixed: set[fx.Node] = set()  # memory whose content depends on no input
        self._readings = _Readings(self)

    def __enter__(self) -> Recorder:
        """Begin to record."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self._readings.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        self._readings.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler at the first operation

    def placeholder(self, name: str, tensor: Tensor) -> fx.Node:
        """Announce an input."""
        node = self.graph.placeholder(name)
        self._remember(tensor, node, base=node)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that made `tensor`; one that nobody announced becomes a constant of the graph."""
        known = self._nodes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise CannotRecord(f"forward or loss works with {type(tensor).__name__}, a tensor type of its own")
        if _storage(tensor) in self._hidden:
            raise CannotRecord(f"the model reaches a parameter or buffer by another way than its name{_line()}")
        name = f"constant_{len(self.constants)}"
        node = self.graph.get_attr(name)
        self.constants[name] = tensor.detach() if tensor.requires_grad else tensor
        self.captured.add(id(tensor))
        self._remember(tensor, node, base=node)
        self._fixed.add(node)
        return node

    def check_readable(self, nodes: list[fx.Node]) -> None:
        """Raise where the value of a tensor that depends on an input is about to be read."""
        if not self._is_fixed(nodes):
            raise CannotRecord(
                "forward or loss reads the value of a tensor (`if`, `.item()`, `.tolist()`), so that what it computes "
                f"depends on the data{_line()}"
            )

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and write it down."""
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        inputs = [self.node_of(tensor) for tensor in tensors]
        self._refuse(func, inputs, args, kwargs)
        out = func(*args, **kwargs)
        node_args, node_kwargs = tree_map(self._or_node, (args, kwargs))
        node = self.graph.call_function(func, node_args, node_kwargs)
        storages = {_storage(tensor): base_of(i) for tensor, i in zip(tensors, inputs, strict=True)}
        if isinstance(out, Tensor):
            self._result(out, node, storages)
        elif isinstance(out, (tuple, list)):
            set_base(node, node)
            for position, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._result(part, self.graph.call_function(operator.getitem, (node, position)), storages)
        if self._is_fixed(inputs) and not is_random(node):
            self._fixed.add(node)
        else:
            self._fixed.difference_update(written_by(node))
        return out

    def _result(self, tensor: Tensor, node: fx.Node, storages: Mapping[int, fx.Node]) -> None:
        base = storages.get(_storage(tensor), node)
        known = self._nodes.get(id(tensor))
        if known is not None and known[0]() is tensor:  # in place: the tensor keeps its name
            set_base(node, base)
            describe_tensor(node, tensor)
        else:
            self._remember(tensor, node, base=base)

    def _remember(self, tensor: Tensor, node: fx.Node, *, base: fx.Node) -> None:
        self._nodes[id(tensor)] = (weakref.ref(tensor), node)
        describe_tensor(node, tensor)
        set_base(node, base)

    def _is_fixed(self, inputs: list[fx.Node]) -> bool:
        return all(base_of(node) in self._fixed for node in inputs)

    def _or_node(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, Tensor) else value

    def _refuse(self, func: Any, inputs: list[fx.Node], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise for an operation whose result a list of operations cannot repeat on other values."""
        if not isinstance(func, torch._ops.OpOverload):
            raise CannotRecord(f"forward or loss calls {func}, which is no plain tensor operation{_line()}")
        tags = func.tags
        indexed = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        masked = indexed and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if masked or (torch.Tag.dynamic_output_shape in tags and not indexed):
            raise CannotRecord(f"a shape depends on the values of a tensor ({func.overloadpacket}){_line()}")
        if torch.Tag.data_dependent_output in tags:
            self.check_readable(inputs)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CannotRecord(f"forward or loss draws from a generator of its own{_line()}")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _line() -> str:
    """Return the innermost line of the user's own code that is being run, in brackets."""
    ours = ("/torch/", "/workbench/train/", "<frozen")
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename.replace("\\", "/") for part in ours):
            return f" (line {frame.lineno}: {frame.line})" if frame.line else ""
    return ""
