"""Whether the worker processes of a loader draw random numbers of their own, and others in every epoch: they say so themselves."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

KINDS = ("random", "NumPy", "torch", "a generator that the dataset keeps")
MAX_EPOCHS = 3
_LOOKS = 20
"""Batches of a worker after which it is no longer looked at whether random numbers were drawn (rule of thumb)."""
_MOST_PARTS, _DEEP = 200, 4
BEGUN, FIRST, LAST, WAY = range(4)
"""Places of a generator's state when its worker began, after its first batch and after its last one, and of how it got from one to the other."""
UNKNOWN, GOES_ON, SEEDED = range(3)


@contextlib.contextmanager
def asked_workers(loader: DataLoader[Any]) -> Iterator[Tensor | None]:
    """Have the workers that are started inside write the states of their generators into what is yielded; None where there are no workers.

    The numbers are [worker, kind, BEGUN to WAY], 0 where nothing is known. Nothing is drawn for them.
    """
    asked = _asked(loader) if loader.num_workers else None
    if asked is None:
        yield None
        return
    init, collate, states = asked
    try:
        yield states
    finally:
        loader.worker_init_fn, loader.collate_fn = init, collate


def _asked(loader: DataLoader[Any]) -> tuple[Any, Any, Tensor] | None:
    """Put ours before a loader's own functions and return those; None where it does not let them be changed, or memory cannot be shared."""
    init, collate = loader.worker_init_fn, loader.collate_fn
    try:
        states = torch.zeros(loader.num_workers, len(KINDS), WAY + 1, dtype=torch.int64)
        states.share_memory_()  # type: ignore[no-untyped-call]
        notes = _Notes(states)
        loader.collate_fn = _Then(collate, notes.collated)
        loader.worker_init_fn = _Then(init, notes.begun)
    except Exception:
        with contextlib.suppress(Exception):
            loader.collate_fn = collate
        return None
    return init, collate, states


class _Then:
    """Does what a loader's own function does, where it has one, and notes the states after it."""

    def __init__(self, inner: Callable[[Any], Any] | None, note: Callable[[], None]) -> None:
        self._inner, self._note = inner, note

    def __call__(self, given: Any) -> Any:
        made = None if self._inner is None else self._inner(given)
        self._note()
        return made


class _Notes:
    """Writes the states of a worker's generators into memory that it shares with the process that started it."""

    def __init__(self, states: Tensor) -> None:
        self._states, self._looks = states, 0
        self._first: list[list[_Seen]] = []

    def begun(self) -> None:
        """Note the states that a worker begins with."""
        with contextlib.suppress(Exception):  # of ours: loading goes on
            info = get_worker_info()
            if info is not None:
                self._first = _seen(info.dataset)
                self._write(info.id, BEGUN, self._first)

    def collated(self) -> None:
        """Note the states after a batch."""
        self._looks += 1
        with contextlib.suppress(Exception):
            info = get_worker_info()
            if info is not None and self._looks <= _LOOKS:
                now = _seen(info.dataset)
                self._write(info.id, LAST, now)
                if self._looks == 1:
                    self._write(info.id, FIRST, now)
                ways = [_way(then, later) for then, later in zip(self._first, now, strict=True)]
                known = self._states[info.id, :, WAY]
                self._states[info.id, :, WAY] = torch.where(known == GOES_ON, known, torch.tensor(ways))

    def _write(self, worker: int, when: int, kinds: Sequence[Sequence[_Seen]]) -> None:
        digests = [1 + digest([seen.state for seen in kind]) if kind else 0 for kind in kinds]
        self._states[worker, :, when] = torch.tensor(digests)


class _Seen(NamedTuple):
    """A generator as it is at one time; `seed` stays while it is drawn from, `tells` that it changes where it is seeded anew, and only there."""

    generator: Any
    seed: Any
    state: Any
    tells: bool


def _seen(dataset: Any) -> list[list[_Seen]]:
    """Return the generators of each of `KINDS` as they are now."""
    numpy = sys.modules.get("numpy")
    # streams may shuffle alike on purpose
    own = [] if isinstance(dataset, IterableDataset) else generators(dataset).values()
    return [
        [_twister(random, random.getstate())],
        [] if numpy is None else [_twister(numpy.random, tuple(numpy.random.get_state()[1:3]))],
        [_Seen(torch, torch.initial_seed(), torch.get_rng_state(), True)], [_seen_of(each) for each in own],
    ]  # fmt: skip


def _seen_of(generator: Any) -> _Seen:
    state = state_of(generator)
    if isinstance(generator, torch.Generator):
        return _Seen(generator, generator.initial_seed(), state, True)
    if hasattr(generator, "bit_generator"):
        return _Seen(generator, id(generator.bit_generator), state, True)
    return _twister(generator, state)


def _twister(generator: Any, state: Any) -> _Seen:
    """Return a Mersenne twister: it renews its words itself after 624 draws."""
    key = state[1][:-1] if len(state) == 3 else state[0]
    return _Seen(generator, digest(key), state, False)


def _way(then: Sequence[_Seen], now: Sequence[_Seen]) -> int:
    """Return whether generators go on from where they began, were seeded anew, or may have been."""
    here = {id(seen.generator): seen for seen in now}
    kept = [(old, here[id(old.generator)]) for old in then if id(old.generator) in here]
    if any(old.seed == new.seed and digest(old.state) != digest(new.state) for old, new in kept):
        return GOES_ON
    gone = len(kept) < len(then)
    return SEEDED if gone or any(new.tells and old.seed != new.seed for old, new in kept) else UNKNOWN


def digest(state: Any) -> int:
    """Return a short hash of a generator's state."""
    if isinstance(state, Tensor):
        return zlib.crc32(state.numpy().tobytes())
    if isinstance(state, (tuple, list)):
        return zlib.crc32(repr([digest(part) for part in state] if len(state) < 20 else state).encode())
    return zlib.crc32(state.tobytes() if hasattr(state, "tobytes") else repr(state).encode())


def state_of(generator: Any) -> Any:
    """Return the state of one of torch's, Python's or NumPy's generators."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return (
        repr(generator.bit_generator.state) if hasattr(generator, "bit_generator") else list(generator.get_state()[1:3])
    )


def generators(dataset: Any) -> dict[str, Any]:
    """Return the random generators among a dataset's attributes, and those of what it wraps and transforms with, by where they are in it."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: dict[str, Any] = {}
    level, seen = {"": dataset}, {id(dataset)}
    for _ in range(_DEEP):
        below = [(name + key, part) for name, each in level.items() for key, part in _parts(each)]
        level = {}
        for name, part in below[:_MOST_PARTS]:
            if id(part) not in seen:
                seen.add(id(part))
                (found if isinstance(part, kinds) else level)[name] = part
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        return [(f"[{n}]", part) for n, part in enumerate(value[:20])]
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, (type, Tensor)):
        return []
    return [(f".{key}", part) for key, part in held.items()]


class Workers:
    """Collects what the workers of each loader wrote, in their first epochs."""

    def __init__(self) -> None:
        self._states: dict[int, list[Tensor]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}

    def begins(self, loader: Any, states: Tensor | None) -> None:
        """Take in that workers of a loader are started."""
        if states is None:
            return
        key = id(loader)
        if key not in self._refs or self._refs[key]() is not loader:  # another one took its identity
            self._refs[key], self._states[key] = weakref.ref(loader), []
        if len(self._states[key]) < MAX_EPOCHS:
            self._states[key].append(states)

    def to_dict(self, trained: Callable[[int], bool], line: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return for each loader with workers which generators were drawn from, and which were alike, as JSON values."""
        return [
            {"workers": len(states[0]), "epochs": len(states), "trained": trained(key), "line": line(key), **_alike(states)}
            for key, states in self._states.items()
        ]  # fmt: skip


def _alike(states: Sequence[Tensor]) -> dict[str, list[str]]:
    """Return the kinds that were drawn from, those whose draws are the same in all workers, and those whose draws are the same in two epochs.

    Generators that began alike draw alike unless they are seeded anew for each example; then it is meant that one example has the same
    draws in every epoch, and other examples have others. Where nothing tells whether they were, states after the first batch decide.
    """
    drawn, workers, epochs = [], [], []
    for place, kind in enumerate(KINDS):
        begun, first, last, way = ([[int(v) for v in each[:, place, at]] for each in states] for at in range(WAY + 1))
        if not any(a and a != b for one, two in zip(begun, last, strict=True) for b, a in zip(one, two, strict=True)):
            continue
        drawn.append(kind)
        ways = {one for each in way for one in each}
        rows = [(tuple(b), b if GOES_ON in ways else f) for b, f in zip(begun, first, strict=True) if all(b)]
        if any(len(b) > 1 and len(set(b)) == 1 == len(set(then)) for b, then in rows):
            workers.append(kind)
        whole = [(b, tuple(then)) for b, then in rows]
        if SEEDED not in ways and len(set(whole)) < len(whole):
            epochs.append(kind)
    return {"drawn": drawn, "same_in_workers": workers, "same_in_epochs": epochs}
