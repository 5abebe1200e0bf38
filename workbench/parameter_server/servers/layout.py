"""Into how many shards a variable is split along its first axis (T3.2 to T3.4), where those of a module lie (T3.8), and its state, whole, from them (T10.4, T14.5)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.errors import CheckpointError, UsageError
from workbench.parameter_server.servers.server import Place
from workbench.parameter_server.servers.tables import Embeddings, Table, rule_of, tables_in
from workbench.parameter_server.servers.variable import Shard


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that need a gradient, by name; tied ones once."""
    return {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}


def check_placeable(module: Any, config: Any) -> None:
    """Refuse what servers cannot train, by a `UsageError` that says what to do."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"place takes a torch.nn.Module, not {type(module).__name__}. Give the module itself.")
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"config is {type(config).__name__} and must be a TrainConfig: the servers update what they hold by a rule that they know. For example "
            'TrainConfig(optimizer="adam", peak_lr=1e-3, total_steps=1000, batch_size=32).'
        )
    if callable(config.optimizer):
        raise UsageError(
            f"optimizer={config.to_dict()['optimizer']!r} is a factory: on servers a rule by its name is needed, such as 'momentum'."
        )
    name = type(module).__name__
    lazy = [key for key, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"{name} has parameters without a shape: {', '.join(lazy[:3])}. Call the module once on one batch before it is placed, or "
            "give its layers their sizes."
        )
    trained = trained_parameters(module)
    if not trained:
        raise UsageError(
            f"{name} has {len(list(module.parameters()))} parameters and none that needs a gradient, so there is nothing to train. Place "
            "a module with something to train; layers in a plain list are not found, use nn.ModuleList."
        )
    kinds = sorted({str(parameter.dtype) for parameter in trained.values()})
    if len(kinds) > 1 or any(parameter.is_complex() for parameter in trained.values()):
        raise UsageError(
            f"{name} has trained parameters of {', '.join(kinds)}; one real dtype is needed, as they lie together on a server. Call "
            ".float() on the module, and torch.autocast in the step for a forward pass in another precision."
        )
    for place, part in module.named_modules():
        if getattr(part, "max_norm", None) is not None and part.weight.requires_grad:
            raise UsageError(
                f"{place or name} has max_norm={part.max_norm}: in forward torch writes the table's rows over, and a worker has a copy of them. "
                "Leave it out, and shorten what is looked up: rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )
        for key, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise UsageError(
                    f"{name} keeps {'.'.join(filter(None, (place, key)))}, a tensor that was computed from parameters: a worker cannot "
                    "copy it, and it would not follow them. Compute it in forward."
                )


Partitioner = Callable[[Sequence[int], torch.dtype], Sequence[int]]
"""From a variable's shape and dtype to the number of shards along each of its axes; only the first may be above 1."""


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """The same number of shards for every variable, or as many as it has rows where those are fewer."""

    num_shards: int  # usually the number of parameter servers (T3.4)

    def __post_init__(self) -> None:
        """Check."""
        check_integer("num_shards", self.num_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:  # noqa: ARG002
        """Return the number of shards along each axis."""
        return _first_axis(shape, self.num_shards)


@dataclass(frozen=True)
class MinSizePartitioner:
    """A shard for each `min_shard_bytes` of a variable, so that small ones stay whole; as TensorFlow's it rounds their number up.

    Attributes:
        min_shard_bytes: at least 1. The default, 256 KiB, is TensorFlow's.
        max_shards: at least 1, and never exceeded; usually the number of parameter servers.
    """

    min_shard_bytes: int = 256 * 2**10
    max_shards: int = 1

    def __post_init__(self) -> None:
        """Check."""
        check_integer("min_shard_bytes", self.min_shard_bytes)
        check_integer("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the number of shards along each axis."""
        return _first_axis(shape, min(self.max_shards, -(-math.prod(shape) * dtype.itemsize // self.min_shard_bytes)))


@dataclass(frozen=True)
class MaxSizePartitioner:
    """As few shards as there can be with at most `max_shard_bytes` in each; a row is never split.

    Attributes:
        max_shard_bytes: at least 1. Exceeded where one row is larger, or `max_shards` allows no more shards.
        max_shards: at least 1; None is as many as it takes.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        """Check."""
        check_integer("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            check_integer("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the number of shards along each axis."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize if len(shape) else 0
        if not row_bytes:
            return _first_axis(shape, 1)
        rows_each = max(1, self.max_shard_bytes // row_bytes)
        shards = -(-shape[0] // rows_each)
        return _first_axis(shape, shards if self.max_shards is None else min(self.max_shards, shards))


def split_rows(partitioner: Partitioner | None, shape: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return first row and number of rows of each shard of a variable: contiguous, and the first ones take the remainder.

    Ten rows in 4 shards are 3, 3, 2 and 2. There are as many shards as the partitioner says, and no more than rows. It is called with
    shape and dtype at the variable's creation (T3.3), but not for a single number, which has no axis to split.
    """
    if not shape:
        return [(0, 1)]
    shards = [1] if partitioner is None else partitioner(tuple(shape), dtype)
    counts = isinstance(shards, (list, tuple)) and all(type(n) is int and n >= 1 for n in shards)
    if not counts or not shards or any(n != 1 for n in shards[1:]):
        raise UsageError(
            f"variable_partitioner returned {shards!r} for a variable of shape {tuple(shape)}. Allowed: a list with the "
            f"number of shards along each axis, at least 1, and 1 for every axis but the first, such as "
            f"{[2] + [1] * (len(shape) - 1)}. Return {[1] * len(shape)} to leave a variable whole."
        )
    count = max(1, min(shards[0], shape[0]))
    each, left = divmod(shape[0], count)
    return [(i * each + min(i, left), each + (i < left)) for i in range(count)]


def _first_axis(shape: Sequence[int], shards: int) -> list[int]:
    return [max(1, min(shards, shape[0])), *(1 for _ in shape[1:])] if len(shape) else []


class Part(NamedTuple):
    """A stretch of a parameter, in flat elements."""

    parameter: str
    begin: int
    size: int


def lay_out(
    module: nn.Module,
    embeddings: Embeddings,
    partitioner: Partitioner | None,
    servers: Iterator[int],
    *,
    name: str,
    cluster: str,
) -> tuple[dict[int, list[Part]], list[Table]]:
    """Return what lies on each server, and the tables that are kept row by row: each shard of a parameter on the next server."""
    parts: dict[int, list[Part]] = {}
    tables, kept = [], tables_in(module, embeddings)
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "cpu" and not (tensor.is_meta and key in kept):
            raise UsageError(
                f"{key!r} is on the device {str(tensor.device)!r}: servers and workers compute on the CPU, and begin with values that are there. Call "
                ".cpu() on the module before it is placed, or make it on the CPU; only a table that stays on the servers may be on 'meta'."
            )
    for key, parameter in trained_parameters(module).items():
        shape = parameter.shape
        shards = split_rows(partitioner, shape, parameter.dtype)
        if key in kept:
            lie = [Shard(Place(next(servers), f"{name}/{key}/{k}"), *shard) for k, shard in enumerate(shards)]
            rule, padding = rule_of(embeddings), kept[key].padding_idx
            tables.append(Table(key, (shape[0], shape[1]), parameter.dtype, cluster, lie, rule, padding))
            continue
        row = shape[1:].numel() if shape else 1
        for offset, count in shards:
            parts.setdefault(next(servers), []).append(Part(key, offset * row, count * row if shape else 1))
    return parts, tables


def joined(
    blocks: Sequence[Sequence[Part]], states: Sequence[Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """Return parameters, slots (optimizer's name -> parameter -> tensor), plain_slots (one number a block), and steps, of blocks' states."""
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
