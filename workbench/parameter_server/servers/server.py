"""`ServerRuntime`: what a parameter server holds and does, whichever engine asks: blocks of values, updated where they lie (T1.1)."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.errors import UnavailableError
from workbench.schedules import schedule_of
from workbench.train.update_rules import UpdateRule

Lying = tuple[int, int, torch.dtype]
"""Where a tensor lies: first byte, number of values, dtype."""

ALIGNED = 64  # bytes


def lay(tensors: Sequence[tuple[int, torch.dtype]]) -> tuple[list[Lying], int]:
    """Return where tensors of these sizes and dtypes will lie, and how many bytes they take together."""
    lying: list[Lying] = []
    end = 0
    for size, dtype in tensors:
        lying.append((end, size, dtype))
        end += -(-size * dtype.itemsize // ALIGNED) * ALIGNED
    return lying, max(end, 1)


def laid_out(tensors: Sequence[Tensor | Sequence[Tensor]], lying: Sequence[Lying], content: Tensor) -> None:
    """Copy tensors, which may be given in pieces, to where they shall lie in `content`, shape (bytes,)."""
    for tensor, there in zip(tensors, taken(content, lying), strict=True):
        if isinstance(tensor, Tensor):
            there.copy_(tensor.reshape(-1))
        else:
            torch.cat(list(tensor), out=there)


def extent(tensor: Tensor | Sequence[Tensor]) -> tuple[int, torch.dtype]:
    """Return number and dtype of the values of a tensor, which may be given in pieces."""
    pieces = [tensor] if isinstance(tensor, Tensor) else tensor
    return sum(piece.numel() for piece in pieces), pieces[0].dtype


def taken(content: Tensor, lying: Sequence[Lying]) -> list[Tensor]:
    """Return the tensors that lie in `content`; they are views of it."""
    return [content[begin : begin + size * dtype.itemsize].view(dtype) for begin, size, dtype in lying]


TOKENS = 4096  # pushes that are remembered, so that a repeated one is not applied twice (rule of thumb: far above what is in flight)

Token = tuple[int, int]
"""Closure and number of the write within it: a closure that runs again repeats them."""


@dataclass(frozen=True)
class Push:
    """What comes with a gradient.

    Attributes:
        pulled: version of the block when its values were read; the gradient's staleness is counted from it.
        worker: who computed it.
        token: the same for a push that is sent again; None is applied every time.
        scale: factor on the gradient, such as 1 / workers.
    """

    pulled: int
    worker: int = 0
    token: Token | None = None
    scale: float = 1.0


@dataclass
class Block:
    """Flat values with their version and what updates them."""

    values: Tensor
    version: int = 0
    updater: UpdateRule | None = None
    lr: Callable[[int], float] | None = None
    staleness: Counter[int] = field(default_factory=Counter)
    tokens: OrderedDict[Token, int] = field(default_factory=OrderedDict)
    requests: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    apply_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def remember(self, token: Token | None) -> int:
        """Note that what has this token was applied; returns the version."""
        if token is not None:
            self.tokens[token] = self.version
            if len(self.tokens) > TOKENS:
                self.tokens.popitem(last=False)
        return self.version


class ServerRuntime:
    """Blocks by name. A call touches one block under its lock: no call sees another one half done.

    Args:
        memory: makes the memory that a block's values lie in, from its name, number of elements and dtype; None is plain memory.
    """

    def __init__(self, index: int, memory: Callable[[str, int, torch.dtype], Tensor] | None = None) -> None:
        self.index = index
        self._memory = memory or (lambda _, count, dtype: torch.empty(count, dtype=dtype))
        self._blocks: dict[str, Block] = {}

    def create(self, name: str, values: Tensor, config: TrainConfig | None = None) -> None:
        """Hold a new block.

        Args:
            name: of the block; must be new.
            values: flat, its initial values.
            config: optimizer, constants and lr schedule of its updates; None where no gradient will come.
        """
        if name in self._blocks:
            raise UsageError(f"ps {self.index} holds a block {name!r} already: names of variables must differ.")
        held = self._memory(name, values.numel(), values.dtype)
        held.copy_(values.reshape(-1))
        block = Block(held)
        if config is not None:
            block.updater = UpdateRule([config], held[None])
            block.lr = _held(schedule_of(config), config.total_steps - 1)
        self._blocks[name] = block

    def delete(self, name: str) -> None:
        """Forget a block; an unknown one is none."""
        self._blocks.pop(name, None)

    def read(self, name: str) -> tuple[Tensor, int]:
        """Return a copy of a block's values and their version."""
        block = self._block(name)
        with block.lock:
            block.requests += 1
            block.bytes_out += block.values.nbytes
            return block.values.clone(), block.version

    def read_rows(self, name: str, rows: Tensor, width: int) -> Tensor:
        """Return some rows of a block that holds rows of `width` values: these rows alone are sent (T3.7)."""
        block = self._block(name)
        with block.lock:
            found = block.values.view(-1, width)[rows]
            block.requests += 1
            block.bytes_in += rows.nbytes
            block.bytes_out += found.nbytes
            return found

    def write(self, name: str, values: Tensor, how: str = "assign", token: Token | None = None) -> int:
        """Assign, add or subtract flat values; returns the new version.

        Args:
            values: flat, as long as the block.
            how: "assign", "add" or "sub".
        """
        block = self._block(name)
        with block.lock:
            block.requests += 1
            block.bytes_in += values.nbytes
            if token is not None and token in block.tokens:
                return block.tokens[token]
            _WRITES[how](block.values, values.reshape(-1))
            block.version += 1
            return block.remember(token)

    def push(self, name: str, grad: Tensor, push: Push) -> int:
        """Apply a gradient by the block's own rule, at the lr of its own step; returns the new version.

        Args:
            grad: flat, as long as the block.
        """
        block = self._block(name)
        if block.updater is None or block.lr is None:
            raise UsageError(f"Block {name!r} was created without an optimizer: no gradient can be applied to it.")
        with block.lock:
            block.requests += 1
            block.bytes_in += grad.nbytes
            if push.token is not None and push.token in block.tokens:
                return block.tokens[push.token]
            begun = time.perf_counter()
            lr = block.lr(block.version)
            update = block.updater.update(
                block.values[None], grad[None] * push.scale if push.scale != 1.0 else grad[None],
                torch.full((1, 1), lr, dtype=block.values.dtype), block.version, [lr],
            )  # fmt: skip
            block.values -= update[0]
            block.staleness[block.version - push.pulled] += 1
            block.version += 1
            block.apply_s += time.perf_counter() - begun
            return block.remember(push.token)

    def state(self, name: str) -> dict[str, Any]:
        """Return values, version and optimizer slots of a block: what a checkpoint needs (T10.4, behaviour 72)."""
        block = self._block(name)
        with block.lock:
            slots = {} if block.updater is None else block.updater.state(0)
            return {
                "values": block.values.clone(),
                "version": block.version,
                "slots": {k: v.clone() for k, v in slots.items()},
            }

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        block = self._block(name)
        with block.lock:
            block.values.copy_(state["values"].reshape(-1))
            block.version = int(state["version"])
            if block.updater is not None:
                block.updater.load(0, state["slots"], {})

    def configure(self, name: str, config: TrainConfig) -> None:
        """Let a block be updated by another config of the same rule; its slots and its version stay."""
        block = self._block(name)
        with block.lock:
            if block.updater is not None:
                updater = UpdateRule([config], block.values[None])
                updater.load(0, block.updater.state(0), {})
                block.updater = updater
            block.lr = _held(schedule_of(config), config.total_steps - 1)

    def load_report(self) -> dict[str, dict[str, Any]]:
        """Return for each block: requests, bytes_in, bytes_out, apply_s, version and the histogram of staleness_steps."""
        return {
            name: {
                "requests": block.requests, "bytes_in": block.bytes_in, "bytes_out": block.bytes_out, "apply_s": block.apply_s,
                "version": block.version, "staleness_steps": dict(block.staleness),
            }
            for name, block in list(self._blocks.items())
        }  # fmt: skip

    def version(self, name: str) -> int:
        """Return how often a block was written."""
        return self._block(name).version

    def names(self) -> Sequence[str]:
        """Return the blocks in the order of their creation."""
        return list(self._blocks)

    def _block(self, name: str) -> Block:
        if name not in self._blocks:
            raise UnavailableError(
                "ps", self.index, f"it was started anew, or the variable was deleted, and holds no {name!r}"
            )
        return self._blocks[name]


def _held(lr: Callable[[int], float], last: int) -> Callable[[int], float]:
    """Let the lr stay where it is after its last step: workers may push more often than was planned."""
    return lambda step: lr(min(step, last))


def _assign(values: Tensor, given: Tensor) -> None:
    values.copy_(given)


def _add(values: Tensor, given: Tensor) -> None:
    values += given


def _sub(values: Tensor, given: Tensor) -> None:
    values -= given


_WRITES = {"assign": _assign, "add": _add, "sub": _sub}
