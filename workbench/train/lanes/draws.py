"""Random operations with a generator for each lane: lane k draws what it would draw if it were trained alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from workbench.train.lanes.recorder import CannotBatch, TensorMeta, arguments, base_of, is_random, meta
from workbench.train.rng import global_generator

GENERATORS = "generators"
"""Name of the input that holds the generators, one per lane."""

_global_state = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Draw:
    """A random operation lane by lane, each with its own generator.

    Attributes:
        op: as a single trial calls it, with `args` and `kwargs`; tensors are put in.
        tensors: place of each tensor among the arguments, its layout in a single trial (its strides decide which number lands
            where), and whether it has a lane axis here.
        stacked: whether the program has a lane axis.
        fills: for an operation in place, whether it fills the first tensor; otherwise a new one like that.
    """

    __name__ = "draw"  # a graph asks what it calls for its name

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[tuple[int, TensorMeta, bool], ...]
    stacked: bool
    fills: bool

    def __call__(self, generators: Sequence[torch.Generator], *tensors: Tensor) -> Any:
        """Return the result, stacked where there is a lane axis; the first tensor where it is filled."""
        results = [self._lane(lane, generator, tensors) for lane, generator in enumerate(generators)]
        if self.fills:
            return tensors[0]
        if not self.stacked:
            return results[0]
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    def _lane(self, lane: int, generator: torch.Generator, tensors: Sequence[Tensor]) -> Any:
        args = list(self.args)
        for tensor, (place, alone, split) in zip(tensors, self.tensors, strict=True):
            args[place] = row = tensor[lane] if split else tensor
            if row.stride() != alone.stride or (self.op._schema.is_mutable and not self.fills):
                args[place] = torch.empty_strided(alone.shape, alone.stride, dtype=row.dtype, device=row.device)
                if not self.op._schema.is_mutable:
                    args[place].copy_(row)
        result = self._draw(generator, args)
        if self.fills and args[0] is not (row := tensors[0][lane] if self.stacked else tensors[0]):
            row.copy_(args[0])
        return result

    def _draw(self, generator: torch.Generator, args: Sequence[Any]) -> Any:
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
    """Let every random node of `graph` draw from the lanes' generators, the last input, and return whether there is one.

    Args:
        graph: of one call; changed in place.
        alone: of the same step recorded for a single lane.

    Raises:
        CannotBatch: the two do not match one to one, or a node draws on another device.
    """
    nodes, single = ([node for node in each.nodes if is_random(node)] for each in (graph, alone))
    if len(nodes) != len(single):
        raise CannotBatch(f"a single lane draws {len(single)} times and {lanes} lanes together {len(nodes)} times")
    if not nodes:
        return False
    with graph.inserting_after(next(node for node in reversed(graph.nodes) if node.op == "placeholder")):
        generators = graph.placeholder(GENERATORS)
    generators.meta["base"] = generators
    for node, plain in zip(nodes, single, strict=True):
        where = meta(node if "tensor" in node.meta else next(iter(node.users))).device
        if where.type != device.type:
            raise CannotBatch(f"random numbers are drawn on {where}, the model is on {device}")
        draw = _draw_of(node, plain, lanes)
        with graph.inserting_before(node):
            new = graph.call_function(draw, (generators, *(node.args[place] for place, _, _ in draw.tensors)))
        new.meta = dict(node.meta) | {"random": True}
        if draw.fills:
            new.meta["writes"] = (node.args[0],)
        elif base_of(node) is node:
            new.meta["base"] = new
        for each in graph.nodes:
            if each.meta.get("base") is node:
                each.meta["base"] = new
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True


def _draw_of(node: fx.Node, single: fx.Node, lanes: int) -> _Draw:
    ours: Any = node.target
    target: Any = single.target
    fills = target._schema.is_mutable and target is ours
    same = target is ours or (target._schema.name == f"{ours._schema.name}_" and not ours._schema.is_mutable)
    theirs, args = (
        [value for a, value in arguments(each) if not a.kwarg_only and a.name != "generator"] for each in (node, single)
    )
    same &= len(theirs) == len(args)
    tensors = []
    for place, (given, alone) in enumerate(zip(theirs, args, strict=True) if same else ()):
        if isinstance(alone, fx.Node):
            split = meta(given).shape != meta(alone).shape
            same &= not split or meta(given).shape == (lanes, *meta(alone).shape)
            tensors.append((place, meta(alone), split))
        elif isinstance(alone, (list, tuple)):  # a size
            same &= list(given) in ([*alone], [lanes, *alone])
        else:
            same &= given == alone
    whole = [split for place, _, split in tensors if place == 0] == [lanes > 1]
    if not same or (target._schema.is_mutable and not whole):
        raise CannotBatch(f"{ours} draws random numbers in a way that lanes cannot do together")
    kwargs = {name: value for name, value in single.kwargs.items() if name != "generator"}
    return _Draw(target, tuple(args), kwargs, tuple(tensors), stacked=lanes > 1, fills=fills)
