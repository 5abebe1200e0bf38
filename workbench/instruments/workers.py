"""Whether the worker processes of a loader draw random numbers of their own, and others in every epoch: they say so themselves."""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

KINDS = ("random", "NumPy", "torch", "a generator that the dataset keeps")
MAX_EPOCHS = 3
_LOOKS = 20
"""Batches of a worker after which it is no longer looked at whether random numbers were drawn (rule of thumb)."""
_MOST_PARTS, _DEEP = 200, 4


@contextlib.contextmanager
def asked_workers(loader: DataLoader[Any]) -> Iterator[Tensor | None]:
    """Have the workers that are started inside write the states of their generators into what is yielded; None where there are no workers.

    The numbers are [worker, kind, state when it began and after its last batch], 0 where nothing is known. Nothing is drawn for them.
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
        states = torch.zeros(loader.num_workers, len(KINDS), 2, dtype=torch.int64)
        states.share_memory_()  # type: ignore[no-untyped-call]
        loader.collate_fn = _Collated(collate, states)
        loader.worker_init_fn = _Began(init, states)
    except Exception:
        with contextlib.suppress(Exception):
            loader.collate_fn = collate
        return None
    return init, collate, states


class _Began:
    """Does what a loader's own `worker_init_fn` does, and notes the states after it."""

    def __init__(self, inner: Callable[[int], None] | None, states: Tensor) -> None:
        self._inner, self._states = inner, states

    def __call__(self, number: int) -> None:
        if self._inner is not None:
            self._inner(number)
        _note(self._states, 0)


class _Collated:
    """Does what a loader's own `collate_fn` does, and notes the states after it."""

    def __init__(self, inner: Callable[[Any], Any], states: Tensor) -> None:
        self._inner, self._states, self._looks = inner, states, 0

    def __call__(self, examples: Any) -> Any:
        batch = self._inner(examples)
        self._looks += 1
        if self._looks <= _LOOKS:
            _note(self._states, 1)
        return batch


def _note(states: Tensor, when: int) -> None:
    with contextlib.suppress(Exception):  # of ours: loading goes on
        info = get_worker_info()
        if info is not None:
            states[info.id, :, when] = torch.tensor(_digests(info.dataset))


def _digests(dataset: Any) -> list[int]:
    numpy = sys.modules.get("numpy")
    own = [] if isinstance(dataset, IterableDataset) else _generators(dataset)  # streams may shuffle alike on purpose
    states = [
        random.getstate(), None if numpy is None else numpy.random.get_state()[1:3], torch.get_rng_state(), [_state(g) for g in own] or None,
    ]  # fmt: skip
    return [0 if state is None else 1 + _digest(state) for state in states]


def _digest(state: Any) -> int:
    if isinstance(state, Tensor):
        return zlib.crc32(state.numpy().tobytes())
    if isinstance(state, (tuple, list)):
        return zlib.crc32(repr([_digest(part) for part in state] if len(state) < 20 else state).encode())
    return zlib.crc32(state.tobytes() if hasattr(state, "tobytes") else repr(state).encode())


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return (
        repr(generator.bit_generator.state) if hasattr(generator, "bit_generator") else list(generator.get_state()[1:3])
    )


def _generators(dataset: Any) -> list[Any]:
    """Return the random generators among a dataset's attributes, and those of what it wraps and transforms with."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: list[Any] = []
    level, seen = [dataset], {id(dataset)}
    for _ in range(_DEEP):
        below = [part for each in level for part in _parts(each)]
        level = []
        for part in below[:_MOST_PARTS]:
            if id(part) not in seen:
                seen.add(id(part))
                (found if isinstance(part, kinds) else level).append(part)
    return found


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value[:20]
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) and not isinstance(value, (type, Tensor)) else ()


class Workers:
    """Collects what the workers of each loader wrote, in their first epochs."""

    def __init__(self) -> None:
        self._states: dict[int, list[Tensor]] = {}

    def begins(self, loader: Any, states: Tensor | None) -> None:
        """Take in that workers of a loader are started."""
        known = self._states.setdefault(id(loader), []) if states is not None else []
        if states is not None and len(known) < MAX_EPOCHS:
            known.append(states)

    def to_dict(self, trained: Callable[[int], bool], line: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return for each loader with workers which generators were drawn from, and which were alike, as JSON values."""
        return [
            {"workers": len(states[0]), "epochs": len(states), "trained": trained(key), "line": line(key), **_alike(states)}
            for key, states in self._states.items()
        ]  # fmt: skip


def _alike(states: Sequence[Tensor]) -> dict[str, list[str]]:
    """Return the kinds that were drawn from, those that began alike in all workers, and those that began alike in two epochs."""
    drawn, workers, epochs = [], [], []
    for place, kind in enumerate(KINDS):
        begun = [[int(v) for v in each[:, place, 0]] for each in states]
        after = [[int(v) for v in each[:, place, 1]] for each in states]
        if not any(a and a != b for one, two in zip(begun, after, strict=True) for b, a in zip(one, two, strict=True)):
            continue
        drawn.append(kind)
        if any(len(one) > 1 and all(one) and len(set(one)) == 1 for one in begun):
            workers.append(kind)
        whole = [tuple(one) for one in begun if all(one)]
        if len(set(whole)) < len(whole):
            epochs.append(kind)
    return {"drawn": drawn, "same_in_workers": workers, "same_in_epochs": epochs}
