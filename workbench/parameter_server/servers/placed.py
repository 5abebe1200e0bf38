"""`PlacedModule`: a module whose parameters live on parameter servers; workers hold replicas that read and write them (T1.1)."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import CheckpointError, UsageError
from workbench.parameter_server.context import check_cancelled, current_worker, taking
from workbench.parameter_server.servers.links import DataPlane, plane_of
from workbench.parameter_server.servers.partitioners import trained_parameters
from workbench.parameter_server.servers.replicas import (
    Replica,
    ReplicaBuffers,
    check_finite,
    forget_replicas,
    portable,
    replica_of,
    tracks_statistics,
    unpacked,
    with_gradients,
)
from workbench.parameter_server.servers.server import Place, Push


class Part(NamedTuple):
    """A stretch of a parameter, in flat elements."""

    parameter: str
    begin: int
    size: int


class PlacedModule:
    """Parameters in one block a server; `step` is one update by whoever calls it, on a worker or on the coordinator.

    Made by `ParameterServerStrategy.place`. A worker makes its replica when it first needs one. Parameters that need no gradient stay
    in the module and are no server's. Buffers, such as the running statistics of batch norm, are each worker's own and start as the
    module's; `merge_buffers` brings them together.

    Args:
        module: with its initial values.
        parts: server -> what it holds, in the order in which it lies there.
        cluster: id of the cluster.
        exactly_once: whether a push that is repeated is applied once.
        scale: factor on gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        parts: Mapping[int, Sequence[Part]],
        *,
        name: str,
        cluster: str,
        exactly_once: bool = True,
        scale: float = 1.0,
    ) -> None:
        self.config, self.name, self.cluster = config, name, cluster
        self.parts = {server: list(held) for server, held in sorted(parts.items())}
        self.places = [Place(server, f"{name}@{server}") for server in self.parts]
        self.exactly_once, self.scale = exactly_once, scale
        self._module = module
        self._shapes = {key: parameter.shape for key, parameter in trained_parameters(module).items()}
        self._knows_statistics = False

    def __repr__(self) -> str:
        """Say how many values lie where."""
        where = ", ".join(
            f"{sum(part.size for part in held):,} values on ps {server}" for server, held in self.parts.items()
        )
        return f"PlacedModule({self.name!r}: {where})"

    def __getstate__(self) -> dict[str, Any]:
        """Travel, whatever the module is made of."""
        return self.__dict__ | {"_module": portable(self._module)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive."""
        self.__dict__ |= state | {"_module": unpacked(state["_module"])}

    def __getattr__(self, name: str) -> Any:
        """Say how to come by a module, where something of a module is asked for."""
        hint = ""
        if not name.startswith("_") and hasattr(nn.Module, name):
            hint = " Its parameters are on the servers: `with placed.step() as module` hands out one to train with, placed.module() a plain copy."
        raise AttributeError(f"PlacedModule has no attribute {name!r}.{hint}")

    def delete(self) -> None:
        """Let the servers forget it."""
        for place in self.places:
            self._plane.ask(place.server, "delete", place.block)
        forget_replicas(self.cluster, self.name)

    def create(self) -> None:
        """Give the servers the initial values."""
        values = {key: parameter.detach().reshape(-1) for key, parameter in trained_parameters(self._module).items()}
        for place, held in zip(self.places, self.parts.values(), strict=True):
            self._plane.ask(place.server, "create", place.block, _block_values(held, values), self.config)

    @contextlib.contextmanager
    def step(self) -> Iterator[nn.Module]:
        """Pull the newest values, hand out the module with empty gradients, and push what `backward` left in them.

        Nothing is pushed where the code inside raises. To look at the values, or to leave an update out, use `pull` and `push`.
        """
        replica = self.pull()
        replica.module.zero_grad(set_to_none=True)
        yield replica.module
        self.push(replica)

    def pull(self) -> Replica:
        """Return this worker's replica with the newest values."""
        check_cancelled()
        replica = self._replica()
        replica.versions[:] = self.pull_into(replica.parameters)
        return replica

    def pull_into(self, parameters: Mapping[str, Tensor]) -> list[int]:
        """Copy the newest values into flat tensors by the parameters' names; returns the versions of the blocks."""
        check_cancelled()
        held = list(self.parts.values())
        with taking("pull_s"):
            return self._plane.pull_into(self.places, lambda k, values: _scatter(held[k], values, parameters))

    def push(self, replica: Replica) -> list[int]:
        """Send the replica's gradients to the servers, clipped at the config's max_grad_norm; returns the new versions.

        A parameter that got none counts as one with gradient 0, as in `Trainer`: momentum goes on, and weight decay. Sparse gradients
        are sent whole.

        Raises:
            UsageError: no parameter has a gradient, or one has that is on no server.
            NonFiniteError: a gradient is NaN or infinite.
        """
        held = with_gradients(replica.module, self._shapes)
        check_finite(held, self.name)
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(held.values(), self.config.max_grad_norm)
        grads = {
            key: torch.zeros(parameter.numel(), dtype=parameter.dtype)
            if parameter.grad is None
            else parameter.grad.reshape(-1)
            for key, parameter in held.items()
        }
        versions = self.push_flat(grads, replica.versions)
        replica.updates += 1
        return versions

    def push_flat(self, grads: Mapping[str, Tensor], versions: Sequence[int]) -> list[int]:
        """Send flat gradients by the parameters' names as they are; returns the new versions of the blocks.

        Args:
            grads: for every parameter.
            versions: of the blocks, as they were pulled: the gradients' staleness is counted from them.
        """
        check_cancelled()
        here = current_worker()
        tokens = [here.token(*place) if here is not None and self.exactly_once else None for place in self.places]
        worker = -1 if here is None else here.index
        with taking("push_s"):
            return self._plane.push(
                self.places,
                [_pieces(held, grads) for held in self.parts.values()],
                [Push(version, worker, token, self.scale) for version, token in zip(versions, tokens, strict=True)],
            )

    def module(self) -> nn.Module:
        """Return a plain module with the newest values, the caller's own."""
        self.check_statistics()
        return copy.deepcopy(self.pull().module)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizer slots, buffers, what is not trained, and steps: whole, whatever the shards (T10.4, T14.5)."""
        states = [self._plane.ask(place.server, "state", place.block) for place in self.places]
        slots = sorted({key for state in states for key in state["slots"]})
        parameters = self._whole([state["values"] for state in states])
        kept = {
            slot: self._whole([state["slots"][slot] for state in states])
            for slot in slots
            if all(state["slots"][slot].numel() == state["values"].numel() for state in states)
        }
        plain = {slot: states[0]["slots"][slot] for slot in slots if slot not in kept}
        steps = max(state["version"] for state in states)
        frozen = {key: parameter.detach().clone() for key, parameter in self._frozen(self._module)}
        return {
            "parameters": parameters, "buffers": self.buffers(), "frozen": frozen, "slots": kept, "plain_slots": plain, "steps": steps,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, also of a cluster with other shards or another number of servers.

        Raises:
            CheckpointError: names or shapes of the parameters differ (T10.6).
        """
        shapes = {key: tuple(shape) for key, shape in self._shapes.items()}
        given = {key: tuple(value.shape) for key, value in state["parameters"].items()}
        if shapes != given:
            strange = sorted(key for key in {*shapes, *given} if shapes.get(key) != given.get(key))
            key = strange[0]
            raise CheckpointError(
                f"The checkpoint does not fit the module: parameter {key!r} is {given.get(key, 'missing')} there and "
                f"{shapes.get(key, 'missing')} here ({len(strange)} differ). Make the module as it was when the checkpoint was written."
            )
        flat = {key: value.reshape(-1) for key, value in state["parameters"].items()}
        slots = {
            slot: {key: value.reshape(-1) for key, value in whole.items()} for slot, whole in state["slots"].items()
        }
        for place, held in zip(self.places, self.parts.values(), strict=True):
            self._plane.ask(
                place.server, "load", place.block,
                {
                    "values": _block_values(held, flat), "version": state["steps"],
                    "slots": {slot: _block_values(held, whole) for slot, whole in slots.items()} | dict(state["plain_slots"]),
                },
            )  # fmt: skip
        with torch.no_grad():
            for module in (self._module, self._replica().module):
                for key, parameter in self._frozen(module):
                    if key in state.get("frozen", {}):
                        parameter.copy_(state["frozen"][key])
        self.load_buffers(state["buffers"])

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers of the replica here: of a worker its own, such as the statistics of its batch norm layers."""
        return _buffers(self._replica().module)

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the replica here, and those that are made from now on, these buffers."""
        _copy_buffers(self._module, buffers)
        self.take_buffers(buffers)

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the replica here, from which `module` and checkpoints are made, these buffers; workers keep their own."""
        _copy_buffers(self._replica().module, buffers)
        self._knows_statistics = True

    def replica_buffers(self) -> ReplicaBuffers:
        """Return the buffers of the replica here, with the number of updates that were pushed from it."""
        return ReplicaBuffers(self._replica().updates, self.buffers())

    def start_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that every replica begins with."""
        return _buffers(self._module)

    def check_statistics(self) -> None:
        """Warn where batch norm's running statistics are still those of before training here: the workers made their own."""
        if self._knows_statistics or current_worker() is not None or not tracks_statistics(self._module):
            return
        if self.steps and not self._replica().updates:
            warnings.warn(
                f"{self.name!r} has batch norm layers whose running statistics lie on the workers; here they are those of before training. "
                "Call merge_buffers(coordinator, placed) before you evaluate, export or save it.",
                stacklevel=3,
            )

    def reconfigure(self, config: TrainConfig) -> None:
        """Let the servers go on by another config of the same optimizer, such as another peak_lr, from their next update on."""
        if not isinstance(config, TrainConfig):
            raise UsageError(f"reconfigure takes a TrainConfig, not {config!r}: placed.config.replace(peak_lr=...).")
        if config.optimizer != self.config.optimizer or config.rules != self.config.rules:
            raise UsageError(
                f"reconfigure got optimizer={config.optimizer!r}; the servers keep the state of {self.config.optimizer!r}. Change "
                "its constants, its learning rate or its schedule, or place the module anew."
            )
        for place in self.places:
            self._plane.ask(place.server, "configure", place.block, config)
        self.config = config

    def shards(self, parameter: str) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each shard of a parameter its server and its shape (T3.8)."""
        shape = self._shapes[parameter]
        held = sorted((part.begin, server, part.size) for server, parts in self.parts.items() for part in parts if part.parameter == parameter)  # fmt: skip
        row = shape[1:].numel()
        return [(server, (size // row, *shape[1:]) if shape else ()) for _, server, size in held]

    @property
    def steps(self) -> int:
        """How many pushes the servers have applied: the progress of training (T10.5)."""
        report = self._plane.ask(self.places[0].server, "load_report")
        return int(report[self.places[0].block]["version"])

    @property
    def _plane(self) -> DataPlane:
        return plane_of(self.cluster)

    def _replica(self) -> Replica:
        return replica_of(self.cluster, self.name, self._module, list(self._shapes), len(self.places))

    def _frozen(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(key, parameter) for key, parameter in module.named_parameters() if key not in self._shapes]

    def _whole(self, blocks: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return tensors in the parameters' shapes, by name, of what lies in the blocks."""
        found = {key: torch.empty(shape.numel(), dtype=blocks[0].dtype) for key, shape in self._shapes.items()}
        for block, held in zip(blocks, self.parts.values(), strict=True):
            _scatter(held, block.reshape(-1), found)
        return {key: value.view(self._shapes[key]) for key, value in found.items()}


def _pieces(held: Sequence[Part], values: Mapping[str, Tensor]) -> list[Tensor]:
    return [values[part.parameter][part.begin : part.begin + part.size] for part in held]


def _block_values(held: Sequence[Part], values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(_pieces(held, values))


def _scatter(held: Sequence[Part], values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Copy a block's values to where they belong in flat parameters."""
    at = 0
    for part in held:
        parameters[part.parameter][part.begin : part.begin + part.size] = values[at : at + part.size]
        at += part.size


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {key: buffer.detach().clone() for key, buffer in module.named_buffers()}


def _copy_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for key, buffer in module.named_buffers():
            buffer.copy_(buffers[key])
