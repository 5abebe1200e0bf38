"""What the watches of one rank share: where it is in its training, what it replaces for a while, short hashes, and where it stands still."""

import contextlib
import faulthandler
import functools
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from workbench.instruments.workers import digest
from workbench.workloads.items import leaves

BEAT_S = 0.25
MAX_ELEMENTS = 65_536
"""Of a tensor; a larger one is hashed at evenly spaced places (rule of thumb: what differs, differs everywhere)."""


def looked_at(step: int) -> bool:
    """Tell whether parameters and gradients are looked at before update `step`: the first four, powers of two, hundreds."""
    return step < 4 or step & (step - 1) == 0 or step % 100 == 0


@dataclass
class State:
    """What the watches of one rank share."""

    folder: Path
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))  # until a process group says another
    world: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))
    pid: int = field(default_factory=os.getpid)
    initialised: bool = False
    step: int = 0  # updates that have been made, counted by one optimizer where several take turns
    phase: str = "starting"
    progress: int = 0  # rises with everything that is seen, so that standing still shows
    waited_s: float = 0.0  # for other ranks since the last update
    evaluating: bool = False  # a model that trains was called in evaluation mode since it was last trained
    looking: bool = False  # any model was called without being trained since one was: averaged weights, for example
    other_calls: int = 0  # of models, in anything but training
    optimizers: list[Any] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)  # that train, without their wrappers
    on_train_call: list[Callable[[Any], None]] = field(default_factory=list)  # called with the model
    waits: bool = False  # for other ranks, now

    def tick(self, phase: str) -> None:
        """Say what the rank does now."""
        self.phase = phase
        self.progress += 1

    @contextlib.contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Count the time of the block as waiting for other ranks; a block inside another one counts once."""
        if self.waits:
            yield
            return
        before, self.waits, came_from = time.perf_counter(), True, self.phase
        self.tick(f"waiting in {phase}")
        try:
            yield
        finally:
            self.waits = False
            self.waited_s += time.perf_counter() - before
        self.tick(came_from)

    @property
    def here(self) -> bool:
        """Whether this is the process that is watched, and not one that it has forked."""
        return os.getpid() == self.pid


class Patches(contextlib.ExitStack):
    """Wrappers around functions and methods of other packages; `close` takes them off in the reverse order."""

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Have `call(original, *args, **kwargs)` called in the place of `owner.name`; nothing happens where there is no such name."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        for holder in (*_importers(owner, name, original), owner):
            self.enter_context(mock.patch.object(holder, name, wrapper))

    def before(self, owner: Any, name: str, call: Callable[..., object]) -> None:
        """Have `call` called with the arguments of `owner.name` before it is."""

        def both(original: Any, *args: Any, **kwargs: Any) -> Any:
            call(*args, **kwargs)
            return original(*args, **kwargs)

        self.wrap(owner, name, both)


def _importers(owner: Any, name: str, original: Any) -> list[Any]:
    """Return scripts and modules of the user's own that have imported the function by name before it was wrapped."""
    if not isinstance(owner, ModuleType):
        return []
    package = owner.__name__.partition(".")[0]
    others = [m for key, m in list(sys.modules.items()) if m is not owner and key.partition(".")[0] != package]
    return [m for m in others if isinstance(m, ModuleType) and vars(m).get(name) is original]


def place_of(known: list[Any], item: Any) -> int:
    """Return the place of an object in a list, at whose end it is put where it is not there yet."""
    place = next((n for n, each in enumerate(known) if each is item), len(known))
    if place == len(known):
        known.append(item)
    return place


def hash_of(tensors: Iterable[Tensor | None]) -> str:
    """Return eight hex digits for the bits of some tensors; None counts too."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(b"none" if tensor is None else _bytes(tensor), crc)
    return f"{crc:08x}"


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor holds a part of a larger one by design (FSDP2)."""
    return type(tensor).__name__ == "DTensor"


def _bytes(tensor: Tensor) -> bytes:
    local = (tensor.to_local() if is_sharded(tensor) else tensor).detach()  # type: ignore[attr-defined]
    if local.is_sparse:
        joined = local.coalesce()
        return _bytes(joined.indices()) + _bytes(joined.values())
    if local.layout is not torch.strided or local.is_meta or local.is_quantized or local.numel() == 0:
        return str(tuple(local.shape)).encode()
    flat = local.reshape(-1)
    kept = flat[:: max(1, flat.numel() // MAX_ELEMENTS)].cpu().contiguous()
    found: bytes = kept.view(torch.uint8).numpy().tobytes()
    return found


def row_hashes(batch: Any, *, most: int) -> list[str]:
    """Return a hash of each example of a batch, of its largest array; none where a batch has no array with rows."""
    parts = [leaf for _, leaf in leaves(batch)]
    arrays = [
        torch.from_numpy(np.ascontiguousarray(p)) for p in parts if isinstance(p, np.ndarray) and p.dtype.kind in "biuf"
    ]
    rows = max([*(p for p in parts if isinstance(p, Tensor)), *arrays], key=Tensor.numel, default=None)
    if rows is None or rows.ndim == 0 or rows.numel() == 0:
        return []
    kept = rows[:most].detach().cpu().reshape(min(most, len(rows)), -1).contiguous().view(torch.uint8).numpy()
    return [f"{zlib.crc32(row.tobytes()):08x}" for row in kept]


def random_state() -> dict[str, int]:
    """Return a hash of each of the three global generators."""
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002
    return {name: digest(state) for name, state in states.items()}


def rank_file(folder: Path, kind: str, rank: int) -> Path:
    """Return a file of one rank: "rank", its facts; "status", where it is; "stack", where it stood still; "error", what ended it."""
    return folder / f"{kind}-{rank}.{'txt' if kind == 'stack' else 'json'}"


class Watchdog:
    """Writes down where the rank stands, by a thread, and its stack after `timeout_s` without progress, by `faulthandler`, which needs none."""

    def __init__(self, state: State, timeout_s: float) -> None:
        self._state, self._timeout_s = state, timeout_s
        self._path = rank_file(state.folder, "status", state.rank)
        self._stacks = rank_file(state.folder, "stack", state.rank).open("w", encoding="utf-8")
        self._end = threading.Event()
        self._row = {"rank": state.rank, "pid": os.getpid()}
        self._write("running")
        self._thread = threading.Thread(target=self._watch, name="workbench-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch and say that the rank has come to its end."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(timeout=2)
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        self._write("finished")

    def _watch(self) -> None:
        seen = -1
        while True:
            if self._state.progress != seen:
                seen = self._state.progress
                faulthandler.dump_traceback_later(self._timeout_s, file=self._stacks, exit=False)
            if self._end.wait(BEAT_S):
                return
            self._write("running")

    def _write(self, said: str) -> None:
        row = {**self._row, "step": self._state.step, "phase": self._state.phase, "state": said}
        with contextlib.suppress(OSError):  # the folder is gone: nobody listens any more
            part = self._path.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(row), encoding="utf-8")
            part.replace(self._path)
