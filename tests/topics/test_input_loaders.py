"""Loaders as people write them, and made again with something changed: the same batches, nothing said of them that is not so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

import workbench as wb
from tests.helpers.input_loaders import Items, Stream, TrainStep, loader
from workbench.errors import ConfigError
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.input.loaders import batches_of, closed, timed_loader
from workbench.topics.input.timed_loop import LOADING, STEP
from workbench.topics.input.variants import Dropping, compare_storage
from workbench.workloads.items import content_hash

QUICK: dict[str, Any] = {"seconds": 0.6, "max_workers": 0}
X, Y = torch.randn(96, 16, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 4
DATA = TensorDataset(X, Y)
MODEL = nn.Linear(16, 4)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.01)


def update(x: Any, y: Any) -> None:
    OPTIMIZER.zero_grad()
    nn.functional.cross_entropy(MODEL(x), y).backward()
    OPTIMIZER.step()


def pair(batch: Any) -> None:
    update(*batch)


def named(batch: Any) -> None:
    update(batch["x"], batch["y"])


def taking(batch: Any) -> None:
    """As in many a Hugging Face loop: the labels leave the batch before the model gets it."""
    labels = batch.pop("y")
    update(y=labels, **batch)


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "y": Y[index]}


class Keyed(Dataset[Any]):
    """Items by name, as in a key-value store."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, key: str) -> Any:
        return X[int(key.removeprefix("k"))], Y[0]


class Sized(Dataset[Any]):
    """An index is an example and its size; and there is no length."""

    def __getitem__(self, index: Any) -> Any:
        place, scale = index
        return X[place] * scale, Y[place]


class Batches:
    """A batch sampler of `order`, a new order of the 96 rows, with what its `__len__` says, and `make`, an index of a number."""

    def __init__(
        self, order: Callable[[], list[int]], *, says: int = 3, make: Callable[[int], Any] = lambda k: k
    ) -> None:
        self.order, self.says, self.make = order, says, make

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        rows = self.order()
        for first in range(0, len(rows), 32):
            yield [self.make(k) for k in rows[first : first + 32]]


def columns(items: Any) -> Any:
    return {name: torch.stack([item[name] for item in items]) for name in ("x", "y")}


class Table:
    """Columns as lists, and rows by a list of indices: a Hugging Face dataset from outside."""

    def __init__(self) -> None:
        self.columns = {"x": X.tolist(), "y": Y.tolist()}

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def of_table(items: Any) -> Any:
    return {name: torch.tensor([item[name] for item in items]) for name in ("x", "y")}


class Shared(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        for index in range(0 if info is None else info.id, 96, 1 if info is None else info.num_workers):
            yield X[index], Y[index]


def generated() -> Iterator[Any]:
    for first in range(0, 96, 32):
        yield X[first : first + 32], Y[first : first + 32]


class Renaming(DataLoader[Any]):
    """A loader of somebody's own, which iterates in its own way."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield {"x": x, "y": y}


numbers = np.random.default_rng(0)  # of a sampler that goes on from epoch to epoch
ORDINARY: dict[str, tuple[Callable[[], Any], Any]] = {
    "tensors": (lambda: DataLoader(DATA, batch_size=32, shuffle=True), pair),
    "dicts": (lambda: DataLoader(Named(), batch_size=32, shuffle=True), named),
    "labels that are taken out": (lambda: DataLoader(Named(), batch_size=32), taking),
    "own collate": (lambda: DataLoader(Named(), batch_size=32, collate_fn=columns), named),
    "a table": (lambda: DataLoader(Table(), batch_size=32, collate_fn=of_table, shuffle=True), named),  # type: ignore[arg-type]
    "a stream": (lambda: DataLoader(Shared(), batch_size=32), pair),
    "subset of two": (lambda: DataLoader(Subset(ConcatDataset([DATA, DATA]), range(50, 130)), batch_size=32), pair),
    "a batch sampler of one's own": (lambda: DataLoader(DATA, batch_sampler=Batches(lambda: list(range(96)))), pair),
    "a sampler with a generator": (
        lambda: DataLoader(DATA, batch_sampler=Batches(lambda: numbers.permutation(96).tolist())), pair
    ),
    "keys": (lambda: DataLoader(Keyed(), batch_sampler=Batches(lambda: list(range(96)), make=lambda k: f"k{k}")), pair),
    "pairs as indices, no length": (
        lambda: DataLoader(Sized(), batch_sampler=Batches(lambda: list(range(96)), make=lambda k: (k, 2.0))), pair
    ),
    "whole batches": (lambda: DataLoader(TensorDataset(X.view(3, 32, 16), Y.view(3, 32)), batch_size=None), pair),
    "a subclass": (lambda: Renaming(DATA, batch_size=32), named),
    "a generator function": (lambda: generated, pair),
    "a generator": (generated, pair),
}  # fmt: skip
"""An epoch has fewer batches than a round has at least: it comes to its end however busy the machine is."""


def said(loader: Any, step: Any = pair, **options: Any) -> Diagnosis:
    return wb.input.diagnose(wb.input.audit(loader, step, **(QUICK | options)))


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_loader_is_not_accused(name: str) -> None:
    make, step = ORDINARY[name]
    found = said(make(), step)
    accused = [f for f in found if f.code != "input.bound" and f.status in ("warn", "fail")]
    assert not accused, accused
    assert found["input.example_count"].status == "ok"
    unjudged = {f.code for f in found if f.status == "not_measured"}
    assert unjudged <= ({"data.worker_rng"} if name == "a stream" else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keys", "whole batches", "a sampler with a generator"])
def test_nor_is_it_with_workers(name: str) -> None:
    made, step = ORDINARY[name]
    plain = made()
    settings = {"collate_fn": plain.collate_fn, "num_workers": 2, "persistent_workers": True}
    batches = {"batch_size": None} if plain.batch_sampler is None else {"batch_sampler": plain.batch_sampler}
    found = said(DataLoader(plain.dataset, **settings, **batches), step, max_workers=1, seconds=5.0)
    accused = [f for f in found if f.code != "input.bound" and f.status != "ok"]
    assert not accused, accused


def test_a_sampler_whose_length_lies() -> None:
    sampler = Batches(lambda: list(range(96)), says=4)
    finding = said(DataLoader(DATA, batch_sampler=sampler))["input.example_count"]
    assert finding.status == "warn"
    assert "The sampler (Batches) says that an epoch has 4 batches, and it gives 3." in finding.summary


ROWS = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))


def hashes(made: Any, *, timed: bool = True) -> list[str]:
    with closed(made):
        return [content_hash(batch.data if timed else batch) for batch in batches_of(made, timeout_s=20)]


def seeded(**settings: Any) -> DataLoader[Any]:
    return DataLoader(ROWS, **({"batch_size": 6} | settings))


MADE = {
    "in order": seeded,
    "shuffled": lambda: seeded(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "dropping": lambda: seeded(drop_last=True),
    "a batch sampler": lambda: DataLoader(
        ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS, generator=torch.Generator().manual_seed(1)), 7, False)
    ),
    "no batching": lambda: DataLoader(ROWS, batch_size=None),
    "own collate": lambda: seeded(collate_fn=lambda items: {"x": torch.stack([x for x, _ in items])}),
    "a stream": lambda: DataLoader(Stream(20), batch_size=6, drop_last=True),
    "a stream of batches": lambda: DataLoader(Stream(5), batch_size=None),
}


@pytest.mark.parametrize("name", MADE)
def test_a_timed_loader_gives_the_batches_of_the_loader_it_was_made_from(name: str) -> None:
    plain = hashes(MADE[name](), timed=False)
    assert plain
    assert hashes(timed_loader(MADE[name]())) == plain


class Part(Dataset[Any]):
    part = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * self.part + index


def number_part(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.part = info.dataset.part + 1 + worker


def test_a_worker_init_function_reaches_the_dataset_itself() -> None:
    own = DataLoader(Part(), num_workers=1, worker_init_fn=number_part)
    with closed(timed_loader(own)) as made:
        assert [int(batch.data) for batch in batches_of(made, timeout_s=20)] == [10, 11, 12, 13]


class Slow(Stream):
    def __iter__(self) -> Any:
        for index in range(24):
            time.sleep(0.001)
            yield float(index), 0


def test_each_batch_of_a_stream_is_timed_by_itself_and_features_are_left_out() -> None:
    began = time.perf_counter()
    made = [batch.items.wall_s for batch in batches_of(timed_loader(DataLoader(Slow(24), batch_size=4)), timeout_s=20)]
    assert (len(made), min(made) > 0.004, sum(made) < time.perf_counter() - began) == (6, True, True)
    assert Dropping(list, ["meta/file"])([{"x": 1, "meta": {"file": "a", "n": 2}}]) == [{"x": 1, "meta": {"n": 2}}]


def test_a_trace_has_spans_for_loading_and_for_the_step(tmp_path: Path) -> None:
    found = wb.input.audit(
        loader(Items(40, sleep_s=0.002)),
        TrainStep(0.004),
        seconds=0.5,
        max_workers=0,
        trace=tmp_path / "deep" / "t.json",
    )
    events = json.loads((tmp_path / "deep" / "t.json").read_text())["traceEvents"]
    spans = {name: sorted((e["ts"], e["dur"]) for e in events if e.get("name") == name and e.get("ph") == "X") for name in (LOADING, STEP)}  # fmt: skip
    steps = found.facts["input_pipeline"]["trace"]["steps"]
    assert len(spans[STEP]) == steps == 5
    assert min(duration for _, duration in spans[STEP]) > 4000  # microseconds
    assert min(duration for _, duration in spans[LOADING][:steps]) > 16000
    for (start, duration), (began, _) in zip(spans[LOADING], spans[STEP], strict=False):
        assert start + duration <= began


def test_compressed_files_are_smaller_and_take_more_work_to_read(tmp_path: Path) -> None:
    rows = torch.randint(0, 16, (60, 40_000), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    table = compare_storage(TensorDataset(rows), tmp_path, examples=300).set_index("storage")
    assert table["files"].to_dict() == {"plain": 2, "compressed": 2}
    assert table.loc["plain", "bytes_per_example"] == pytest.approx(40_000, rel=0.01)
    assert table.loc["compressed", "bytes_per_example"] < 0.7 * table.loc["plain", "bytes_per_example"]
    assert table.loc["compressed", "examples_per_s"] < table.loc["plain", "examples_per_s"]
    with pytest.raises(ConfigError, match="examples=0"):
        compare_storage(ROWS, tmp_path, examples=0)
