"""Embedding tables that stay on the servers: a worker's module asks for the rows of its batch, and sends their gradient alone."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import UsageError
from workbench.parameter_server.servers.row_rules import ROW_RULES, RowRule, RowRuleName
from workbench.parameter_server.servers.variable import Shard, checked_rows, place_among, pull_rows

TABLE_BYTES = 256 * 2**10  # smaller tables travel whole: a request for rows costs more (rule of thumb)

Embeddings = Literal["whole"] | RowRuleName | RowRule | None


@dataclass(frozen=True)
class Table:
    """A parameter that lies row by row in blocks of its own."""

    parameter: str
    shape: tuple[int, int]
    dtype: torch.dtype
    cluster: str
    shards: Sequence[Shard]
    rule: RowRule | None
    padding_idx: int | None

    def padding_in(self, shard: Shard) -> tuple[int, int]:
        """Return where in a shard's flat values the row that stands for padding lies; an empty stretch where it does not."""
        row = -1 if self.padding_idx is None else self.padding_idx - shard.first
        return (row * self.shape[1], (row + 1) * self.shape[1]) if 0 <= row < shard.size else (0, 0)

    def pull(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """See `pull_rows`."""
        return pull_rows(self.cluster, self.shards, ids, self.shape[1], self.dtype)


class Taken(NamedTuple):
    """Rows that a forward pass asked for."""

    ids: Tensor  # different ones, in rising order
    rows: Tensor  # (ids, width), a leaf that backward gives a gradient
    versions: list[int]  # of the shards


class RemoteTable:
    """What stands in a worker's module in place of an `nn.Embedding` or `nn.EmbeddingBag`; it has no parameter.

    `weight` reads the whole table, for code that uses it as it is; its gradient is sent whole, too.
    """

    table: Table
    padding_idx: int | None

    @classmethod
    def of(cls, module: nn.Module, table: Table) -> nn.Module:
        """Return what stands in place of a module."""
        kind = RemoteEmbedding if isinstance(module, nn.Embedding) else RemoteEmbeddingBag
        made: Any = kind.__new__(kind)
        made.__dict__ |= module.__dict__ | {"_parameters": {}, "table": table, "taken": [], "_rows": None}
        return made  # type: ignore[no-any-return]

    def plain(self) -> nn.Module:
        """Return a module as it was placed, with the newest values of the whole table."""
        kind = nn.Embedding if isinstance(self, nn.Embedding) else nn.EmbeddingBag
        made: Any = kind.__new__(kind)
        own = {key: value for key, value in self.__dict__.items() if key not in ("table", "taken", "_rows")}
        made.__dict__ |= own | {
            "_parameters": {"weight": nn.Parameter(self.table.pull(torch.arange(self.table.shape[0]))[0])}
        }
        return made  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        """The rows that are looked up right now; else the whole table."""
        rows: Tensor | None = self.__dict__["_rows"]
        return self._take(torch.arange(self.table.shape[0])) if rows is None else rows

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Look rows up as torch does, in what their servers send."""
        given = checked_rows(input, self.table.shape[0], self.table.parameter)
        ids, where = torch.unique(given, return_inverse=True)
        rows = self._take(ids.long()) if len(ids) else torch.zeros((1, self.table.shape[1]), dtype=self.table.dtype)
        padding = self.padding_idx
        try:
            self.__dict__["_rows"] = rows
            self.padding_idx = place_among(ids, padding)
            looked_up: Tensor = super().forward(where.to(given.dtype), *args, **kwargs)  # type: ignore[misc]
            return looked_up
        finally:
            self.__dict__["_rows"], self.padding_idx = None, padding

    def gradient(self) -> Taken | None:
        """Return the gradient of all rows that were looked up since the last call, each id once; None where there is none."""
        taken: list[Taken] = [each for each in self.__dict__["taken"] if each.rows.grad is not None]
        self.__dict__["taken"].clear()
        if not taken:
            return None
        grads = [each.rows.grad.to_dense() for each in taken]  # type: ignore[union-attr]
        if len(taken) == 1:
            return Taken(taken[0].ids, grads[0], taken[0].versions)
        ids, where = torch.unique(torch.cat([each.ids for each in taken]), return_inverse=True)
        total = torch.zeros((len(ids), self.table.shape[1]), dtype=self.table.dtype).index_add_(
            0, where, torch.cat(grads)
        )
        return Taken(ids, total, [min(each) for each in zip(*(each.versions for each in taken), strict=True)])

    def _take(self, ids: Tensor) -> Tensor:
        rows, versions = self.table.pull(ids)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self.__dict__["taken"].append(Taken(ids, rows, versions))
        return rows


class RemoteEmbedding(RemoteTable, nn.Embedding):  # type: ignore[override]
    """An `nn.Embedding` whose rows are on servers."""


class RemoteEmbeddingBag(RemoteTable, nn.EmbeddingBag):  # type: ignore[override]
    """An `nn.EmbeddingBag` whose rows are on servers."""


def rule_of(embeddings: Embeddings) -> RowRule | None:
    """Return the rule that `place(embeddings=)` names; raises `UsageError` where it names none."""
    if embeddings is None or isinstance(embeddings, RowRule):
        return embeddings
    if embeddings not in ROW_RULES:
        raise UsageError(
            f"embeddings={embeddings!r} is not known. Allowed: None, 'whole', {', '.join(map(repr, ROW_RULES))}, or a RowRule."
        )
    return RowRule(embeddings)  # type: ignore[arg-type]


def tables_in(module: nn.Module, embeddings: Embeddings) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings of a module that can be kept row by row, by the names of their parameters.

    Those of torch's own classes, trained, and not tied to another parameter; without a rule, of `TABLE_BYTES` at least.
    """
    if embeddings == "whole":
        return {}
    rule = rule_of(embeddings)
    holders: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = {}
    for path, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or type(part) not in (nn.Embedding, nn.EmbeddingBag):
            continue
        weight: Any = part.weight
        large = rule is not None or weight.nbytes >= TABLE_BYTES
        if large and "weight" in part._parameters and weight.requires_grad and holders[id(weight)] == 1:
            found[f"{path}.weight" if path else "weight"] = part
    return found


def without_tables(module: nn.Module, tables: Mapping[str, Table]) -> nn.Module:
    """Return the module, or where there are tables a copy in which they are remote: their values are not copied."""
    if not tables:
        return module
    memo: dict[int, Any] = {}
    for path, part in module.named_modules():
        key = f"{path}.weight" if path else "weight"
        if key in tables:
            memo[id(part)] = RemoteTable.of(part, tables[key])
    return copy.deepcopy(module, memo)


def remote_tables(module: nn.Module) -> Iterator[Any]:
    """Yield what stands for tables in a module."""
    return (part for part in module.modules() if isinstance(part, RemoteTable))


def replaced(module: nn.Module, by: Mapping[int, nn.Module]) -> nn.Module:
    """Put modules in the place of others, which are told by their ids; returns the module, or what stands for it."""
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and id(child) in by:
                part._modules[name] = by[id(child)]
    return by.get(id(module), module)
