"""In which order examples come: planted faults, healthy loaders, and no trace left in random state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (  # fmt: skip
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

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


def shuffled(data: Any = SORTED, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=32, shuffle=True, **options)


HEALTHY: dict[str, Any] = {
    "shuffle=True": shuffled,
    "a batch sampler": lambda: DataLoader(
        SORTED, batch_sampler=BatchSampler(RandomSampler(SORTED), 32, drop_last=True)
    ),
    "weighted": lambda: DataLoader(SORTED, sampler=WeightedRandomSampler((1 + SORTED.tensors[1]).tolist(), N)),
    "drifting classes": lambda: shuffled(TensorDataset(X, DRIFTING)),
    "a stream with a large buffer": lambda: Stream(SORTED, buffer=N),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_loaders_are_silent(name: str) -> None:
    diagnosis = said(HEALTHY[name]())
    assert diagnosis["data.unshuffled"].status == "ok"
    assert diagnosis["data.weak_shuffle"].status == "ok", diagnosis["data.weak_shuffle"].summary


DRIFTING = torch.from_numpy((np.random.default_rng(0).random(N) < np.linspace(0.2, 0.8, N)).astype(np.int64))


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (DataLoader(SORTED, batch_size=32), "fail", "sorted by class"),
        (Stream(SORTED), "fail", "sorted by class"),
        (DataLoader(TensorDataset(X, DRIFTING), batch_size=32), "fail", "their labels follow it"),
        (DataLoader(TensorDataset(X, torch.randn(N).sort().values)), "fail", "sorted by class"),
        (DataLoader(STORED, batch_size=32), "warn", "time or source"),
        (DataLoader(TensorDataset(X[:5], SORTED.tensors[1][::200])), "not_measured", "5 examples are too few"),
    ],
)
def test_what_is_not_shuffled(data: Any, status: str, words: str) -> None:
    diagnosis = said(data)
    finding = diagnosis["data.unshuffled"]
    assert (finding.status, words in finding.summary) == (status, True), finding.summary
    assert diagnosis["data.weak_shuffle"].status != "ok"


FAULTS: dict[str, Any] = {
    "same order": (lambda: DataLoader(SORTED, sampler=Listed(lambda e: torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist())), "same order"),
    "small buffer of indices": (lambda: DataLoader(STORED, sampler=Listed(lambda e: np.argsort(np.arange(N) + 40 * np.random.default_rng(e).random(N)).tolist())), "shuffle buffer of about (1[0-9]|2[0-9]) of 1,000"),
    "blocks": (lambda: DataLoader(STORED, sampler=Listed(blocks)), "blocks are shuffled"),
    "buffer over sorted stream": (lambda: Stream(SORTED, buffer=100), "clumps|mix of classes"),
    "hardly another order": (lambda: DataLoader(STORED, sampler=Listed(lambda e: np.argsort(np.random.default_rng(0).permutation(N) + 100 * np.random.default_rng(e).random(N)).tolist())), "nearly the order"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_of_shuffling_are_found(name: str) -> None:
    make, words = FAULTS[name]
    diagnosis = said(make())
    finding = diagnosis["data.weak_shuffle"]
    assert finding.status == "warn"
    assert re.search(words, finding.summary)
    assert (finding.value or 0.0) < finding.threshold
    assert diagnosis["data.unshuffled"].status == "ok"


@pytest.mark.parametrize(("order", "displacement", "successions"), [(range(N), 0.0, N - 1), (range(N)[::-1], 1.5, 0)])
def test_the_distance_from_storage_in_closed_form(order: range, displacement: float, successions: int) -> None:
    found = wb.data.audit(DataLoader(STORED, sampler=Listed(lambda _: list(order)))).facts["data"]["order"]["indices"]
    assert (found["displacement"], found["successions"]) == (pytest.approx(displacement, abs=1e-5), successions)


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
