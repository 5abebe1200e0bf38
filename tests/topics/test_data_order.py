"""In which order examples come: planted faults, healthy loaders, and no trace left in random state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import workbench as wb
from workbench.findings.diagnosis import Diagnosis

N = 1000
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
MIXED = torch.arange(N).remainder(10)[torch.randperm(N, generator=torch.Generator().manual_seed(1))]
SORTED = TensorDataset(X, MIXED.sort().values)
STORED = TensorDataset(X, MIXED)


class Listed(Sampler[int]):
    """Indices by a function of the epoch."""

    def __init__(self, order: Any) -> None:
        self.order, self.epoch = order, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.order(self.epoch))

    def __len__(self) -> int:
        return N


class Stream(IterableDataset[Any]):
    """Rows in storage order through a shuffle buffer; 1 shuffles nothing."""

    def __init__(self, data: TensorDataset, buffer: int = 1, seed: int | None = None) -> None:
        self.data, self.buffer, self.seed = data, buffer, seed

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng(self.seed)
        held: list[int] = []
        for index in range(len(self.data)):
            if len(held) < self.buffer:
                held.append(index)
                continue
            place = int(rng.integers(self.buffer))
            yield self.data[held[place]]
            held[place] = index
        for place in rng.permutation(len(held)) if self.buffer > 1 else range(len(held)):
            yield self.data[held[place]]


def said(data: Any) -> Diagnosis:
    return wb.data.diagnose(wb.data.audit(data))


def blocks(epoch: int) -> list[int]:
    order = np.random.default_rng(epoch).permutation(N // 50)
    return [50 * int(b) + k for b in order for k in range(50)]


def balanced(epoch: int) -> list[int]:
    """Return an order in which every ten in a row are of ten classes."""
    rng = np.random.default_rng(epoch)
    rows = np.stack([rng.permutation(np.flatnonzero(MIXED.numpy() == label)) for label in range(10)])
    return [int(index) for place in range(rows.shape[1]) for index in rng.permutation(rows[:, place])]


def shuffled(data: Any = SORTED, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=32, shuffle=True, **options)


HEALTHY: dict[str, Any] = {
    "shuffle=True": shuffled,
    "a generator of its own": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "a batch sampler": lambda: DataLoader(
        SORTED, batch_sampler=BatchSampler(RandomSampler(SORTED), 32, drop_last=True)
    ),
    "with replacement": lambda: DataLoader(SORTED, sampler=RandomSampler(SORTED, replacement=True)),
    "weighted": lambda: DataLoader(SORTED, sampler=WeightedRandomSampler((1 + SORTED.tensors[1]).tolist(), N)),
    "without batches": lambda: DataLoader(SORTED, batch_size=None, sampler=RandomSampler(SORTED)),
    "drifting classes": lambda: shuffled(TensorDataset(X, DRIFTING)),
    "numbers sorted by size": lambda: shuffled(TensorDataset(X, torch.randn(N).sort().values)),
    "one class": lambda: shuffled(TensorDataset(X, ONE_CLASS)),
    "balanced batches": lambda: DataLoader(STORED, sampler=Listed(balanced)),
    "a stream with a large buffer": lambda: Stream(SORTED, buffer=N),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_loaders_are_silent(name: str) -> None:
    diagnosis = said(HEALTHY[name]())
    assert diagnosis["data.unshuffled"].status == "ok"
    assert diagnosis["data.weak_shuffle"].status == "ok", diagnosis["data.weak_shuffle"].summary


DRIFTING = torch.from_numpy((np.random.default_rng(0).random(N) < np.linspace(0.2, 0.8, N)).astype(np.int64))
ONE_CLASS = torch.zeros(N, dtype=torch.int64)


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (DataLoader(SORTED, batch_size=32), "fail", "sorted by class"),
        (Stream(SORTED), "fail", "sorted by class"),
        (DataLoader(Stream(SORTED), batch_size=32), "fail", "sorted by class"),
        (DataLoader(TensorDataset(X, DRIFTING), batch_size=32), "fail", "their labels follow it"),
        (DataLoader(TensorDataset(X, torch.randn(N).sort().values)), "fail", "sorted by class"),
        (DataLoader(STORED, batch_size=32), "warn", "time or source"),
        (DataLoader(TensorDataset(X)), "warn", "labels are unknown"),
        (DataLoader(TensorDataset(X, ONE_CLASS)), "warn", "in the order they are stored in"),
        (DataLoader(TensorDataset(X[:12], MIXED[:12])), "warn", "in the order they are stored in"),
        (DataLoader(TensorDataset(X[:5], SORTED.tensors[1][::200])), "not_measured", "5 examples are too few"),
        (DataLoader(TensorDataset(X[:2], SORTED.tensors[1][::500])), "not_measured", "2 examples are too few"),
        (DataLoader(TensorDataset(X[:1], MIXED[:1])), "not_measured", ""),
    ],
)
def test_what_is_not_shuffled(data: Any, status: str, words: str) -> None:
    diagnosis = said(data)
    finding = diagnosis["data.unshuffled"]
    assert (finding.status, words in finding.summary) == (status, True), finding.summary
    assert diagnosis["data.weak_shuffle"].status != "ok"


FAULTS: dict[str, Any] = {
    "same order": (lambda: DataLoader(SORTED, sampler=Listed(lambda e: torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist())), "same order"),
    "set_epoch forgotten": (lambda: DataLoader(SORTED, sampler=DistributedSampler(SORTED, num_replicas=2, rank=0)), "same order"),
    "small buffer": (lambda: DataLoader(STORED, sampler=Listed(lambda e: np.argsort(np.arange(N) + 40 * np.random.default_rng(e).random(N)).tolist())), "near their place"),
    "blocks": (lambda: DataLoader(STORED, sampler=Listed(blocks)), "blocks are shuffled"),
    "buffer over sorted stream": (lambda: Stream(SORTED, buffer=100), "clumps|mix of classes"),
    "stream, same order": (lambda: Stream(STORED, buffer=N, seed=0), "same order"),
    "hardly another order": (lambda: DataLoader(STORED, sampler=Listed(lambda e: np.argsort(np.random.default_rng(0).permutation(N) + 100 * np.random.default_rng(e).random(N)).tolist())), "nearly the order"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_of_shuffling_are_found(name: str) -> None:
    make, words = FAULTS[name]
    diagnosis = said(make())
    finding = diagnosis["data.weak_shuffle"]
    assert finding.status == "warn"
    assert re.search(words, finding.summary)
    assert finding.value is not None
    assert finding.threshold is not None
    assert finding.value < finding.threshold
    assert diagnosis["data.unshuffled"].status == "ok"


def test_the_size_of_a_shuffle_buffer_is_told() -> None:
    from workbench.topics.data.order import index_order

    rng = np.random.default_rng(0)
    held, out = list(range(50)), []
    for index in range(50, 5000):
        place = int(rng.integers(50))
        out.append(held[place])
        held[place] = index
    assert index_order(np.array(out + held))["buffer"] == pytest.approx(50, rel=0.1)


def test_observing_leaves_no_trace() -> None:
    generator = torch.Generator().manual_seed(7)
    loader = shuffled(generator=generator)
    torch.manual_seed(5)
    before, own = torch.get_rng_state(), generator.get_state()
    said(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)
    again = shuffled(generator=torch.Generator().manual_seed(7))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(loader, again, strict=True))
