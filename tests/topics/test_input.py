"""Planted loaders are named right and their healthy twins raise no alarm; what is tried gains what was predicted."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import workbench as wb
from tests.helpers.input_loaders import AheadDevice, Items, SlowCollate, Stream, TrainStep, loader
from workbench.errors import ConfigError, DataError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.json_values import dumps
from workbench.topics.input.diagnose import CODES
from workbench.topics.input.loaders import Spent
from workbench.topics.input.variants import drain, stream_epochs
from workbench.train.rng import capture_rng

QUICK: dict[str, Any] = {"seconds": 6.0, "max_workers": 2}


def said(*given: Any, **options: Any) -> Diagnosis:
    audit = wb.input.audit(*given, **(QUICK | options))
    dumps(audit.facts)
    diagnosis = wb.input.diagnose(audit)
    assert [f.code for f in diagnosis] == list(CODES)
    return diagnosis


def holds(diagnosis: Diagnosis, cause: str, *changes: str) -> dict[str, Any]:
    """Input-bound, by this cause, with a gain of the size that was predicted; how close is `benchmarks/input_causes.py`'s to show."""
    bound = diagnosis["input.bound"]
    assert (bound.status, bound.evidence["cause"]) == ("warn", cause), bound
    fix = dict(bound.evidence["fix"])
    assert fix["change"] in changes
    assert fix["measured"] > 1.15
    return fix


def test_latency_is_named_with_its_reader() -> None:
    diagnosis = said(loader(Items(sleep_s=0.003)), TrainStep(0.02), seconds=3.0)
    fix = holds(diagnosis, "latency", "workers", "cache")
    assert 0.5 < fix["predicted"] / fix["measured"] < 2, "other processes may take the cores in one of the two"
    bound = diagnosis["input.bound"]
    assert bound.value == pytest.approx(24 / 44, abs=0.12)  # 8 items of 3 ms beside a step of 20 ms
    assert "Items.__getitem__" in bound.summary
    assert {f.status for f in diagnosis if f.code != "input.bound"} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "step_s", "options", "cause", "changes"),
    [
        (loader(Items(work_s=0.003)), 0.01, {}, "preprocessing", ["workers", "cache"]),
        (loader(Items(), collate_fn=SlowCollate(0.03)), 0.02, {}, "collate", ["workers"]),
        (loader(Items(40), collate_fn=SlowCollate(0.008), num_workers=2, persistent_workers=False), 0.01, {}, "worker_restart", ["persistent"]),
        (loader(Items(sleep_s=0.016), num_workers=1, batch_size=2), 0.02, {"max_workers": 4}, "too_few_workers", ["workers"]),
    ],
)  # fmt: skip
def test_planted_causes_are_named(own: Any, step_s: float, options: Any, cause: str, changes: list[str]) -> None:
    holds(said(own, TrainStep(step_s), **options), cause, *changes)


@pytest.mark.slow
def test_features_that_nobody_reads_are_named_and_dropped() -> None:
    diagnosis = said(loader(Items(extra=500_000), batch_size=16), TrainStep(0.002), max_workers=0)
    holds(diagnosis, "unused_features", "drop")
    unused = diagnosis["input.unused_features"]
    assert (unused.status, unused.evidence["unread"]) == ("warn", {"extra": 16 * 4 * 500_000})
    stages, read = unused.evidence["bytes_per_example"], 16 * 4 + 8
    assert stages == {"item": read + 4 * 500_000, "batch": read + 4 * 500_000, "moved": read, "read": read}


@pytest.fixture
def exact_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a sleep in this process move the clock by its length to the microsecond, whatever else the machine does."""
    slept, sleep, clock = [0.0], time.sleep, time.perf_counter

    def exact(seconds: float) -> None:
        sleep(0)
        slept[0] += seconds

    monkeypatch.setattr(time, "sleep", exact)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + slept[0])


@pytest.mark.usefixtures("exact_sleep")
def test_a_fetch_in_each_step_keeps_loading_from_running_ahead() -> None:
    device = AheadDevice(0.02, fetch_every=1)
    diagnosis = said(loader(Items(sleep_s=0.002)), device, synchronize=device.wait, max_workers=0, seconds=60.0)
    fix = holds(diagnosis, "sync", "no_sync")
    assert fix["measured"] == pytest.approx(36 / 20, rel=0.2)  # 16 + 20 ms one after the other, 20 at once
    syncs = diagnosis["input.sync_every_step"]
    assert (syncs.status, syncs.value) == ("warn", 1.0)
    assert next(iter(syncs.evidence["places"])).startswith("input_loaders.py:")


def test_streams_whose_length_lies() -> None:
    for gives, says, status in ((40, 400, "warn"), (40, 16, "warn"), (40, 40, "ok")):
        own = loader(Stream(gives, says=says), batch_size=16)  # an epoch that ends, however little time there is
        found = said(own, 0.001, seconds=1.0, max_workers=0)["input.example_count"]
        assert found.status == status
        assert (f"{says} examples, and an epoch gives {gives}" in found.summary) is (status == "warn")


class At20(Items):
    """Items of which one is of no use, and a length that may be more than there are."""

    def __init__(self, fault: Any = None, *, says: int = 400) -> None:
        super().__init__(40 if says == 50 else 400)
        self.fault, self.says = fault, says

    def __len__(self) -> int:
        return self.says

    def __getitem__(self, index: int) -> Any:
        if index == 20 and self.fault is not None:
            self.fault()
        return super().__getitem__(index)


def raises() -> None:
    raise ValueError("no such file")


def hangs() -> None:
    time.sleep(60)


def refuse(items: Any) -> Any:
    raise RuntimeError(f"{len(items)} images of different sizes")


def wrong(batch: Any) -> None:
    torch.nn.functional.linear(batch[0], torch.ones(4, 3))


@pytest.mark.parametrize(
    ("given", "options", "kind", "words"),
    [
        (Items(), {}, UsageError, "is a dataset .*DataLoader"),
        (3, {}, UsageError, "must be a DataLoader"),
        (loader(Items()), {"step": "train"}, UsageError, "must be a function"),
        (loader(Items()), {"step": -1.0}, ConfigError, "step=-1.0"),
        (loader(Items()), {"seconds": 0.0}, ConfigError, "seconds=0.0"),
        (loader(Items()), {"timeout_s": float("nan")}, ConfigError, "timeout_s=nan"),
        (loader(Items()), {"max_workers": -1}, ConfigError, "max_workers=-1"),
        (loader(Items()), {"trace": "trace.txt"}, UsageError, "must end in .json"),
        (loader(Items(4), drop_last=True), {}, DataError, "gives no batch.*says it has 4 examples.*drop_last=True"),
        (loader(Stream(0)), {}, DataError, "gives no batch.*Stream"),
        (iter([]), {}, DataError, "gives no batch"),
        (DataLoader(TensorDataset(torch.zeros(0, 2))), {}, DataError, r"its dataset TensorDataset has 0 examples\.$"),
        (loader(At20(says=50)), {}, DataError, r"item \d+ of the loader's dataset .*loader\.dataset\[\d+\]"),
        (loader(At20(raises)), {}, DataError, r"item 20 of .*ValueError: no such file.*loader.dataset\[20\]\.$"),
        (loader(At20(raises), num_workers=1), {}, DataError, r"item 20 of .*no such file.*loader.dataset\[20\]\.$"),
        (loader(Items(), collate_fn=refuse, num_workers=1), {}, DataError, "process of the loader raised: RuntimeError: 8 images"),
        (loader(At20(hangs)), {"timeout_s": 0.4}, DataError, r"no batch for 0.4 s, which is the time limit.*hangs \(test_input\.py"),
        (loader(At20(hangs), num_workers=1), {"timeout_s": 0.4}, DataError, "no batch for 0.4 s.*worker processes"),
        (loader(Items()), {"step": wrong}, UsageError,
         rf"^your step raised RuntimeError: .* \(test_input.py, line {wrong.__code__.co_firstlineno + 1}: .*\), on a batch that is \(Tensor\[8, 16\], Tensor\[8\]\)\.$"),
    ],
)  # fmt: skip
def test_what_cannot_be_timed_is_refused_in_a_persons_own_words(
    given: Any, options: Any, kind: type, words: str
) -> None:
    start = time.perf_counter()
    with pytest.raises(kind, match=words) as caught:
        wb.input.audit(given, **({"seconds": 0.5, "max_workers": 0} | options))
    assert len(str(caught.value)) < 350
    assert time.perf_counter() - start < 10


def test_random_state_of_caller_and_loader_is_put_back() -> None:
    own = torch.Generator().manual_seed(5)
    training = loader(Items(64), shuffle=True, generator=own)
    before, mine = capture_rng(), own.get_state()
    said(training, 0.001, seconds=0.5, max_workers=1)
    after = capture_rng()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(mine, own.get_state())


ROOT = Path(__file__).parents[2]


class Endless(IterableDataset[Any]):
    """A stream without an end, which may share its examples out, or give one and the same."""

    def __init__(self, *, shared: bool = False, constant: bool = False) -> None:
        self.shared, self.constant = shared, constant

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, every = (0, 1) if info is None or not self.shared else (info.id, info.num_workers)
        for index in itertools.count(first, every):
            time.sleep(0.001)
            yield torch.full((2,), 0.0 if self.constant else float(index))


def counted(data: Any, *, seconds: float = 0.1) -> dict[str, Any] | None:
    return stream_epochs(DataLoader(data, batch_size=4), seconds=seconds, timeout_s=30)


def test_workers_of_an_unshared_stream_are_seen_to_begin_alike() -> None:
    found = counted(Endless())
    assert found is not None
    assert (found["same"], found["with_workers"], found["workers"]) == (False, None, 2)
    assert found["alike"] >= 2
    assert counted(Endless(shared=True)) is None, "nobody can tell whether that is all of it"
    assert counted(Endless(constant=True)) is None, "equal examples are no repeated ones"


def test_a_stream_that_ends_is_counted() -> None:
    one, two = (counted(Stream(8, shared=shared), seconds=20.0) for shared in (True, False))
    assert one is not None
    assert two is not None
    assert (one["same"], one["with_workers"]) == (True, 8)
    assert (two["same"], two["with_workers"]) == (False, 16)


def test_a_thread_that_never_slept_was_not_waiting_for_a_disk() -> None:
    stolen, slept, unknown = (Spent(1.0, 0.4, 0.1, sleeps) for sleeps in (0.0, 2.0, math.nan))
    assert (stolen.blocked_s, stolen.others_s) == pytest.approx((0, 0.6))
    assert (slept.blocked_s, slept.others_s) == pytest.approx((0.5, 0.1))
    assert (unknown.blocked_s, unknown.others_s) == pytest.approx((0.5, 0.1))


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, workbench as wb\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "own = DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=4, num_workers=1, multiprocessing_context='spawn')\n"
        "wb.input.audit(own, 0.01, seconds=0.5, max_workers=1)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )  # fmt: skip
    assert ran.returncode
    last = ran.stderr.strip().splitlines()[-1]
    assert 'if __name__ == "__main__"' in last
    assert "'spawn'" in last


def test_a_drain_leaves_out_the_first_batch_and_epochs_follow_without_a_gap() -> None:
    row, indices = drain(loader(Items(80, first_s=0.5)), {"workers": 0}, None, seconds=0.1, timeout_s=9.0)
    assert row["batch_s"] < 0.05
    assert list(indices[0]) == list(range(8))
