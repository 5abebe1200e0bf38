"""`ServerRuntime`: what a parameter server holds and does, whichever engine asks (T1.1); `DirectPlane`: how a process reaches it."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.context import Alive, Token
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.row_rules import BlockUpdater, TableOf
from workbench.ray.shared_memory import Located, SharedBlock
from workbench.schedules import schedule_of

VERSIONS = 65536  # of a closure's writes to a block that a second run of it is told; none is applied twice, whatever their number


@dataclass(frozen=True)
class Push:
    """What comes with a gradient."""

    pulled: int  # version of the block when its values were read: the gradient's staleness is counted from it
    worker: int = 0
    token: Token | None = None  # the same for a push that is sent again; None is applied every time
    rows: NDArray[np.int64] | None = None  # of a table that the gradient is for, each once; None is the whole block


SETTINGS = "/settings"  # end of the name of a block that says something, and holds no values


class Written:
    """What the closures of one coordinator have written to a block, as long as they may do so again: those that ended are forgotten."""

    def __init__(self) -> None:
        self._alive = Alive(-1, -1, ())
        self._counts: dict[int, int] = {}  # closure -> number of its writes
        self._versions: dict[int, deque[int]] = {}  # that came of the newest of them

    def before(self, token: Token, version: int) -> int | None:
        """Return the version that came of this write when it was made before; None where it is to be made.

        What is left of a closure that ended elsewhere is told the block's version, and changes nothing.
        """
        closure, alive = token.run.closure, token.run.alive
        if alive.stamp > self._alive.stamp:
            self._alive = alive
            for each in [each for each in self._counts if self._ended(each)]:
                del self._counts[each], self._versions[each]
        if self._ended(closure):
            return version
        behind = self._counts.get(closure, 0) - token.write
        if behind <= 0:
            return None
        versions = self._versions[closure]
        return versions[-min(behind, len(versions))]

    def made(self, token: Token, version: int) -> None:
        """Note a write."""
        self._counts[token.run.closure] = token.write + 1
        self._versions.setdefault(token.run.closure, deque(maxlen=VERSIONS)).append(version)

    def _ended(self, closure: int) -> bool:
        return closure <= self._alive.newest and closure not in self._alive.closures


class Drawn(NamedTuple):
    """Initial values that the server draws itself, from N(0, 1): nobody else ever holds them all."""

    size: int
    dtype: torch.dtype
    seed: int
    zero: tuple[int, int]  # stretch that is 0: the row of a table that stands for padding


@dataclass
class Block:
    """Flat values with their version and what updates them."""

    values: Tensor
    shared: SharedBlock | None = None  # in which they lie, where other processes read them in place
    version: int = 0
    updater: BlockUpdater | None = None
    table: TableOf | None = None
    note: Any = None  # what a block is that holds no values, but says something to those who read it
    lr: Callable[[int], float] | None = None
    staleness: Counter[int] = field(default_factory=Counter)
    written: dict[int, Written] = field(default_factory=dict)  # by coordinator
    counts: Counter[str] = field(default_factory=lambda: Counter(requests=0, bytes_in=0, bytes_out=0))
    apply_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock, and let those who read the values in place wait, or read again."""
        shared = self.shared
        with self.lock, contextlib.nullcontext() if shared is None else shared.writing(lambda: self.version):
            yield

    def count(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Count a request."""
        self.counts.update(requests=1, bytes_in=bytes_in, bytes_out=bytes_out)


class ServerRuntime:
    """Blocks by name, where there are `readers` of other processes in memory that they read in place. A call touches one block under its lock: no call sees another one half done."""

    def __init__(self, index: int, readers: int = 0) -> None:
        self.index, self._readers = index, readers
        self._blocks: dict[str, Block] = {}

    def create(
        self,
        name: str,
        values: Tensor | Drawn,
        config: TrainConfig | None = None,
        table: TableOf | None = None,
        keep: bool = False,
    ) -> None:
        """Hold a new block of these values; the config says how gradients update it, None where none will come. With `keep` one that is there stays."""
        if name in self._blocks:
            if keep:
                return
            raise UsageError(f"ps {self.index} holds a block {name!r} already: names of variables must differ.")
        block = self._made(values.size if isinstance(values, Drawn) else values.numel(), values.dtype)
        block.table = table
        if isinstance(values, Drawn):
            block.values.normal_(generator=torch.Generator().manual_seed(values.seed))
            block.values[slice(*values.zero)] = 0.0
        else:
            block.values.copy_(values.reshape(-1))
        if config is not None:
            block.updater = BlockUpdater(config, block.values, table)
            block.lr = _lr_of(config)
        self._blocks[name] = block

    def delete(self, name: str) -> None:
        """Forget a block, if there is one."""
        block = self._blocks.pop(name, None)
        if block is not None and block.shared is not None:
            block.shared.close()

    def locate(self, name: str) -> Located | None:
        """Return where a block lies; None where other processes cannot see it."""
        shared = self._block(name).shared
        return None if shared is None else shared.located

    def read(self, name: str) -> tuple[Tensor, int]:
        """Return a copy of a block's values and their version."""
        block = self._block(name)
        with block.lock:
            block.count(bytes_out=block.values.nbytes)
            return block.values.clone(), block.version

    def read_rows(self, name: str, rows: Tensor, width: int) -> tuple[Tensor, int]:
        """Return some rows of a block that holds rows of `width` values, these alone, and its version (T3.7)."""
        block = self._block(name)
        with block.lock:
            found = block.values.view(-1, width)[rows]
            block.count(bytes_in=rows.nbytes, bytes_out=found.nbytes)
            return found, block.version

    def write(self, name: str, values: Tensor, how: str = "assign", token: Token | None = None) -> int:
        """Assign, add or subtract ("assign", "add", "sub") flat values as long as the block; returns the new version."""
        return self._change(name, values.nbytes, token, lambda block: _WRITES[how](block.values, values.reshape(-1)))

    def push(self, name: str, grad: Tensor, push: Push) -> int:
        """Apply a flat gradient by the block's own rule, at the lr of its own step; returns the new version."""

        def apply(block: Block) -> None:
            if block.updater is None or block.lr is None:
                raise UsageError(f"Block {name!r} was created without an optimizer: no gradient can be applied to it.")
            begun = time.perf_counter()
            block.updater.update(block.values, grad, push.rows, block.version, block.lr(block.version))
            if push.rows is None or len(push.rows):
                block.staleness[block.version - push.pulled] += 1
            block.apply_s += time.perf_counter() - begun

        return self._change(name, grad.nbytes + (0 if push.rows is None else push.rows.nbytes), push.token, apply)

    def state(self, name: str) -> dict[str, Any]:
        """Return values, version and optimizer slots of a block: what a checkpoint needs (T10.4, behaviour 72)."""
        block = self._block(name)
        with block.lock:
            slots = {} if block.updater is None else block.updater.state()
            return {
                "values": block.values.clone(), "version": block.version, "slots": {k: v.clone() for k, v in slots.items()},
            }  # fmt: skip

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        block = self._block(name)
        with block.writing():
            block.values.copy_(state["values"].reshape(-1))
            block.version = int(state["version"])
            if block.updater is not None:
                block.updater.load(state["slots"])

    def configure(self, name: str, config: TrainConfig) -> None:
        """Let a block be updated by another config of the same rule; its slots and its version stay."""
        block = self._block(name)
        with block.lock:
            if block.updater is not None:
                updater = BlockUpdater(config, block.values, block.table)
                updater.load(block.updater.state())
                block.updater = updater
            block.lr = _lr_of(config)

    def note(self, name: str, note: Mapping[str, Any]) -> None:
        """Let a block say something; its version is the note's "revision", which tells readers that it changed."""
        block = self._block(name)
        with block.writing():
            block.note, block.version = note, note["revision"]

    def noted(self, name: str) -> Any:
        """Return what `note` was given."""
        return self._block(name).note

    def load_report(self) -> dict[str, dict[str, Any]]:
        """Return for each block that holds values: requests, bytes_in, bytes_out, apply_s, version and the histogram of staleness_steps."""
        found: dict[str, dict[str, Any]] = {}
        for name, block in list(self._blocks.items()):
            if not name.endswith(SETTINGS):
                read = {} if block.shared is None else block.shared.counts()
                found[name] = {key: count + read.get(key, 0) for key, count in block.counts.items()}
                found[name] |= {"apply_s": block.apply_s, "version": block.version}
                found[name]["staleness_steps"] = dict(block.staleness)
        return found

    def version(self, name: str) -> int:
        """Return how often a block was written."""
        return self._block(name).version

    def _change(self, name: str, given_bytes: int, token: Token | None, change: Callable[[Block], object]) -> int:
        """Change a block, once for each token; returns the version that came of it."""
        block = self._block(name)
        with block.writing():
            block.count(bytes_in=given_bytes)
            written = None if token is None else block.written.setdefault(token.run.loop, Written())
            if token is not None and written is not None:
                before = written.before(token, block.version)
                if before is not None:
                    return before
            change(block)
            block.version += 1
            if token is not None and written is not None:
                written.made(token, block.version)
            return block.version

    def _made(self, size: int, dtype: torch.dtype) -> Block:
        if self._readers:
            with contextlib.suppress(OSError):  # not that much to share: this block is read by calls
                shared = SharedBlock(size, dtype, self._readers)
                return Block(shared.values, shared)
        return Block(torch.empty(size, dtype=dtype))

    def _block(self, name: str) -> Block:
        if name not in self._blocks:
            raise UnavailableError(
                "ps", self.index, f"it was started anew, or the variable was deleted, and holds no {name!r}"
            )
        return self._blocks[name]


def _lr_of(config: TrainConfig) -> Callable[[int], float]:
    """Return the lr of a step; it stays where it is after the last one: workers may push more often than was planned."""
    lr, last = schedule_of(config), config.total_steps - 1
    return lambda step: lr(min(step, last))


_WRITES: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "assign": Tensor.copy_, "add": Tensor.add_, "sub": Tensor.sub_,
}  # fmt: skip

Grad = Sequence[Tensor]  # A gradient as flat pieces, which lie one after the other in the block
Take = Callable[[int, Tensor], object]
"""Copies the flat values of a block, which is told by its place among those asked for."""


class Place(NamedTuple):
    """Where a block lies."""

    server: int
    block: str


class DirectPlane:
    """Moves values to and from servers that live in this process, which `server` returns by their index.

    `RayPlane` has the same methods. All raise `UnavailableError` where a server is gone.
    """

    name: str = "direct"  # how values travel: "direct", "shm" or "plasma"
    why: str = "the servers are in this process"  # why this way was taken

    def __init__(self, server: Callable[[int], ServerRuntime]) -> None:
        self._server = server

    def pull_into(self, places: Sequence[Place], take: Take) -> list[int]:
        """Let `take` copy the values of each block, again where they were written meanwhile; returns the versions."""
        versions = []
        for k, place in enumerate(places):
            values, version = self._server(place.server).read(place.block)
            take(k, values)
            versions.append(version)
        return versions

    def push(self, places: Sequence[Place], grads: Sequence[Grad], pushes: Sequence[Push]) -> list[int]:
        """Apply a gradient to each block; returns once all are applied, with the new versions."""
        return [
            self._server(place.server).push(place.block, torch.cat(list(grad)), push)
            for place, grad, push in zip(places, grads, pushes, strict=True)
        ]

    def pull_rows(self, places: Sequence[Place], rows: Sequence[Tensor], width: int) -> list[tuple[Tensor, int]]:
        """Return some rows of each block, shape (rows, width), and its version."""
        return [self._server(at.server).read_rows(at.block, ids, width) for at, ids in zip(places, rows, strict=True)]

    def ask(self, server: int, method: str, *arguments: Any) -> Any:
        """Call a method of a server by name and return its answer."""
        return getattr(self._server(server), method)(*arguments)
