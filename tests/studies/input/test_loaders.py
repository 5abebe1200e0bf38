"""Loaders made like somebody's own: the same batches in the same order, whatever is changed; traces; storage formats."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, get_worker_info

import workbench as wb
from tests.helpers.input_loaders import Items, Stream, TrainStep, loader
from workbench.errors import ConfigError
from workbench.topics.data.order import untouched
from workbench.topics.input.audit import LOADING, STEP, audit_input
from workbench.topics.input.loaders import batches_of, closed, timed_loader
from workbench.topics.input.storage import STORAGES, compare_storage
from workbench.topics.input.variants import Dropping, null_transform
from workbench.workloads.items import content_hash

DATA = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))


def hashes(made: Any, *, timed: bool = True) -> list[str]:
    with closed(made):
        return [content_hash(batch.data if timed else batch) for batch in batches_of(made, timeout_s=20)]


def seeded(**settings: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **({"batch_size": 6} | settings))


OWN = {
    "in order": seeded,
    "shuffled": lambda: seeded(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "dropping": lambda: seeded(drop_last=True),
    "a batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=torch.Generator().manual_seed(1)), 7, False)
    ),
    "no batching": lambda: DataLoader(DATA, batch_size=None),
    "own collate": lambda: seeded(collate_fn=lambda items: {"x": torch.stack([x for x, _ in items])}),
    "a stream": lambda: DataLoader(Stream(20), batch_size=6, drop_last=True),
    "a stream of batches": lambda: DataLoader(Stream(5), batch_size=None),
}


@pytest.mark.parametrize("name", OWN)
def test_a_timed_loader_gives_the_batches_of_the_loader_it_was_made_from(name: str) -> None:
    plain = hashes(OWN[name](), timed=False)
    assert plain
    assert hashes(timed_loader(OWN[name]())) == plain


@pytest.mark.parametrize("prefetch", [1, 2])
def test_prefetching_keeps_the_order(prefetch: int) -> None:
    off = hashes(timed_loader(OWN["shuffled"]()))
    own = seeded(shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=1, prefetch_factor=prefetch)
    assert hashes(timed_loader(own)) == off


@pytest.mark.parametrize("workers", [1, 3])
def test_every_number_of_workers_gives_the_same_multiset_of_examples(workers: int) -> None:
    def examples(count: int) -> Counter[int]:
        own = OWN["shuffled"]()
        with untouched(own), closed(timed_loader(own, num_workers=count)) as made:
            return Counter(int(i) for batch in batches_of(made, timeout_s=20) for i in batch.data[1])

    assert examples(workers) == examples(0) == Counter(range(20))


def test_each_batch_of_a_stream_is_timed_by_itself() -> None:
    def slow(index: int) -> tuple[float, int]:
        time.sleep(0.001)
        return float(index), 0

    class Slow(Stream):
        def __iter__(self) -> Any:
            return map(slow, range(24))

    start = time.perf_counter()
    made = [batch.items.wall_s for batch in batches_of(timed_loader(DataLoader(Slow(24), batch_size=4)), timeout_s=20)]
    took = time.perf_counter() - start
    assert len(made) == 6
    assert min(made) > 0.004
    assert sum(made) < took


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


def test_dropping_and_null_transforms() -> None:
    keep = Dropping(list, ["meta/file"])
    assert keep([{"x": 1, "meta": {"file": "a", "n": 2}}]) == [{"x": 1, "meta": {"n": 2}}]

    class Transformed(Part):
        def __init__(self) -> None:
            self.transform = torch.nn.Identity()

    data = Transformed()
    plain, names = null_transform(data)
    assert names == ["transform=Identity"]
    assert plain.transform(7) == 7
    assert isinstance(data.transform, torch.nn.Identity)
    assert null_transform(Part()) == (None, [])


def test_a_trace_has_spans_for_loading_and_for_the_step(tmp_path: Path) -> None:
    found = audit_input(
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
    table = compare_storage(TensorDataset(rows), tmp_path, examples=120, shard_examples=40, repeats=3).set_index(
        "storage"
    )
    assert tuple(table.index) == STORAGES
    assert (table["files"] == 3).all()
    assert table.loc["npy", "bytes"] == pytest.approx(120 * 40_000, rel=0.01)
    assert table.loc["npz_compressed", "bytes"] < 0.7 * table.loc["npz", "bytes"]
    assert table.loc["npz_compressed", "cpu_us_per_example"] > table.loc["npz", "cpu_us_per_example"]
    assert (table["examples_per_s"] > 0).all()
    with pytest.raises(ConfigError, match="repeats=0"):
        compare_storage(DATA, tmp_path, repeats=0)


def test_stored_preprocessing_gives_the_same_batches_and_waits_less(tmp_path: Path) -> None:
    online = wb.Delayed(DATA, 0.002)
    stored = wb.cache_dataset(online, tmp_path / "stored")
    own = [
        DataLoader(d, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9)) for d in (online, stored)
    ]
    one, other = (hashes(each, timed=False) for each in own)
    assert one == other
    shares = [
        audit_input(each, 0.01, seconds=1.0, max_workers=0).facts["input_pipeline"]["rounds"][-1]["wait_s"]
        for each in own
    ]
    assert shares[1] < 0.5 * shares[0]
