"""`trace_dataflow`: which tensor of a forward pass was made of which others, by which operation, inside which module.

The operations are seen below autograd, so `x + f(x)`, `torch.add`, `x += y` and what a layer of torch does inside look alike.
Unlike the recorder of a training step it need not be able to repeat them: `if` and `.item()` on values are no obstacle.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_leaves

from workbench.train.forward import DispatchObserver, buffers_put_back
from workbench.train.rng import isolated_rng

Kind = Literal["data", "parameter", "constant"]

_ADDITIONS = frozenset({"add", "sub", "rsub", "addcmul", "lerp"})
_SOURCES = ("empty", "zeros", "ones", "full", "rand", "new_", "arange", "bernoulli", "scalar_tensor")


@dataclass(frozen=True, slots=True)
class Node:
    """One tensor at one time: made by an operation, or met as it was."""

    op: str  # name of the operation, without the underscore of an in-place one; "" for a tensor that was met
    inputs: tuple[
        int, ...
    ]  # places in the graph of the tensors that it was made of, but for those of integers, which lead nowhere
    roles: tuple[str, ...]  # names of the arguments that they were
    kind: Kind  # "data" where it depends on the batch, "parameter" where on parameters alone, else "constant"
    name: str
    module: str  # innermost module that was running; "" is the model itself
    shape: tuple[int, ...]
    floating: bool
    zero: bool = False  # of a parameter, whether all of it is 0
    sizes: tuple[float, ...] = ()  # of an addition of data tensors: root mean square of each input and the result


@dataclass
class Dataflow:
    """The tensors of one forward pass, each after those that it was made of, and name -> class of every module that ran."""

    nodes: list[Node] = field(default_factory=list)
    modules: dict[str, type] = field(default_factory=dict)

    def data(self, place: int) -> list[int]:
        """Return the inputs of a node that depend on the batch, each once."""
        return list(dict.fromkeys(i for i in self.nodes[place].inputs if self.nodes[i].kind == "data"))

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Place -> places of the nodes that were made of it, but for what autograd keeps aside."""
        found: dict[int, list[int]] = {}
        for at, node in enumerate(self.nodes):
            for i in dict.fromkeys(node.inputs if node.op != "detach" else ()):
                found.setdefault(i, []).append(at)
        return found

    def parameters(self, place: int, *, without: Iterable[str] = ()) -> list[Node]:
        """Return the parameters that enter at a node in another role than those, through whatever was made of parameters alone."""
        node, skipped = self.nodes[place], set(without)
        ahead = [i for i, role in zip(node.inputs, node.roles, strict=True) if role not in skipped]
        found: dict[int, Node] = {}
        while ahead:
            at = ahead.pop()
            if self.nodes[at].kind == "parameter" and at not in found:
                found[at] = self.nodes[at]
                ahead += self.nodes[at].inputs
        return [node for at, node in sorted(found.items()) if node.name]


def trace_dataflow(
    model: nn.Module, call: Callable[[], Any], batch: Any, *, watch: Callable[[str, str, Tensor], None] | None = None
) -> Dataflow:
    """Run `call` once and return what happened; model and random state are left bit for bit as they were, also on errors.

    Args:
        model: whose modules and parameters are named. Its buffers are put back, so a batch norm in training mode does not
            move; plain Python attributes that the forward pass changes are the model's own affair.
    """
    tracer = _Tracer(model, batch, watch)
    with isolated_rng(), buffers_put_back(model), _modules_told(model, tracer), DispatchObserver(tracer.note):
        call()
    return tracer.flow


class _Tracer:
    def __init__(self, model: nn.Module, batch: Any, watch: Callable[[str, str, Tensor], None] | None) -> None:
        self._watch = watch
        self.flow = Dataflow()
        self.running: list[str] = []
        self._parameters = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._by_memory = {_memory(p): name for name, p in model.named_parameters() if _memory(p)}
        self._batch = {_memory(t) for t in tree_leaves(batch) if isinstance(t, Tensor)}
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._views: dict[int, list[weakref.ref[Tensor]]] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation and note what it made of what."""
        names = [argument.name for argument in func._schema.arguments] if hasattr(func, "_schema") else []
        named = [*zip(itertools.chain(names, itertools.repeat("")), args, strict=False), *kwargs.items()]
        inputs = [(role, t, self._place(t)) for role, value in named for t in _tensors(value)]
        data = [t for _, t, i in inputs if self.flow.nodes[i].kind == "data"]
        op = str(func.overloadpacket.__name__).removesuffix("_") if hasattr(func, "overloadpacket") else str(func)
        adds = op in _ADDITIONS and len(data) == 2
        sizes = [_size(t) for t in data] if adds else []  # before it is written in place
        out = func(*args, **kwargs)
        source = op.startswith(_SOURCES) or op.endswith("_like")
        kinds = {"constant"} if source else {self.flow.nodes[i].kind for _, _, i in inputs}
        kind: Kind = "data" if "data" in kinds else "parameter" if "parameter" in kinds else "constant"
        kept = [(role, i) for role, _, i in inputs if self.flow.nodes[i].floating and not source]
        roles, places = tuple(role for role, _ in kept), tuple(i for _, i in kept)
        for tensor in _tensors(out):
            known = self._known(tensor)
            place = self._append(tensor, op, places, roles, kind=kind, sizes=(*sizes, _size(tensor)) if adds else ())
            if self._watch is not None and kind == "data":
                self._watch(op, self.flow.nodes[place].module, tensor)
            if known is not None:  # it was written in place: all that lies in the same memory depends on it
                self._write_through(tensor, place)
        return out

    def _write_through(self, written: Tensor, place: int) -> None:
        memory = _memory(written)
        others = {id(other): other for ref in self._views.get(memory, []) if (other := ref()) is not None}
        for other in others.values():
            if other is not written and _memory(other) == memory:
                before, kind = self._place(other), self.flow.nodes[place].kind
                kind = kind if kind == "data" else self.flow.nodes[before].kind
                self._append(other, "alias", (before, place), ("self", "written"), kind=kind)

    def _known(self, tensor: Tensor) -> int | None:
        ref, place = self._places.get(id(tensor), (None, 0))
        return place if ref is not None and ref() is tensor else None

    def _place(self, tensor: Tensor) -> int:
        known = self._known(tensor)
        if known is not None:
            return known
        name = self._parameters.get(id(tensor)) or self._by_memory.get(_memory(tensor), "")
        kind: Kind = "parameter" if name else "data" if _memory(tensor) in self._batch else "constant"
        return self._append(tensor, "", kind=kind, name=name, zero=bool(name) and not bool(tensor.detach().any()))

    def _append(
        self, tensor: Tensor, op: str, inputs: tuple[int, ...] = (), roles: tuple[str, ...] = (), *, kind: Kind,
        name: str = "", zero: bool = False, sizes: tuple[float, ...] = (),
    ) -> int:  # fmt: skip
        place, module = len(self.flow.nodes), self.running[-1] if self.running else ""
        shape, floating = tuple(tensor.shape), _floating(tensor)
        self.flow.nodes.append(Node(op, inputs, roles, kind, name, module, shape, floating, zero, sizes))
        self._places[id(tensor)] = (weakref.ref(tensor), place)
        self._views.setdefault(_memory(tensor), []).append(weakref.ref(tensor))
        return place


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)] if isinstance(value, (list, tuple)) else []


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size(tensor: Tensor) -> float:
    """Return the root mean square."""
    if not _floating(tensor) or not tensor.numel():
        return math.nan
    return float(tensor.detach().abs().double().square().mean().sqrt())


@contextlib.contextmanager
def _modules_told(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    """Tell the tracer which module runs, by hooks that belong to no module; torch's fused layers are taken apart."""
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
        if id(module) in names:
            tracer.running.append(names[id(module)])
            tracer.flow.modules[names[id(module)]] = type(module)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
        if id(module) in names and tracer.running:
            tracer.running.pop()

    fast = torch.backends.mha.get_fastpath_enabled()
    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, always_call=True),
    ]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
