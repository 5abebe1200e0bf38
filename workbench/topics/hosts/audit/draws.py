"""`DrawWatch`: the random state from which augmentation draws, so that ranks that draw alike show (P7.6)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from workbench.topics.hosts.audit.hashing import random_state, state_of
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State

__all__ = ["DrawWatch"]

FETCHES = 8
"""Fetches of the training data that are looked at in each process (rule of thumb)."""


class DrawWatch:
    """Random state before and after examples are made: only what is drawn from counts (`hosts.data_seed`).

    Worker processes that are forked write what they see into files beside the facts.

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._rows: list[dict[str, Any]] = []
        self._looked = 0
        self._after_fetch: dict[str, int] | None = None
        self._calls = self._other_calls = 0
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

    def _on_fetch(self, original: Any) -> Callable[..., Any]:
        def fetch(fetcher: Any, index: Any) -> Any:
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

        return fetch

    def _on_train_call(self, _: Any) -> None:
        """Note what the loop itself draws between a batch and the model."""
        for_training = self._other_calls == self._state.other_calls  # and not a batch that was evaluated
        if self._after_fetch is not None and for_training and self._calls < FETCHES:
            self._calls += 1
            self._note(self._after_fetch, random_state(), where="batch", worker=None)
        self._after_fetch = None

    def _note(self, before: dict[str, int], after: dict[str, int], *, where: str, worker: int | None) -> None:
        step = self._state.step
        rows = [
            {"where": where, "worker": worker, "look": self._looked, "step": step, "generator": name, "state": state}
            for name, state in before.items()
            if after.get(name) != state
        ]
        if worker is None:
            self._rows += rows
        elif rows:
            path = self._state.folder / f"draws-{self._state.rank}-{worker}.jsonl"
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def _states(dataset: Any) -> dict[str, int]:
    return random_state() | {f"dataset{name}": state for name, state in _own(dataset, "", 3)}


def _own(value: Any, name: str, depth: int) -> list[tuple[str, int]]:
    """Return the states of the generators that a dataset holds, by where they are in it."""
    state = state_of(value)
    if state is not None:
        return [(name, state)]
    if not depth or isinstance(value, type):
        return []
    if isinstance(value, (list, tuple)) and len(value) <= 16:
        return [found for n, inner in enumerate(value) for found in _own(inner, f"{name}[{n}]", depth - 1)]
    inside = getattr(value, "__dict__", None)
    if not isinstance(inside, dict) or callable(getattr(value, "numel", None)):
        return []
    return [found for key, inner in inside.items() for found in _own(inner, f"{name}.{key}", depth - 1)]
