"""Loaders with one thing wrong, or nothing; a step of known length; a device that the host runs ahead of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info


class Items(Dataset[Any]):
    """Items of 16 numbers and a class that take their time: each sleeps or works, the first one longer; `extra` values of a further feature."""

    def __init__(
        self, examples: int = 400, *, sleep_s: float = 0.0, work_s: float = 0.0, first_s: float = 0.0, extra: int = 0
    ) -> None:
        self.x = torch.randn(examples, 16, generator=torch.Generator().manual_seed(0))
        self.sleep_s, self.work_s, self.first_s = sleep_s, work_s, first_s
        self.extra = torch.ones(4, extra)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        wait, self.first_s = self.sleep_s + self.first_s, 0.0
        if wait:
            time.sleep(wait)
        until = time.process_time() + self.work_s
        while time.process_time() < until:
            pass
        if self.extra.numel():
            return {"x": self.x[index], "y": index % 4, "extra": self.extra[index % 4]}
        return self.x[index], index % 4


class Drawing(Dataset[Any]):
    """The fault of `default_rng(0)` in `__init__`: every worker process gets a copy of the generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index + self.rng.standard_normal()), index % 4


class Stream(IterableDataset[Any]):
    """A stream whose length may lie, and which may share its examples out among workers."""

    def __init__(self, gives: int, *, says: int | None = None, shared: bool = True) -> None:
        self.gives, self.says, self.shared = gives, gives if says is None else says, shared

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, every = (0, 1) if info is None or not self.shared else (info.id, info.num_workers)
        for index in range(first, self.gives, every):
            yield torch.full((4,), float(index)), index % 4


class SlowCollate:
    """A collate function that sleeps."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __call__(self, items: list[Any]) -> Any:
        time.sleep(self.sleep_s)
        return default_collate(items)


class TrainStep:
    """A real update of a small model, a sleep that stands for a larger one, and the loss fetched every so many steps (0: never)."""

    def __init__(self, sleep_s: float = 0.0, *, fetch_every: int = 0) -> None:
        self.model = nn.Linear(16, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.sleep_s, self.fetch_every, self.count = sleep_s, fetch_every, 0

    def __call__(self, batch: Any) -> None:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(self.sleep_s)
        if self.fetch_every and self.count % self.fetch_every == 0:
            loss.item()
        self.count += 1


class AheadDevice:
    """A device with a queue of steps of `step_s`: launching work returns at once, fetching the loss waits for all of it."""

    def __init__(self, step_s: float, *, fetch_every: int = 0) -> None:
        self.step_s, self.fetch_every, self.count, self.free = step_s, fetch_every, 0, 0.0

    def wait(self) -> None:
        """Return when the queue is empty."""
        time.sleep(max(0.0, self.free - time.perf_counter()))

    def __call__(self, batch: Any) -> None:
        self.free = max(self.free, time.perf_counter()) + self.step_s
        loss = torch.ones(()).as_subclass(_OnDevice)
        loss.device_queue = self
        if self.fetch_every and self.count % self.fetch_every == 0:
            loss.item()
        self.count += 1


class _OnDevice(torch.Tensor):
    """A metric that lives on an `AheadDevice`: the instrumented metric object of P1.6."""

    device_queue: AheadDevice

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "item":
            args[0].device_queue.wait()
        return super().__torch_function__(func, types, args, kwargs or {})


def loader(data: Any, **settings: Any) -> DataLoader[Any]:
    """Return a loader of batches of 8."""
    workers = {"persistent_workers": True} if settings.get("num_workers") else {}
    return DataLoader(data, **({"batch_size": 8} | workers | settings))
