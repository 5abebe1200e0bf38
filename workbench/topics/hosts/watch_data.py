"""`LoaderWatch`, `DrawWatch`: which examples a rank is given, pass by pass over every `DataLoader`, and what is drawn while they are made."""

import json
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from workbench.instruments.workers import digest, generators, state_of
from workbench.topics.hosts.watch_state import Patches, State, hash_of, place_of, random_state, row_hashes
from workbench.workloads.items import IndexedDataset

MAX_INDICES = 100_000  # of a pass that are written down (rule of thumb: a rehearsal is far shorter)
MAX_HASHED = 1024  # examples of a pass that are hashed, for data of which indices say nothing (rule of thumb)
MAX_PASSES = 50
FETCHES = 8  # fetches of the training data that are looked at in each process (rule of thumb)


class LoaderWatch:
    """Indices and hashes of the examples of every pass (`hosts.sharding`, `hosts.set_epoch`, `hosts.evaluation`)."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self.known: set[str] = set()
        """Splits of which the trainer says itself which examples it takes, whatever loads them."""
        self._pass, self._ahead = f"_workbench_pass_{id(self)}", f"_workbench_ahead_{id(self)}"  # on the iterators
        self._loaders: list[Any] = []
        self._samplers: list[Any] = []
        self._sampler_calls: Counter[int] = Counter()  # of set_epoch, by place among the samplers
        self._passes: list[dict[str, Any]] = []
        patches.wrap(DataLoader, "__iter__", self._on_iter)
        patches.before(_BaseDataLoaderIter, "_reset", lambda batches, *_, **__: setattr(batches, self._ahead, deque()))
        patches.wrap(_BaseDataLoaderIter, "_next_index", self._on_index)
        patches.wrap(_BaseDataLoaderIter, "__next__", self._on_next)
        patches.before(DistributedSampler, "set_epoch", self._on_set_epoch)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        for seen in self._passes:
            seen["planned"] = None if seen["exhausted"] else seen["planned"]
        return {"passes": self._passes}

    def add_order(self, examples: int, order: torch.Tensor) -> None:
        """Take the order of an epoch from the trainer: this rank's examples, shape (micro-batches, examples of one)."""
        number, step = sum(p["loader"] == -1 for p in self._passes), self._state.step
        self._add(
            loader=-1, number=number, dataset={"kind": "train_data", "length": examples, "stream": False, "hash": None}, sampler="Trainer",
            distributed=True, shuffles=True, epoch=number, set_epoch_calls=number + 1, batch_size=order.shape[1], drop_last=True,
            steps=[step, step + len(order)], exhausted=True, grad=True, indices=order.reshape(-1)[:MAX_INDICES].tolist(),
        )  # fmt: skip

    def add_evaluation(self, data: Any, indices: Sequence[int]) -> None:
        """Take the examples that this rank evaluates from the trainer."""
        self._add(
            loader=-2, number=0, dataset=_dataset(data), levels=_levels(data), sampler="Trainer", exhausted=True, grad=False,
            indices=_base_indices(data, list(indices)[:MAX_INDICES]),
        )  # fmt: skip

    def _add(self, *, number: int, **fields: Any) -> dict[str, Any] | None:
        if len(self._passes) >= MAX_PASSES:
            return None
        step = self._state.step
        self._passes.append({
            "pass": number, "levels": [], "distributed": False, "shuffles": False, "epoch": None, "set_epoch_calls": 0, "planned": None,
            "batch_size": None, "drop_last": False, "steps": [step, step], "exhausted": False, "grad": None, "indices": [], "contents": [],
            **fields,
        })  # fmt: skip
        return self._passes[-1]

    def _on_set_epoch(self, sampler: Any, *_: Any, **__: Any) -> None:
        self._sampler_calls[place_of(self._samplers, sampler)] += 1

    def _on_iter(self, original: Any, loader: Any) -> Any:
        known = isinstance(loader.dataset, IndexedDataset) and loader.dataset.split in self.known
        if known or not self._state.here:
            return original(loader)
        self._state.tick("loading")
        batches = original(loader)
        if len(self._passes) < MAX_PASSES:
            setattr(batches, self._pass, self._begun(loader))
        return batches

    def _begun(self, loader: Any) -> dict[str, Any] | None:
        number = place_of(self._loaders, loader)
        sampler, planned = _sampler_of(loader), None
        if type(sampler) is DistributedSampler and sampler.total_size <= MAX_INDICES:  # has a generator of its own
            planned = _base_indices(loader.dataset, list(iter(sampler)))
        return self._add(
            loader=number, number=sum(p["loader"] == number for p in self._passes), dataset=_dataset(loader.dataset),
            sampler=type(sampler).__name__, distributed=isinstance(sampler, DistributedSampler) or hasattr(sampler, "set_epoch"),
            shuffles=_shuffles(sampler), epoch=getattr(sampler, "epoch", None),
            set_epoch_calls=self._sampler_calls[place_of(self._samplers, sampler)], planned=planned,
            batch_size=getattr(loader, "batch_size", None), levels=_levels(loader.dataset),
            drop_last=bool(getattr(loader, "drop_last", False)), optimizers=len(self._state.optimizers),
        )  # fmt: skip

    def _on_index(self, original: Any, batches: Any) -> Any:
        index = original(batches)
        vars(batches).setdefault(self._ahead, deque()).append(index)
        return index

    def _on_next(self, original: Any, batches: Any) -> Any:
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
    return loader.sampler if batching is None else getattr(batching, "sampler", None) or batching


def _shuffles(sampler: Any) -> bool | None:
    """Tell whether a sampler shuffles, as far as its attributes say so."""
    name = type(sampler).__name__
    by_name = True if "Random" in name else False if name == "SequentialSampler" else None
    return bool(sampler.shuffle) if by_name is None and hasattr(sampler, "shuffle") else by_name


def _base_indices(dataset: Any, indices: list[Any]) -> list[Any]:
    """Return positions in the dataset that the parts were taken from."""
    for part in _taken_apart(dataset)[0]:
        indices = [part.indices[int(i)] for i in indices]
    return [int(i) if isinstance(i, (int, np.integer, torch.Tensor)) else str(i) for i in indices]


def _taken_apart(dataset: Any) -> tuple[list[Any], Any]:
    """Return the parts around a dataset, the outermost first, and what they were taken from; wrappers that pass items on are none."""
    parts = []
    while True:
        if isinstance(dataset, IndexedDataset):
            dataset = dataset.data
        elif _is_part(dataset):
            parts.append(dataset)
            dataset = dataset.dataset
        else:
            return parts, dataset


def _is_part(dataset: Any) -> bool:
    """Tell whether a dataset is a `Subset`, or built like it: one position in another data set for each of its examples."""
    positions = getattr(dataset, "indices", None)
    if not hasattr(dataset, "dataset") or not isinstance(positions, (list, tuple, range, np.ndarray, torch.Tensor)):
        return False
    return all(  # the number of an example, and no window or name
        isinstance(one, (int, np.integer)) or (isinstance(one, torch.Tensor) and one.ndim == 0)
        for one in (*positions[:1], *positions[-1:])
    )


def _dataset(dataset: Any) -> dict[str, Any]:
    """Return what tells data sets apart: of the arrays and lists that one holds; no item is read."""
    dataset = _taken_apart(dataset)[1]
    try:
        length = len(dataset)
    except Exception:  # whatever it raises is the script's to meet, where it asks for the length
        length = None
    held = list(_held(dataset, depth=3))
    crc = f"{zlib.crc32(b''.join(held)):08x}" if held else None
    return {
        "kind": type(dataset).__name__, "length": length, "stream": isinstance(dataset, IterableDataset), "hash": crc,
    }  # fmt: skip


def _levels(dataset: Any) -> list[list[Any]]:
    """Return length and hash of the positions of each part that a part was taken from, the outermost first."""
    found = []
    for part in _taken_apart(dataset)[0]:
        positions = np.asarray([int(i) for i in part.indices], dtype=np.int64)
        found.append([len(positions), f"{zlib.crc32(positions.tobytes()):08x}"])
    return found


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


class DrawWatch:
    """Random state before and after examples are made: only what is drawn from counts (`hosts.data_seed`)."""

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._rows: list[dict[str, Any]] = []
        self._looked = self._calls = self._other_calls = 0
        self._after_fetch: dict[str, int] | None = None
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            patches.wrap(fetcher, "fetch", self._on_fetch)
        state.on_train_call.append(self._on_train_call)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values, with what worker processes wrote."""
        rows = list(self._rows)
        for path in sorted(self._state.folder.glob(f"draws-{self._state.rank}-*.jsonl")):
            rows += [json.loads(line) for line in path.read_text().splitlines()]
            path.unlink()
        return {"draws": rows}

    def _on_fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        worker = get_worker_info()
        if (worker is None and not self._state.here) or self._looked >= FETCHES:
            self._after_fetch = None  # of an earlier batch, which is not the one that comes now
            return original(fetcher, index)
        self._looked += 1
        before = _states(fetcher.dataset)
        batch = original(fetcher, index)
        self._note(before, _states(fetcher.dataset), where="item", worker=None if worker is None else worker.id)
        if worker is None:
            self._after_fetch = random_state() if torch.is_grad_enabled() else None
            self._other_calls = self._state.other_calls
        return batch

    def _on_train_call(self, _: Any) -> None:
        """Note what the loop itself draws between a batch and the model."""
        for_training = self._other_calls == self._state.other_calls  # and not a batch that was evaluated
        if self._after_fetch is not None and for_training and self._calls < FETCHES:
            self._calls += 1
            self._note(self._after_fetch, random_state(), where="batch", worker=None)
        self._after_fetch = None

    def _note(self, before: dict[str, int], after: dict[str, int], *, where: str, worker: int | None) -> None:
        drawn = {name: state for name, state in before.items() if after.get(name) != state}
        rows = [{"where": where, "worker": worker, "generator": name, "state": state} for name, state in drawn.items()]
        if worker is None:
            self._rows += rows
        elif rows:
            path = self._state.folder / f"draws-{self._state.rank}-{worker}.jsonl"
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def _states(dataset: Any) -> dict[str, int]:
    own = {f"dataset{name}": digest(state_of(generator)) for name, generator in generators(dataset).items()}
    return random_state() | own
