"""`PlacedModule`: a module whose parameters live on parameter servers; workers hold replicas that read and write them (T1.1)."""

import contextlib
import copy
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.context import current_worker, taking
from workbench.parameter_server.servers.layout import Part, check_fits, cut, joined, pieces, scatter, trained_parameters
from workbench.parameter_server.servers.links import DataPlane, plane_of
from workbench.parameter_server.servers.replicas import (
    Replica,
    ReplicaBuffers,
    check_gradients,
    copy_buffers,
    forget_replicas,
    portable,
    replica_of,
    tracks_statistics,
    unpacked,
    with_gradients,
)
from workbench.parameter_server.servers.row_rules import TableOf
from workbench.parameter_server.servers.server import SETTINGS, Drawn, Place, Push
from workbench.parameter_server.servers.tables import Table, Taken, remote_tables, replaced, without_tables
from workbench.parameter_server.servers.variable import split_ids


class PlacedModule:
    """Parameters in one block a server, tables of embeddings in blocks of their own; `step` is one update by whoever calls it, on a worker or on the coordinator.

    Made by `ParameterServerStrategy.place`, whose servers get its initial values. A worker makes its replica when it first needs one. Parameters that need no gradient stay
    in the module and are no server's. Buffers, such as the running statistics of batch norm, are each worker's own and start as the
    module's; `merge_buffers` brings them together.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        parts: Mapping[int, Sequence[Part]],
        tables: Sequence[Table],
        *,
        name: str,
        cluster: str,
        exactly_once: bool = True,
    ) -> None:
        self.config, self.name, self.cluster = config, name, cluster
        self.parts = {server: list(held) for server, held in sorted(parts.items())}
        self.places = [Place(server, f"{name}@{server}") for server in self.parts]
        self.tables = {table.parameter: table for table in tables}
        self.settings = Place(self.all_places[0].server, f"{name}{SETTINGS}")
        self._noted: dict[str, Any] = {"config": config, "frozen": {}, "buffers": {}, "restored": 0, "revision": 0}
        self.exactly_once = exactly_once
        self._shapes = {key: parameter.shape for key, parameter in trained_parameters(module).items()}
        self._module = without_tables(module, self.tables)
        self._knows_statistics = False
        self.make_blocks({key: each.detach().reshape(-1) for key, each in trained_parameters(module).items()})

    def __repr__(self) -> str:
        """Say how many values lie where."""
        where = ", ".join(
            f"{sum(part.size for part in held):,} values on ps {server}" for server, held in self.parts.items()
        )
        for table in self.tables.values():
            lie = ", ".join(f"{shard.size:,} on ps {shard.place.server}" for shard in table.shards)
            where += f"{', ' * bool(where)}rows of {table.parameter}: {lie}"
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
        for place in [*self.all_places, self.settings]:
            self._plane.ask(place.server, "delete", place.block)
        forget_replicas(self.cluster, self.name)

    def make_blocks(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Make its blocks of these flat values; with None those that a server does not hold because it was started anew: their values are to be loaded."""
        missing, flat = values is None, self._replica().parameters if values is None else values
        for place, held in zip(self.all_places, self.stretches(), strict=True):
            key = held[0].parameter
            whole = None if missing else torch.cat(pieces(held, flat))
            if (table := self.tables.get(key)) is not None:
                zero = next(table.padding_in(shard) for shard in table.shards if shard.place == place)
            given: Tensor | Drawn | None = whole
            if whole is None or whole.is_meta:
                dtype, size = flat[key].dtype if table is None else table.dtype, sum(part.size for part in held)
                given = Drawn(size, dtype, int(torch.randint(2**62, ())), (0, 0) if table is None else zero)
            kind = None if table is None else TableOf(table.shape[1], table.rule)
            self._plane.ask(place.server, "create", place.block, given, self.config, kind, missing)
        self._plane.ask(self.settings.server, "create", self.settings.block, torch.zeros(1), None, None, missing)

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
        replica = self._replica()
        *replica.versions[:], revision = self.pull_into(replica.parameters, self.settings)
        if revision != replica.revision:  # restored or reconfigured on the coordinator
            replica.adopt(self._plane.ask(self.settings.server, "noted", self.settings.block), revision)
        for table in remote_tables(replica.module):
            table.gradient()  # of what was looked up before, which nobody wants
        return replica

    def pull_into(self, parameters: Mapping[str, Tensor], *beside: Place) -> list[int]:
        """Copy the newest values into flat tensors by the parameters' names; returns the versions of the blocks, and of those beside."""
        held = [*self.parts.values(), *([] for _ in beside)]
        with taking("pull_s"):
            return self._plane.pull_into(
                [*self.places, *beside], lambda k, values: scatter(held[k], values, parameters)
            )

    def push(self, replica: Replica) -> list[int]:
        """Send the replica's gradients to the servers, clipped at the config's max_grad_norm; returns the new versions.

        A parameter that got none counts as one with gradient 0, as in `Trainer`: momentum goes on, and weight decay. Of a table the
        gradient of the rows that were looked up is sent.

        Raises:
            UsageError: no parameter has a gradient, or one has that is on no server; code in the step changed a parameter.
            NonFiniteError: a gradient is NaN or infinite.
        """
        held = with_gradients(replica.module, self._shapes)
        looked_up = {each.table.parameter: each.gradient() for each in remote_tables(replica.module)}
        rows = {key: _holding(taken.rows) for key, taken in looked_up.items() if taken is not None}
        check_gradients({**held, **rows}, self.name)
        if changed := replica.changed():
            raise UsageError(
                f"{', '.join(changed[:3])} was written, cast, moved or replaced in the step ({len(changed)} such parameters), which the servers never "
                "see; nothing was sent. They make the update, by the config's optimizer; torch.autocast computes in another precision, and a parametrization "
                "keeps a weight within bounds."
            )
        if replica.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([*held.values(), *rows.values()], replica.config.max_grad_norm)
        grads = {
            key: torch.zeros(parameter.numel(), dtype=parameter.dtype)
            if parameter.grad is None
            else parameter.grad.reshape(-1)
            for key, parameter in held.items()
        }
        versions = self.push_flat(grads, replica.versions, looked_up)
        replica.updates += 1
        return versions

    def push_flat(
        self,
        grads: Mapping[str, Tensor],
        versions: Sequence[int],
        looked_up: Mapping[str, Taken | None] = types.MappingProxyType({}),
    ) -> list[int]:
        """Send flat gradients of all parameters as they are, and of rows that were looked up; returns the new versions of the blocks.

        Their staleness is counted from `versions`, those that were pulled. Every shard of a table is told of each update, also without rows.
        """
        here = current_worker()

        def push(place: Place, version: int, rows: Tensor | None = None) -> Push:
            token = here.token(*place) if here is not None and self.exactly_once else None
            worker = -1 if here is None else here.index
            return Push(version, worker, token, None if rows is None else rows.numpy())

        given: list[Sequence[Tensor]] = [pieces(held, grads) for held in self.parts.values()]
        pushes = [push(place, version) for place, version in zip(self.places, versions, strict=True)]
        for key, table in self.tables.items():
            none = torch.empty((0, table.shape[1]), dtype=table.dtype)
            taken = looked_up.get(key) or Taken(torch.empty(0, dtype=torch.int64), none, [0] * len(table.shards))
            at = 0
            for shard, rows, pulled in zip(
                table.shards, split_ids(taken.ids, table.shards), taken.versions, strict=True
            ):
                given.append([taken.rows[at : at + len(rows)].reshape(-1)])
                pushes.append(push(shard.place, pulled, rows))
                at += len(rows)
        with taking("push_s"):
            return self._plane.push(self.all_places, given, pushes)

    def module(self) -> nn.Module:
        """Return a plain module with the newest values, the caller's own."""
        self.check_statistics()
        module = copy.deepcopy(self.pull().module)
        return replaced(module, {id(each): each.plain() for each in remote_tables(module)})

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizer slots, buffers, what is not trained, and steps: whole, whatever the shards (T10.4, T14.5)."""
        found = [self._plane.ask(place.server, "state", place.block) for place in self.all_places]
        return joined(self.stretches(), found, self._shapes) | {
            "buffers": self.buffers(),
            "frozen": {key: parameter.detach().clone() for key, parameter in self._frozen(self._module)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, also of a cluster with other shards or another number of servers.

        Raises:
            CheckpointError: names or shapes of the parameters differ (T10.6).
        """
        check_fits(state, self._shapes)
        for place, given in zip(self.all_places, cut(self.stretches(), state), strict=True):
            self._plane.ask(place.server, "load", place.block, given)
        with torch.no_grad():
            for key, parameter in self._frozen(self._module):
                if key in state.get("frozen", {}):
                    parameter.copy_(state["frozen"][key])
        frozen = {key: parameter.detach() for key, parameter in self._frozen(self._module)}
        self.load_buffers(state["buffers"])
        self._note(frozen=frozen, buffers=dict(state["buffers"]), restored=self._noted["restored"] + 1)
        self.pull()

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers of the replica here: of a worker its own, such as the statistics of its batch norm layers."""
        return _buffers(self._replica().module)

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the replica here, and those that are made from now on, these buffers."""
        copy_buffers(self._module, buffers)
        self.take_buffers(buffers)

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the replica here, from which `module` and checkpoints are made, these buffers; workers keep their own."""
        copy_buffers(self._replica().module, buffers)
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
        """Let servers and workers go on by another config of the same optimizer, such as another peak_lr, from their next update on."""
        if not isinstance(config, TrainConfig):
            raise UsageError(f"reconfigure takes a TrainConfig, not {config!r}: placed.config.replace(peak_lr=...).")
        if config.optimizer != self.config.optimizer or config.rules != self.config.rules:
            raise UsageError(
                f"reconfigure got optimizer={config.optimizer!r}; the servers keep the state of {self.config.optimizer!r}. Change "
                "its constants, its learning rate or its schedule, or place the module anew."
            )
        for place in self.all_places:
            self._plane.ask(place.server, "configure", place.block, config)
        self.config = config
        self._note(config=config)

    def shards(self, parameter: str) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each shard of a parameter its server and its shape (T3.8)."""
        shape, lie = self._shapes[parameter], zip(self.all_places, self.stretches(), strict=True)
        held = sorted((part.begin, place.server, part.size) for place, parts in lie for part in parts if part.parameter == parameter)  # fmt: skip
        row = shape[1:].numel()
        return [(server, (size // row, *shape[1:]) if shape else ()) for _, server, size in held]

    @property
    def steps(self) -> int:
        """How many pushes the servers have applied: the progress of training (T10.5)."""
        server, block = self.all_places[0]
        return int(self._plane.ask(server, "version", block))

    @property
    def all_places(self) -> list[Place]:
        """Its blocks: those that hold several parameters, then those of the tables."""
        return [*self.places, *(shard.place for table in self.tables.values() for shard in table.shards)]

    def stretches(self) -> list[list[Part]]:
        """Return what lies in each of `all_places`, in order."""
        tables = [
            [Part(key, shard.first * table.shape[1], shard.size * table.shape[1])]
            for key, table in self.tables.items()
            for shard in table.shards
        ]
        return [*self.parts.values(), *tables]

    def blocks(self) -> dict[str, dict[str, int]]:
        """Return how many values of which parameters lie in each block."""
        found: dict[str, dict[str, int]] = {}
        for place, held in zip(self.all_places, self.stretches(), strict=True):
            sizes = found[place.block] = Counter[str]()
            for part in held:
                sizes[part.parameter] += part.size
        return found

    @property
    def _plane(self) -> DataPlane:
        return plane_of(self.cluster)

    def _note(self, **changed: Any) -> None:
        """Let all replicas, also those that workers hold already, take this over when they pull next."""
        self._noted = self._noted | changed | {"revision": self._noted["revision"] + 1}
        self._plane.ask(self.settings.server, "note", self.settings.block, self._noted)

    def _replica(self) -> Replica:
        return replica_of(
            self.cluster, self.name, self._module, self._shapes, len(self.places), config=self.config,
            restored=self._noted["restored"],
        )  # fmt: skip

    def _frozen(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(key, parameter) for key, parameter in module.named_parameters() if key not in self._shapes]


def _holding(gradient: Tensor) -> nn.Parameter:
    """Return a parameter that holds this gradient, for what goes over parameters."""
    made = nn.Parameter(torch.empty_like(gradient), requires_grad=True)
    made.grad = gradient
    return made


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {key: buffer.detach().clone() for key, buffer in module.named_buffers()}
