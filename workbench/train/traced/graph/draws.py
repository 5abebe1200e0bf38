"""Random operations with a generator for each lane: lane k draws what it would draw if it were trained alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.train.traced.graph.nodes import TensorMeta

__all__ = ["Fill", "New", "Sample", "global_generator"]

_global_state = threading.Lock()


@dataclass(frozen=True)
class Fill:
    """Fills row k of a tensor (lanes, ...) from generator k, or the whole tensor where there is one lane without an axis.

    Attributes:
        op: the operation in place.
        values: its arguments after the tensor.
        alone: what the tensor looks like in a single trial; its strides decide which number lands where.
        stacked: whether there is a lane axis.
    """

    __name__ = "fill"  # a graph asks what it calls for its name

    op: Any
    values: tuple[Any, ...]
    alone: TensorMeta
    stacked: bool

    def __call__(self, generators: Sequence[torch.Generator], out: Tensor) -> Tensor:
        """Fill `out` and return it."""
        rows = out.unbind(0) if self.stacked else (out,)
        for row, generator in zip(rows, generators, strict=True):
            if row.stride() == self.alone.stride:
                self.op(row, *self.values, generator=generator)
            else:
                row.copy_(self.op(_empty(self.alone), *self.values, generator=generator))
        return out


@dataclass(frozen=True)
class New:
    """Makes a tensor and fills it."""

    __name__ = "new"  # a graph asks what it calls for its name

    fill: Fill
    like: TensorMeta

    def __call__(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return random numbers."""
        return self.fill(generators, _empty(self.like))


@dataclass(frozen=True)
class Sample:
    """Runs an operation whose random numbers depend on tensors, lane by lane.

    Attributes:
        op: the operation as a single trial calls it.
        split: for each tensor argument, whether it has a lane axis; None where no tensor has one.
        takes_generator: False where it only draws from the global generator, as fused kernels do.
    """

    __name__ = "sample"  # a graph asks what it calls for its name

    op: Any
    split: tuple[bool, ...] | None
    takes_generator: bool

    def __call__(self, generators: Sequence[torch.Generator], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the operation, stacked where there is a lane axis."""
        if self.split is None:
            return self._draw(generators[0], args, kwargs)
        results = []
        for lane, generator in enumerate(generators):
            split = iter(self.split)
            own = [a[lane] if isinstance(a, Tensor) and next(split) else a for a in args]
            results.append(self._draw(generator, own, kwargs))
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    def _draw(self, generator: torch.Generator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.takes_generator:
            return self.op(*args, **kwargs, generator=generator)
        with _global_state:  # another lane must not draw from it at the same time
            shared = global_generator(generator.device)
            if shared is generator:
                return self.op(*args, **kwargs)
            before = shared.get_state()
            shared.set_state(generator.get_state())
            try:
                return self.op(*args, **kwargs)
            finally:
                generator.set_state(shared.get_state())
                shared.set_state(before)


def _empty(like: TensorMeta) -> Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)


def global_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on `device` draw from when they are given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator
