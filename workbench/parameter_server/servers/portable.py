"""`portable`: modules with parametrizations, which torch does not pickle, as something that travels to a worker."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

__all__ = ["Portable", "portable", "unpacked"]


class Portable(NamedTuple):
    """A module without its parametrizations, and what it takes to put them back.

    Attributes:
        plain: the module, each parametrized tensor a plain one.
        parametrizations: (path of the submodule, name of the tensor, what is applied to it in this order).
        state: of the module with them.
        frozen: names of its parameters that need no gradient.
    """

    plain: nn.Module
    parametrizations: list[tuple[str, str, list[nn.Module]]]
    state: dict[str, Any]
    frozen: set[str]


def portable(module: nn.Module) -> nn.Module | Portable:
    """Return what can be pickled in place of a module: itself, unless some of its tensors are parametrized, as by weight norm."""
    if not any(parametrize.is_parametrized(part) for part in module.modules()):
        return module
    memo: dict[
        int, Any
    ] = {}  # torch takes parametrizations off the class, which a copy shares: so the copy is made without them
    found = []
    for path, part in module.named_modules():
        if not parametrize.is_parametrized(part):
            continue
        held: Any = part.parametrizations
        shell = memo[id(part)] = _without_parametrizations(part, memo)
        for name, applied in held.items():
            shell._parameters[name] = nn.Parameter(getattr(part, name).detach().clone())
            found.append((path, name, copy.deepcopy(list(applied), memo)))
    plain = copy.deepcopy(module, memo)
    frozen = {key for key, parameter in module.named_parameters() if not parameter.requires_grad}
    return Portable(plain, found, {key: value.clone() for key, value in module.state_dict().items()}, frozen)


def unpacked(given: nn.Module | Portable) -> nn.Module:
    """Undo `portable`."""
    if not isinstance(given, Portable):
        return given
    module = given.plain
    for path, name, applied in given.parametrizations:
        for each in applied:
            parametrize.register_parametrization(module.get_submodule(path), name, each, unsafe=True)
    module.load_state_dict(given.state)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key not in given.frozen)
    return module


def _without_parametrizations(part: nn.Module, memo: dict[int, Any]) -> nn.Module:
    kind = parametrize.type_before_parametrizations(part)
    shell: nn.Module = object.__new__(kind)
    own = {key: value for key, value in part._modules.items() if key != "parametrizations"}
    shell.__dict__ |= copy.deepcopy(part.__dict__ | {"_modules": own}, memo)
    return shell
