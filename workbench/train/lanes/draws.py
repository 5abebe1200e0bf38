"""Random operations with a generator for each lane: lane k draws what it would draw if it were trained alone."""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from workbench.train.lanes.recorder import CannotBatch, arguments, is_random, meta
from workbench.train.rng import global_generator

GENERATORS = "generators"  # name of the input that holds the generators, one per lane

_global_state = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Draw:
    """A random operation lane by lane, each with its own generator.

    Attributes:
        op: as a single trial calls it, with `args` and `kwargs`.
        tensors: place of each tensor among them, and its strides in a single trial, which decide which number lands where.
        fills: whether the first tensor is filled in place.
    """

    __name__ = "draw"  # a graph asks what it calls for its name

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[tuple[int, tuple[int, ...]], ...]
    fills: bool

    def __call__(self, generators: Sequence[torch.Generator], *tensors: Tensor) -> Any:
        """Return the result, stacked where there is a lane axis; the first tensor where it is filled."""
        if len(generators) == 1:
            return self._draw(generators[0], tensors)
        rows = [self._lane(lane, generator, tensors) for lane, generator in enumerate(generators)]
        if self.fills:
            return tensors[0]
        if isinstance(rows[0], Tensor):
            return torch.stack(rows)
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    def _lane(self, lane: int, generator: torch.Generator, tensors: Sequence[Tensor]) -> Any:
        rows = [tensor[lane] for tensor in tensors]
        for place, (_, stride) in enumerate(self.tensors):
            if rows[place].stride() != stride or (self.op._schema.is_mutable and not self.fills):
                row = rows[place]
                rows[place] = torch.empty_strided(row.shape, stride, dtype=row.dtype, device=row.device).copy_(row)
        result = self._draw(generator, rows)
        if self.fills and rows[0].data_ptr() != tensors[0][lane].data_ptr():
            tensors[0][lane].copy_(rows[0])
        return result

    def _draw(self, generator: torch.Generator, tensors: Sequence[Tensor]) -> Any:
        args = list(self.args)
        for (place, _), tensor in zip(self.tensors, tensors, strict=True):
            args[place] = tensor
        if _takes_generator(self.op.overloadpacket):
            return self.op.overloadpacket(*args, **self.kwargs, generator=generator)
        with _global_state:  # another lane must not draw from it at the same time
            shared = global_generator(generator.device)
            if shared is generator:
                return self.op(*args, **self.kwargs)
            before = shared.get_state()
            shared.set_state(generator.get_state())
            try:
                return self.op(*args, **self.kwargs)
            finally:
                generator.set_state(shared.get_state())
                shared.set_state(before)


@functools.cache
def _takes_generator(packet: Any) -> bool:
    overloads = (getattr(packet, name) for name in packet.overloads())
    return any(argument.name == "generator" for each in overloads for argument in each._schema.arguments)


def draw_per_lane(graph: fx.Graph, alone: fx.Graph, *, lanes: int, device: torch.device) -> bool:
    """Let every random node of `graph` draw from the lanes' generators, the last input, and return whether there is one."""
    nodes, single = ([node for node in each.nodes if is_random(node)] for each in (graph, alone))
    if len(nodes) != len(single):
        raise CannotBatch(f"a single lane draws {len(single)} times and {lanes} lanes together {len(nodes)} times")
    if not nodes:
        return False
    with graph.inserting_after(next(node for node in reversed(graph.nodes) if node.op == "placeholder")):
        generators = graph.placeholder(GENERATORS)
    generators.meta["base"] = generators
    for node, plain in zip(nodes, single, strict=True):
        result = node if "tensor" in node.meta else next(iter(node.users))
        if meta(result).device.type != device.type:
            raise CannotBatch(f"random numbers are drawn on {meta(result).device}, the model is on {device}")
        theirs = [value for a, value in arguments(plain) if not a.kwarg_only and a.name != "generator"]
        tensors = [value for a, value in arguments(node) if isinstance(value, fx.Node)]
        one = [(place, meta(value)) for place, value in enumerate(theirs) if isinstance(value, fx.Node)]
        ours, fills = node.target._schema.name, node.target._schema.is_mutable
        same = plain.target._schema.name in (ours, f"{ours}_") and fills <= plain.target._schema.is_mutable
        shapes = [(lanes, *about.shape) if lanes > 1 else about.shape for _, about in one]
        if not same or shapes != [meta(each).shape for each in tensors]:
            raise CannotBatch(f"{node.target} draws random numbers in a way that lanes cannot do together")
        kwargs = {name: value for name, value in plain.kwargs.items() if name != "generator"}
        places = tuple((place, about.stride) for place, about in one)
        with graph.inserting_before(node):
            draw = _Draw(plain.target, tuple(theirs), kwargs, places, fills=fills)
            new = graph.call_function(draw, (generators, *tensors))
        new.meta = dict(node.meta) | {"random": True}
        if fills:
            new.meta["writes"] = (node.args[0],)
        for each in (new, *graph.nodes):
            if each.meta.get("base") is node:
                each.meta["base"] = new
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True
