"""What a model keeps in Python rather than in parameters and buffers: it must not change while a step runs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.train.traced.cannot_batch import CannotBatch

__all__ = ["ModuleState", "changed", "check_alike", "copy_model", "module_state"]

_MEMBERS = ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")
_HOOKS = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, dict) and key not in _MEMBERS)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 4  # rule of thumb: containers in containers are looked into this deep

ModuleState = dict[tuple[str, str], Any]


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy with memory of its own.

    Raises:
        CannotBatch: something in it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    for b in model.buffers():  # copied as it is, a row of a stack would bring the whole stack along
        memo[id(b)] = b.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CannotBatch(f"the model cannot be copied ({type(error).__name__}: {error})") from error


def module_state(model: nn.Module, *, by_value: bool = False) -> ModuleState:
    """Return what each module keeps in plain attributes, in a form that can be compared.

    Args:
        model: to look at.
        by_value: compare tensors by their values, for two models; else by identity, for one model at two times.
    """
    own = {id(member) for member in (*model.modules(), *model.parameters(), *model.buffers())}
    freeze = _Freeze(own, by_value=by_value)
    return {
        (name, key): freeze(list(value.values()) if key in _HOOKS else value, DEPTH)  # a hook's key is its number
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _MEMBERS
    }


def changed(before: ModuleState, after: ModuleState) -> Iterator[str]:
    """Yield the attributes that differ, as `module.attribute`."""
    for name, key in sorted({*before, *after}):
        if (name, key) not in before or (name, key) not in after or before[name, key] != after[name, key]:
            yield f"{name}.{key}" if name else key


def check_alike(models: Sequence[nn.Module]) -> None:
    """Check that models differ in parameters and buffers alone, so that one program serves all.

    Raises:
        CannotBatch: an attribute differs; it is named.
    """
    first = module_state(models[0], by_value=True)
    for model in models[1:]:
        for name in changed(first, module_state(model, by_value=True)):
            raise CannotBatch(f"the attribute {name!r} of the model is not the same in all trials")


class _Freeze:
    """Turns a value into something that can be compared later; `own` are the model's registered members."""

    def __init__(self, own: set[int], *, by_value: bool) -> None:
        self._own, self._by_value = own, by_value

    def __call__(self, value: Any, depth: int) -> Any:
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))  # repr: nan is nan, and 1 is not True
        if id(value) in self._own or depth == 0:
            return type(value).__qualname__
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):  # kept in a list, so that nobody trains it
            return ("module", *((name, self._tensor(t)) for name, t in value.state_dict(keep_vars=True).items()))
        if isinstance(value, Mapping):
            return ("dict", *((repr(k), self(v, depth - 1)) for k, v in value.items()))
        if isinstance(value, (list, tuple, deque)):
            return ("list", *(self(v, depth - 1) for v in value))
        if isinstance(value, (set, frozenset)):
            return ("set", *sorted(map(repr, value)))
        return self._object(value, depth)

    def _tensor(self, value: Tensor) -> Any:
        if not self._by_value:
            return ("tensor", id(value), value._version)
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", tuple(value.shape), str(value.dtype), hash(content))

    def _object(self, value: Any, depth: int) -> Any:
        inside = getattr(value, "__dict__", None)
        if isinstance(inside, dict) and not callable(value):
            return (type(value).__qualname__, *((k, self(v, depth - 1)) for k, v in inside.items()))
        return type(value).__qualname__ if self._by_value else (type(value).__qualname__, id(value))
