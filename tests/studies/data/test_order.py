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

from workbench.findings.diagnosis import Diagnosis
from workbench.topics.data.collect import audit_data
from workbench.topics.data.diagnose import diagnose_data

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
    return diagnose_data(audit_data(data))


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
    "balanced batches": lambda: DataLoader(STORED, sampler=Listed(balanced)),
    "a stream with a large buffer": lambda: Stream(SORTED, buffer=N),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_loaders_are_silent(name: str) -> None:
    diagnosis = said(HEALTHY[name]())
    assert diagnosis["data.unshuffled"].status == "ok"
    assert diagnosis["data.weak_shuffle"].status == "ok", diagnosis["data.weak_shuffle"].summary


def test_false_alarms_of_a_hundred_shuffled_loaders() -> None:
    torch.manual_seed(0)
    alarms = 0
    for _ in range(100):
        loader = DataLoader(SORTED, batch_size=32, shuffle=True)
        diagnosis = diagnose_data(audit_data(loader, max_examples=300))
        alarms += any(diagnosis[code].status != "ok" for code in ("data.unshuffled", "data.weak_shuffle"))
    assert alarms == 0


@pytest.mark.parametrize("data", [DataLoader(SORTED, batch_size=32), Stream(SORTED), DataLoader(Stream(SORTED), batch_size=32)])  # fmt: skip
def test_sorted_by_class_and_not_shuffled(data: Any) -> None:
    diagnosis = said(data)
    finding = diagnosis["data.unshuffled"]
    assert finding.status == "fail"
    assert "sorted by class" in finding.summary
    assert finding.advice
    assert diagnosis["data.weak_shuffle"].status == "not_measured"


def test_classes_that_drift_with_the_place_and_are_not_shuffled() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(N) < np.linspace(0.2, 0.8, N)).astype(np.int64)
    data = TensorDataset(X, torch.from_numpy(labels))
    finding = said(DataLoader(data, batch_size=32))["data.unshuffled"]
    assert finding.status == "fail"
    assert "their labels follow it" in finding.summary
    assert said(shuffled(data))["data.weak_shuffle"].status == "ok"


def test_numbers_sorted_by_size_and_not_shuffled() -> None:
    data = TensorDataset(X, torch.randn(N).sort().values)
    assert said(DataLoader(data))["data.unshuffled"].status == "fail"
    assert said(shuffled(data))["data.unshuffled"].status == "ok"


def test_stored_in_no_order_and_not_shuffled() -> None:
    diagnosis = said(DataLoader(STORED, batch_size=32))
    assert diagnosis["data.unshuffled"].status == "warn"
    assert "time or source" in diagnosis["data.unshuffled"].summary
    bare = said(DataLoader(TensorDataset(X)))
    assert bare["data.unshuffled"].status == "warn"
    assert "labels are unknown" in bare["data.unshuffled"].summary


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


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_examples_in_order_are_not_called_shuffled(count: int) -> None:
    diagnosis = said(DataLoader(TensorDataset(X[:count], SORTED.tensors[1][:: N // count][:count])))
    assert diagnosis["data.unshuffled"].status == "not_measured"
    assert f"{count} examples are too few" in diagnosis["data.unshuffled"].summary
    assert diagnosis["data.weak_shuffle"].status != "ok"


@pytest.mark.parametrize("count", [12, 30])
def test_a_dozen_examples_in_order_are_found(count: int) -> None:
    assert said(DataLoader(TensorDataset(X[:count], MIXED[:count])))["data.unshuffled"].status == "warn"


def test_one_example_and_one_class() -> None:
    assert said(DataLoader(TensorDataset(X[:1], MIXED[:1])))["data.unshuffled"].status == "not_measured"
    same = TensorDataset(X, torch.zeros(N, dtype=torch.int64))
    assert said(shuffled(same))["data.unshuffled"].status == "ok"
    assert said(DataLoader(same))["data.unshuffled"].status == "warn"
