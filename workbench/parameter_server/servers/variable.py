"""`Variable` and `ShardedVariable`: values that live on parameter servers and are used like tensors (T3.5 to T3.8)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.context import current_worker, taking
from workbench.parameter_server.servers.links import plane_of
from workbench.parameter_server.servers.server import Place

IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_rows(rows: Any, count: int, name: str) -> Tensor:
    """Return ids of any shape as a tensor; raises `UsageError` where they are no integers, `IndexError` where they are not 0 to `count` - 1."""
    ids = torch.as_tensor(rows)
    if not ids.numel():
        return ids.long()
    if ids.dtype not in IDS:
        raise UsageError(f"Rows of {name!r} are asked for by {ids.dtype} values; give integer ids, such as ids.long().")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise IndexError(f"Row {low if low < 0 else high} of {name!r}, which has rows 0 to {count - 1}.")
    return ids


def place_among(ids: Tensor, padding_idx: int | None) -> int | None:
    """Return where an id is among those that were looked up; None where it is not."""
    found = [] if padding_idx is None else (ids == padding_idx).nonzero().flatten().tolist()
    return int(found[0]) if found else None


class Shard(NamedTuple):
    """A stretch of rows."""

    place: Place
    first: int
    size: int


def split_ids(ids: Tensor, shards: Sequence[Shard]) -> list[Tensor]:
    """Return the rows of each shard, counted from its first, of ids in rising order."""
    ends = torch.searchsorted(ids, torch.tensor([each.first + each.size for each in shards])).tolist()
    return [ids[b:e] - each.first for b, e, each in zip([0, *ends[:-1]], ends, shards, strict=True)]


def pull_rows(
    cluster: str, shards: Sequence[Shard], ids: Tensor, width: int, dtype: torch.dtype
) -> tuple[Tensor, list[int]]:
    """Return the rows with these ids, in rising order, shape (ids, width), and the versions of the shards that hold some; 0 for the others."""
    rows, versions = split_ids(ids, shards), [0] * len(shards)
    asked = [k for k, each in enumerate(rows) if len(each)]
    with taking("pull_s"):
        found = plane_of(cluster).pull_rows([shards[k].place for k in asked], [rows[k] for k in asked], width)
    for k, (_, version) in zip(asked, found, strict=True):
        versions[k] = version
    return torch.cat([torch.empty((0, width), dtype=dtype), *(values for values, _ in found)]), versions


def _row_ids(key: Any) -> Tensor | None:
    """Return an index as ids of rows; None where it is another one, such as a slice or a mask."""
    if isinstance(key, bool) or not isinstance(key, (int, np.integer, np.ndarray, list, Tensor)):
        return None
    ids = torch.as_tensor(key)
    return ids.long() if ids.dtype in IDS and ids.dtype != torch.uint8 else None


def _read_all(value: Any) -> Any:
    if isinstance(value, RemoteTensor):
        return value.read()
    return type(value)(_read_all(each) for each in value) if isinstance(value, (list, tuple)) else value


def _operator(function: Callable[[Any, Any], Any], *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operate(self: RemoteTensor, other: Any) -> Any:
        other = _read_all(other)
        return function(other, self.read()) if swapped else function(self.read(), other)

    return operate


class RemoteTensor:
    """What `Variable` and `ShardedVariable` share: reading, and being used in place of a tensor.

    Every use reads the newest values; two uses may see different ones, because nobody waits for anybody (T1.2). What is read has no
    gradient: train modules, by `ParameterServerStrategy.place`, or read, call `requires_grad_()`, and write by `assign_sub`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    variables: list[Variable]

    def read(self) -> Tensor:
        """Return the newest values, shape `shape`, in this process's memory."""
        found = [torch.empty(each.shape, dtype=self.dtype) for each in self.variables]
        with taking("pull_s"):
            plane_of(self.variables[0].cluster).pull_into(
                [each.place for each in self.variables], lambda k, values: found[k].view(-1).copy_(values)
            )
        return found[0] if len(found) == 1 else torch.cat(found)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows with these ids, shape (*rows.shape, *shape[1:]); each is sent once, and nothing else (T3.7, behaviour 75)."""
        ids, where = torch.unique(checked_rows(rows, len(self), self.name), return_inverse=True)
        firsts = itertools.accumulate(map(len, self.variables), initial=0)
        shards = [Shard(each.place, first, len(each)) for each, first in zip(self.variables, firsts, strict=False)]
        cluster, width = self.variables[0].cluster, self.shape[1:].numel()
        found = pull_rows(cluster, shards, ids.long(), width, self.dtype)[0][where]
        return found.reshape((*where.shape, *self.shape[1:]))

    def read_for_fetch(self) -> Tensor:
        """Return the values where a function returns the variable itself."""
        return self.read()

    def assign(self, value: Any) -> Self:
        """Replace the values."""
        return self._written(value, "assign")

    def assign_add(self, value: Any) -> Self:
        """Add to the values on the servers: no update of another worker is lost (behaviour 18)."""
        return self._written(value, "add")

    def assign_sub(self, value: Any) -> Self:
        """Subtract from the values on the servers."""
        return self._written(value, "sub")

    def _written(self, value: Any, how: str) -> Self:
        given = torch.as_tensor(_read_all(value), dtype=self.dtype).cpu()
        try:
            values = given.expand(self.shape)
        except RuntimeError:
            raise UsageError(
                f"A value of shape {tuple(given.shape)} was given to variable {self.name!r} of shape {tuple(self.shape)}: it must "
                "have that shape, or one that broadcasts to it."
            ) from None
        shards, here = self.variables, current_worker()
        parts = torch.split(values, [len(each) for each in shards]) if len(shards) > 1 else [values]
        with taking("push_s"):
            for each, part in zip(shards, parts, strict=True):
                token = here.token(*each.place) if here is not None and each.exactly_once else None
                flat = part.reshape(-1).contiguous()
                plane_of(each.cluster).ask(each.place.server, "write", each.place.block, flat, how, token)
        return self

    def numpy(self) -> Any:
        """Return the newest values as an array."""
        return self.read().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Let NumPy take it for an array."""
        del copy  # what is read is a copy already
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __len__(self) -> int:
        """Return the number of rows."""
        if not self.shape:
            raise TypeError("len() of a variable without axes.")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return the truth of the only value, as of a tensor."""
        return bool(self.read())

    def __float__(self) -> float:
        """Return the only value."""
        return float(self.read())

    def __getitem__(self, key: Any) -> Tensor:
        """Return what the same index gives of the whole tensor; of rows by their ids nothing else is read."""
        ids = _row_ids(key) if self.shape else None
        if ids is not None:
            return self.gather(torch.where(ids < 0, ids + len(self), ids))
        found: Tensor = self.read()[key]
        return found

    __add__ = _operator(operator.add)
    __radd__ = _operator(operator.add, swapped=True)
    __sub__ = _operator(operator.sub)
    __rsub__ = _operator(operator.sub, swapped=True)
    __mul__ = _operator(operator.mul)
    __rmul__ = _operator(operator.mul, swapped=True)
    __truediv__ = _operator(operator.truediv)
    __rtruediv__ = _operator(operator.truediv, swapped=True)
    __floordiv__ = _operator(operator.floordiv)
    __rfloordiv__ = _operator(operator.floordiv, swapped=True)
    __mod__ = _operator(operator.mod)
    __rmod__ = _operator(operator.mod, swapped=True)
    __pow__ = _operator(operator.pow)
    __rpow__ = _operator(operator.pow, swapped=True)
    __matmul__ = _operator(operator.matmul)
    __rmatmul__ = _operator(operator.matmul, swapped=True)
    __lt__ = _operator(operator.lt)
    __le__ = _operator(operator.le)
    __gt__ = _operator(operator.gt)
    __ge__ = _operator(operator.ge)

    def __neg__(self) -> Tensor:
        """Return the negative values."""
        return -self.read()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let torch functions take it for a tensor; embeddings and bags of them are looked up row by row."""
        given = dict(kwargs or {})
        rows_alone = not (given.get("max_norm") or given.get("scale_grad_by_freq") or given.get("sparse"))
        if (
            function is torch.nn.functional.embedding
            and rows_alone
            and len(args) == 2
            and isinstance(args[1], RemoteTensor)
        ):
            return args[1].gather(args[0])
        if function is torch.nn.functional.embedding_bag and rows_alone and len(args) == 2 and len(args[0]):
            table: Any = args[1]
            ids, where = torch.unique(checked_rows(args[0], len(table), table.name), return_inverse=True)
            given["padding_idx"] = place_among(ids, given.get("padding_idx"))
            args = where.to(args[0].dtype), table.gather(ids)
        return function(*_read_all(args), **{key: _read_all(value) for key, value in given.items()})


class Variable(RemoteTensor):
    """Values in one block of one server, of a cluster that is named by its id."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        place: Place,
        cluster: str,
        *,
        exactly_once: bool = True,
    ) -> None:
        self.name, self.shape, self.dtype = name, torch.Size(shape), dtype
        self.place, self.cluster, self.exactly_once = place, cluster, exactly_once

    def __repr__(self) -> str:
        """Name it, and where it lies."""
        return f"Variable({self.name!r}, shape={tuple(self.shape)}, {self.dtype}, ps {self.place.server})"

    def make_missing(self) -> None:
        """Make its block where the server does not hold it because it was started anew; the values are to be assigned."""
        zeros = torch.zeros(self.shape.numel(), dtype=self.dtype)
        plane_of(self.cluster).ask(self.server, "create", self.place.block, zeros, None, None, True)

    @property
    def server(self) -> int:
        """Index of the server that holds it."""
        return self.place.server

    @property
    def variables(self) -> list[Variable]:  # type: ignore[override]
        """The variable itself, as the only shard."""
        return [self]


class ShardedVariable(RemoteTensor):
    """Rows that are shared out over several variables, the first ones first ("div").

    Args:
        variables: the shards, equal in dtype and in every axis but the first.

    Raises:
        UsageError: they are no variables, or do not fit together (behaviour 76).
    """

    def __init__(self, variables: Sequence[Variable], name: str) -> None:
        single: Any = variables
        shards = [] if isinstance(single, RemoteTensor) else list(variables)
        strange = [each for each in shards if not isinstance(each, Variable)]
        if strange or not shards:
            given = f"a {type(strange[0]).__name__} among them" if strange else type(variables).__name__
            raise UsageError(
                f"ShardedVariable takes a list of Variables, at least one; given: {given}. strategy.variable makes them, in shards where "
                "there is a variable_partitioner."
            )
        if len({each.dtype for each in shards}) > 1:
            raise UsageError(
                f"The shards of {name!r} differ in dtype: {[str(each.dtype) for each in shards]}; give one dtype."
            )
        if not all(each.shape for each in shards):
            raise UsageError(f"The shards of {name!r} have no axis: each must hold rows. Give them one, by view(1).")
        if len({each.shape[1:] for each in shards}) > 1:
            shapes = [tuple(each.shape) for each in shards]
            raise UsageError(f"The shards of {name!r} have shapes {shapes}: they may differ in the first axis alone.")
        self.name, self.variables, self.dtype = name, shards, shards[0].dtype
        self.shape = torch.Size((sum(map(len, shards)), *shards[0].shape[1:]))

    def __repr__(self) -> str:
        """Name it, and how many rows lie where."""
        where = ", ".join(f"{each.shape[0]} rows on ps {each.server}" for each in self.variables)
        return f"ShardedVariable({self.name!r}, shape={tuple(self.shape)}, {self.dtype}: {where})"
