"""Where each parameter of a module comes to lie: in shards, in turn on the servers; tables row by row (T3.2, T3.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.servers.partitioners import trained_parameters
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.placed_state import Part
from workbench.parameter_server.servers.server import Place
from workbench.parameter_server.servers.tables import Embeddings, Shard, Table, rule_of, tables_in


def lay_out(
    module: nn.Module,
    config: TrainConfig,
    embeddings: Embeddings,
    shards_of: Callable[[tuple[int, ...], torch.dtype], Sequence[tuple[int, int]]],
    servers: Iterator[int],
    *,
    name: str,
    cluster: str,
    **how: Any,
) -> PlacedModule:
    """Place a module: its parameters in their shards, each on the next server, and give the servers the values."""
    parts: dict[int, list[Part]] = {}
    tables, kept = [], tables_in(module, embeddings)
    for key, parameter in trained_parameters(module).items():
        shape = parameter.shape
        shards = shards_of(tuple(shape), parameter.dtype)
        if key in kept:
            lie = [Shard(Place(next(servers), f"{name}/{key}/{k}"), *shard) for k, shard in enumerate(shards)]
            rule, padding = rule_of(embeddings), kept[key].padding_idx
            tables.append(Table(key, (shape[0], shape[1]), parameter.dtype, cluster, lie, rule, padding))
            continue
        if parameter.is_meta:
            raise UsageError(
                f"Parameter {key!r} is on the meta device and has no values. That is for tables that stay on the servers; make all else on the CPU."
            )
        row = shape[1:].numel() if shape else 1
        for offset, count in shards:
            parts.setdefault(next(servers), []).append(Part(key, offset * row, count * row if shape else 1))
    placed = PlacedModule(module, config, parts, tables=tables, name=name, cluster=cluster, **how)
    placed.create(module)
    return placed
