"""`Schedulers` and `Loaders`: how a loop steps its learning-rate schedulers and draws its batches."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.caller import own_line

MAX_PRINTS = 200
_HORIZONS = ("total_steps", "T_max", "T_0", "total_iters", "step_size")


class Schedulers:
    """Counts the calls of each scheduler, and reads after how many of them it is through."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, Any]] = {}
        self._alive: dict[int, Any] = {}

    def stepped(self, scheduler: Any, updates: int) -> bool:
        """Take in a call of `step`; False for the one that a scheduler makes when it is built, or that another one makes in its turn."""
        key = id(scheduler)
        if key not in self._alive:
            self._alive[key] = scheduler  # held, so that no other takes its identity
            self._seen[key] = {
                "name": type(scheduler).__name__, "calls": 0, "before_first_update": 0, "line": "", "horizon": _horizon(scheduler),
                "lr_first": None, "lr_last": None, "updates_at_horizon": None,
            }  # fmt: skip
            if getattr(scheduler, "last_epoch", 1) == 0:
                return False
        found = self._seen[key]
        found["calls"] += 1
        found["before_first_update"] += updates == 0
        found["line"] = found["line"] or own_line()
        if found["horizon"] and found["calls"] == found["horizon"]:
            found["updates_at_horizon"] = updates
        return True

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one row a scheduler, as JSON values."""
        return [row for row in self._seen.values() if row["calls"]]


def _horizon(scheduler: Any) -> int | None:
    for name in _HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return value
    marks = getattr(scheduler, "milestones", None)
    return max(marks) if marks else None


class Loaders:
    """Counts what is drawn from each loader, and whether updates are made on other examples than the one before."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._seen: dict[int, dict[str, Any]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._prints: list[Tensor] = []
        self._sizes: list[int] = []
        self._fed: list[Tensor] = []

    def begins(self, loader: Any) -> None:
        """Take in that iteration over a loader begins."""
        row = self._row(loader)
        row["begun"] += 1
        row["line"] = row["line"] or own_line()

    def drew(self, loader: Any) -> None:
        """Take in that a batch was drawn."""
        self._row(loader)["drawn"] += 1
        self.last = id(loader)

    def _row(self, loader: Any) -> dict[str, Any]:
        key = id(loader)
        ref = self._refs.get(key)
        if ref is None or ref() is not loader:
            try:
                batches: int | None = len(loader)
            except (TypeError, NotImplementedError):
                batches = None
            shuffled = not isinstance(getattr(loader, "sampler", None), torch.utils.data.SequentialSampler)
            self._refs[key] = weakref.ref(loader)
            self._seen[key] = {
                "batches": batches,
                "begun": 0,
                "drawn": 0,
                "shuffled": shuffled,
                "workers": getattr(loader, "num_workers", 0),
                "line": "",
            }
        return self._seen[key]

    def fed(self, first: Tensor | None) -> None:
        """Take in the first tensor that a model is trained on: a number that other examples would hardly give."""
        if first is not None and len(self._prints) < MAX_PRINTS and not self._fed:
            first = first.detach()
            flat = first.reshape(-1)[: 2**16]
            weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float32)
            self._fed = [(flat.float() * weights.sin()).sum()]
            self._sizes.append(int(first.shape[0]) if first.ndim else 1)

    def stepped(self, *, near: bool) -> None:
        """Take in that an update was made."""
        if near and self._fed:
            self._prints += self._fed
        self._fed = []

    def to_dict(self) -> dict[str, Any]:
        """Return loaders, batch size and how many updates in a row saw the same examples, as JSON values."""
        values = [float(p) for p in self._prints]
        same = sum(a == b for a, b in itertools.pairwise(values))
        size = max(set(self._sizes), key=self._sizes.count) if self._sizes else None
        return {
            "loaders": list(self._seen.values()),
            "batch_size": size,
            "compared": max(len(values) - 1, 0),
            "same": same,
            "distinct": len(set(values)),
        }


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor that holds something in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value if value.numel() and not value.is_sparse else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)
