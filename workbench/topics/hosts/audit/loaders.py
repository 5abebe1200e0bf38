"""`LoaderWatch`: which examples this rank is given, pass by pass over every `DataLoader`."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from workbench.topics.hosts.audit.hashing import hash_of, row_hashes
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State
from workbench.workloads.items import IndexedDataset

__all__ = ["LoaderWatch"]

MAX_INDICES = 100_000
"""Of a pass that are written down (rule of thumb: a rehearsal is far shorter)."""
MAX_HASHED = 1024
"""Examples of a pass that are hashed, for data of which indices say nothing (rule of thumb)."""
MAX_PASSES = 50


class LoaderWatch:
    """Indices and hashes of the examples of every pass (`hosts.sharding`, `hosts.set_epoch`, `hosts.evaluation`).

    Attributes:
        known: splits of which the trainer says itself which examples it takes, whatever loads them.

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self.known: set[str] = set()
        self._pass, self._ahead = f"_workbench_pass_{id(self)}", f"_workbench_ahead_{id(self)}"  # on the iterators
        self._loaders: list[Any] = []
        self._sampler_calls: dict[int, int] = {}
        self._kept: list[Any] = []
        self._passes: list[dict[str, Any]] = []
        patches.wrap(DataLoader, "__iter__", self._on_iter)
        patches.wrap(_BaseDataLoaderIter, "_reset", self._on_reset)
        patches.wrap(_BaseDataLoaderIter, "_next_index", self._on_index)
        patches.wrap(_BaseDataLoaderIter, "__next__", self._on_next)
        patches.wrap(DistributedSampler, "set_epoch", self._on_set_epoch)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        for seen in self._passes:
            seen["planned"] = None if seen["exhausted"] else seen["planned"]
        return {"passes": self._passes}

    def add_order(self, examples: int, order: torch.Tensor) -> None:
        """Take the order of an epoch from the trainer: this host's examples, shape (micro-batches, examples of one)."""
        if len(self._passes) >= MAX_PASSES:
            return
        dataset = {"kind": "train_data", "part": "train_data", "length": examples, "stream": False, "hash": None}
        number, step = sum(p["loader"] == -1 for p in self._passes), self._state.step
        self._passes.append({
            "loader": -1, "pass": number, "dataset": dataset, "levels": [], "sampler": "Trainer", "distributed": True,
            "shuffles": True, "epoch": number, "set_epoch_calls": number + 1, "planned": None, "batch_size": order.shape[1],
            "drop_last": True, "steps": [step, step + len(order)], "exhausted": True, "grad": True,
            "indices": order.reshape(-1)[:MAX_INDICES].tolist(), "contents": [],
        })  # fmt: skip

    def add_evaluation(self, data: Any, indices: Sequence[int]) -> None:
        """Take the examples that this host evaluates from the trainer."""
        if len(self._passes) >= MAX_PASSES:
            return
        step = self._state.step
        self._passes.append({
            "loader": -2, "pass": 0, "dataset": _dataset(data), "levels": _levels(data), "sampler": "Trainer", "distributed": False,
            "shuffles": False, "epoch": None, "set_epoch_calls": 0, "planned": None, "batch_size": None, "drop_last": False,
            "steps": [step, step], "exhausted": True, "grad": False, "indices": _base_indices(data, list(indices)[:MAX_INDICES]),
            "contents": [],
        })  # fmt: skip

    def _on_set_epoch(self, original: Any) -> Callable[..., Any]:
        def set_epoch(sampler: Any, *args: Any, **kwargs: Any) -> Any:
            if id(sampler) not in self._sampler_calls:
                self._kept.append(sampler)
            self._sampler_calls[id(sampler)] = self._sampler_calls.get(id(sampler), 0) + 1
            return original(sampler, *args, **kwargs)

        return set_epoch

    def _on_reset(self, original: Any) -> Callable[..., Any]:
        def reset(batches: Any, *args: Any, **kwargs: Any) -> Any:
            setattr(batches, self._ahead, deque())
            return original(batches, *args, **kwargs)

        return reset

    def _on_iter(self, original: Any) -> Callable[..., Any]:
        def begin(loader: Any) -> Any:
            known = isinstance(loader.dataset, IndexedDataset) and loader.dataset.split in self.known
            if known or not self._state.here:
                return original(loader)
            self._state.tick("loading")
            batches = original(loader)
            if len(self._passes) < MAX_PASSES:
                self._passes.append(self._begun(loader))
                setattr(batches, self._pass, self._passes[-1])
            return batches

        return begin

    def _begun(self, loader: Any) -> dict[str, Any]:
        number = next((n for n, known in enumerate(self._loaders) if known is loader), len(self._loaders))
        if number == len(self._loaders):
            self._loaders.append(loader)
        sampler = _sampler_of(loader)
        found = {
            "loader": number, "pass": sum(p["loader"] == number for p in self._passes), "dataset": _dataset(loader.dataset),
            "sampler": type(sampler).__name__, "distributed": isinstance(sampler, DistributedSampler) or hasattr(sampler, "set_epoch"),
            "shuffles": _shuffles(sampler), "epoch": getattr(sampler, "epoch", None),
            "set_epoch_calls": self._sampler_calls.get(id(sampler), 0), "planned": None,
            "batch_size": getattr(loader, "batch_size", None), "levels": _levels(loader.dataset),
            "drop_last": bool(getattr(loader, "drop_last", False)), "steps": [self._state.step, self._state.step], "optimizers": len(self._state.optimizers),
            "exhausted": False, "grad": None, "indices": [], "contents": [],
        }  # fmt: skip
        if type(sampler) is DistributedSampler and sampler.total_size <= MAX_INDICES:  # has a generator of its own
            found["planned"] = _base_indices(loader.dataset, list(iter(sampler)))
        return found

    def _on_index(self, original: Any) -> Callable[..., Any]:
        def next_index(batches: Any) -> Any:
            index = original(batches)
            ahead = getattr(batches, self._ahead, None)
            if ahead is None:
                ahead = deque()
                setattr(batches, self._ahead, ahead)
            ahead.append(index)
            return index

        return next_index

    def _on_next(self, original: Any) -> Callable[..., Any]:
        def following(batches: Any) -> Any:
            seen = getattr(batches, self._pass, None)
            if seen is None:
                return original(batches)
            self._state.tick("loading")
            seen["steps"][1] = self._state.step
            try:
                batch = original(batches)
            except StopIteration:
                seen["exhausted"] = True
                raise
            self._state.tick("after loading")
            ahead = getattr(batches, self._ahead, None)
            self._note(seen, batches, ahead.popleft() if ahead else None, batch)
            return batch

        return following

    def _note(self, seen: dict[str, Any], batches: Any, index: Any, batch: Any) -> None:
        seen["grad"] = bool(seen["grad"]) or torch.is_grad_enabled()
        if not isinstance(batches._dataset, IterableDataset) and index is not None:
            indices = list(index) if isinstance(index, (list, tuple, torch.Tensor, np.ndarray)) else [index]
            room = MAX_INDICES - len(seen["indices"])
            seen["indices"] += _base_indices(batches._dataset, indices[:room])
        room = MAX_HASHED - len(seen["contents"])
        if room > 0 and seen["pass"] == 0:
            seen["contents"] += row_hashes(batch, most=room)


def _sampler_of(loader: Any) -> Any:
    """Return what decides the order: a sampler, or the one inside a batch sampler."""
    batching = getattr(loader, "batch_sampler", None)
    inner = getattr(batching, "sampler", None)
    if inner is not None:
        return inner
    return batching if batching is not None else loader.sampler


def _shuffles(sampler: Any) -> bool | None:
    """Tell whether a sampler shuffles, as far as its attributes say so."""
    if "Random" in type(sampler).__name__:
        return True
    if type(sampler).__name__ == "SequentialSampler":
        return False
    return bool(sampler.shuffle) if hasattr(sampler, "shuffle") else None


def _base_indices(dataset: Any, indices: list[Any]) -> list[Any]:
    """Return positions in the dataset that the parts were taken from."""
    while _is_part(dataset):
        part = dataset.indices
        indices, dataset = [part[int(i)] for i in indices], dataset.dataset
    return [int(i) if isinstance(i, (int, np.integer, torch.Tensor)) else str(i) for i in indices]


def _plain(dataset: Any) -> Any:
    """Return what a wrapper that passes items on unchanged holds."""
    while isinstance(dataset, IndexedDataset):
        dataset = dataset.data
    return dataset


def _is_part(dataset: Any) -> bool:
    """Tell whether a dataset is a `Subset`, or built like it: one position in another data set for each of its examples."""
    positions = getattr(dataset, "indices", None)
    if not hasattr(dataset, "dataset") or not isinstance(positions, (list, tuple, range, np.ndarray, torch.Tensor)):
        return False
    return all(_is_position(one) for one in (*positions[:1], *positions[-1:]))


def _is_position(one: Any) -> bool:
    """Tell whether an entry of `indices` is the number of an example, and no window or name."""
    return isinstance(one, (int, np.integer)) or (isinstance(one, torch.Tensor) and one.ndim == 0)


def _parts(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each part with what it was taken from, the outermost first: `torch.utils.data.Subset`, and what is built like it."""
    dataset = _plain(dataset)
    while _is_part(dataset):
        yield dataset, _plain(dataset.dataset)
        dataset = _plain(dataset.dataset)


def _dataset(dataset: Any) -> dict[str, Any]:
    part = type(dataset).__name__
    dataset = next((inner for _, inner in reversed(list(_parts(dataset)))), _plain(dataset))
    try:
        length = len(dataset)
    except Exception:  # whatever it raises is the script's to meet, where it asks for the length
        length = None
    stream = isinstance(dataset, IterableDataset)
    return {
        "kind": type(dataset).__name__,
        "part": part,
        "length": length,
        "stream": stream,
        "hash": _fingerprint(dataset),
    }


def _levels(dataset: Any) -> list[list[Any]]:
    """Return length and hash of the positions of each part that a part was taken from, the outermost first."""
    found = []
    for part, _ in _parts(dataset):
        positions = np.asarray([int(i) for i in part.indices], dtype=np.int64)
        found.append([len(positions), f"{zlib.crc32(positions.tobytes()):08x}"])
    return found


def _fingerprint(dataset: Any) -> str | None:
    """Return a hash of the arrays and lists that a dataset holds; None where it holds none. No item is read."""
    crc, found = 0, False
    for value in _held(dataset, depth=3):
        crc, found = zlib.crc32(value, crc), True
    return f"{crc:08x}" if found else None


def _held(value: Any, *, depth: int) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        if value.numel() > 1:
            yield f"{tuple(value.shape)} {hash_of([value])}".encode()
    elif isinstance(value, np.ndarray) and value.size > 1 and value.dtype.kind in "biufUS":
        flat = value.reshape(-1)
        yield str(value.shape).encode() + np.ascontiguousarray(flat[:: max(1, flat.size // 4096)]).tobytes()
    elif isinstance(value, (list, tuple)) and len(value) > 1 and isinstance(value[0], (str, int, float)):
        yield f"{len(value)} {[value[i] for i in range(0, len(value), max(1, len(value) // 256))]}".encode()
    elif depth and isinstance(value, (list, tuple)):
        for inner in value[:16]:
            yield from _held(inner, depth=depth - 1)
    elif depth and not isinstance(value, type) and hasattr(value, "__dict__"):
        for name in sorted(vars(value)):
            yield from _held(vars(value)[name], depth=depth - 1)
