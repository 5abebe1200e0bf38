"""The parts that a training is made of, each with a way to put it back by hand from a twin that has got there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["Part", "has_state", "other_names", "parts_of", "same_values", "snapshot"]

Parts = MutableMapping[str, Any]
PLAIN = (bool, int, float, str, type(None), Tensor)


class Part(NamedTuple):
    """One part: its name, and what puts it back: `restore(into, twin)`."""

    name: str
    restore: Callable[[Parts, Parts], None]


def parts_of(parts: Parts) -> list[Part]:
    """Return what can be put back one by one: parameters and buffers of a module apart, and the global random state last.

    A part with `state_dict` and `load_state_dict` goes through them. A generator's state is copied, plain values are too. An
    iterator, a dataset, a sampler or a loader is taken over from the twin as it is. Anything else cannot be put back.

    Args:
        parts: what the user's `build` returns.
    """
    found: list[Part] = []
    for name, value in parts.items():
        if isinstance(value, nn.Module):
            found.append(Part(f"{name} parameters", partial(_weights, name=name, parameters=True)))
            if other_names(value):
                found.append(Part(f"{name} buffers", partial(_weights, name=name, parameters=False)))
        elif has_state(value):
            found.append(Part(name, partial(_state, name=name)))
        elif isinstance(value, torch.Generator):
            found.append(Part(name, partial(_generator, name=name)))
        elif isinstance(value, (*PLAIN, Iterator, DataLoader, Dataset, Sampler)):
            found.append(Part(name, partial(_exchange, name=name)))
    return [*found, Part("random state", _nothing)]


def _weights(into: Parts, twin: Parts, *, name: str, parameters: bool) -> None:
    model, other = into[name], twin[name]
    wanted = {k: v for k, v in other.state_dict().items() if (k not in other_names(other)) == parameters}
    model.load_state_dict(copy.deepcopy({**model.state_dict(), **wanted}))


def _state(into: Parts, twin: Parts, *, name: str) -> None:
    into[name].load_state_dict(copy.deepcopy(twin[name].state_dict()))


def _generator(into: Parts, twin: Parts, *, name: str) -> None:
    into[name].set_state(twin[name].get_state())


def _exchange(into: Parts, twin: Parts, *, name: str) -> None:
    into[name] = twin[name]


def _nothing(into: Parts, twin: Parts) -> None:
    """Stand in for the global random state: the audit puts it back itself, when everything else is done."""


def snapshot(parts: Parts) -> dict[str, Any]:
    """Return a copy of the values of every part that has some."""
    found: dict[str, Any] = {}
    for name, value in parts.items():
        if isinstance(value, nn.Module) or has_state(value):
            found[name] = copy.deepcopy(dict(value.state_dict()))
        elif isinstance(value, PLAIN):
            found[name] = copy.deepcopy(value)
    return found


def same_values(one: Any, other: Any) -> bool:
    """Whether two nested values are the same bit for bit; NaN is the same as NaN."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
            return False
        return (
            bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))
            if one.is_floating_point()
            else torch.equal(one, other)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_values(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_values(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)  # noqa: PLR0124  # NaN
    if type(one).__module__ in ("builtins", "numpy") and type(other) is type(one):
        return bool(one == other)
    return True  # functions and objects that a state dict may hold: nothing to compare


def has_state(value: Any) -> bool:
    """Whether a part keeps its state as optimizers and schedules do."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def other_names(model: nn.Module) -> set[str]:
    """Return the names in the state dict that are no parameters: batch-norm statistics and other buffers."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
