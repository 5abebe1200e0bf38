"""The state of a placed module, whole, from what lies in the servers' blocks, and back: whatever the shards (T10.4, T14.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.errors import CheckpointError


class Part(NamedTuple):
    """A stretch of a parameter, in flat elements."""

    parameter: str
    begin: int
    size: int


def joined(
    blocks: Sequence[Sequence[Part]], states: Sequence[Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """Return parameters, slots (optimizer's name -> parameter -> tensor), plain_slots (one number a block), and steps.

    Args:
        blocks: what lies in each.
        states: of the servers, by `ServerRuntime.state`.
        shapes: of the parameters, in their order.
    """
    flat: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    single = {
        slot for state in states for slot, value in state["slots"].items() if value.numel() != state["values"].numel()
    }
    for held, state in zip(blocks, states, strict=True):
        for slot, value in [("", state["values"]), *state["slots"].items()]:
            if slot in single:
                plain.setdefault(slot, value)
                continue
            whole = flat.setdefault(slot, {})
            for part in held:
                if part.parameter not in whole:
                    whole[part.parameter] = torch.empty(shapes[part.parameter].numel(), dtype=value.dtype)
            scatter(held, value.reshape(-1), whole)
    named = {
        slot: {key: whole[key].view(shape) for key, shape in shapes.items() if key in whole}
        for slot, whole in flat.items()
    }
    parameters = named.pop("")
    steps = max(state["version"] for state in states)
    return {"parameters": parameters, "slots": dict(sorted(named.items())), "plain_slots": plain, "steps": steps}


def cut(blocks: Sequence[Sequence[Part]], state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what `ServerRuntime.load` takes for each block of what `joined` returned."""
    flat = {slot: {key: value.reshape(-1) for key, value in whole.items()} for slot, whole in state["slots"].items()}
    values = {key: value.reshape(-1) for key, value in state["parameters"].items()}
    found = []
    for held in blocks:
        own = {slot: torch.cat(pieces(held, whole)) for slot, whole in flat.items() if held[0].parameter in whole}
        slots = own | dict(state["plain_slots"])
        found.append({"values": torch.cat(pieces(held, values)), "version": state["steps"], "slots": slots})
    return found


def check_fits(state: Mapping[str, Any], here: Mapping[str, torch.Size]) -> None:
    """Raise `CheckpointError` where names or shapes of the parameters differ (T10.6)."""
    shapes = {key: tuple(shape) for key, shape in here.items()}
    given = {key: tuple(value.shape) for key, value in state["parameters"].items()}
    if shapes != given:
        strange = sorted(key for key in {*shapes, *given} if shapes.get(key) != given.get(key))
        key = strange[0]
        raise CheckpointError(
            f"The checkpoint does not fit the module: parameter {key!r} is {given.get(key, 'missing')} there and "
            f"{shapes.get(key, 'missing')} here ({len(strange)} differ). Make the module as it was when the checkpoint was written."
        )


def pieces(held: Sequence[Part], values: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the stretches of flat tensors that lie in a block, in order."""
    return [values[part.parameter][part.begin : part.begin + part.size] for part in held]


def scatter(held: Sequence[Part], values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Copy a block's values to where they belong in flat tensors."""
    at = 0
    for part in held:
        parameters[part.parameter][part.begin : part.begin + part.size] = values[at : at + part.size]
        at += part.size
