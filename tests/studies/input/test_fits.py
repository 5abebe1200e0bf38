"""What is looked at before a change is promised: shared streams, items that repeat; and what a person's own code raises."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from tests.helpers.input_loaders import Items, Stream, TrainStep, loader
from workbench.errors import DataError, UsageError
from workbench.topics.input.audit import audit_input
from workbench.topics.input.loaders import Spent, now
from workbench.topics.input.variants import cached_items, items_repeat, stream_epochs

ROOT = Path(__file__).parents[3]


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


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((16,), float(index)) + torch.rand(()), index % 4


@pytest.mark.parametrize(
    ("data", "repeat"), [(Items(40), True), (Noisy(), False), (Stream(20), None)], ids=["same", "random", "stream"]
)
def test_items_are_asked_for_twice(data: Any, repeat: bool | None) -> None:
    own = loader(data, shuffle=None if repeat is None else True)
    assert items_repeat(data, cached_items(own, seconds=1.0), seconds=1.0) is repeat


def test_an_audit_says_whether_items_repeat() -> None:
    facts = audit_input(loader(Noisy(), shuffle=True), TrainStep(), seconds=0.4, max_workers=0).facts["input_pipeline"]
    assert facts["items_repeat"] is False


def test_more_workers_are_tried_until_as_many_as_there_are() -> None:
    own = loader(Items(80), num_workers=2)
    facts = audit_input(own, 0.05, seconds=0.4, max_workers=4).facts["input_pipeline"]
    assert [r["workers"] for r in facts["variants"] if r["change"] == "workers"][:2] == [1, 2]


def test_a_thread_that_never_slept_was_not_waiting_for_a_disk() -> None:
    stolen, slept, unknown = (Spent(1.0, 0.4, 0.1, sleeps) for sleeps in (0.0, 2.0, math.nan))
    assert (stolen.blocked_s, stolen.others_s) == pytest.approx((0, 0.6))
    assert (slept.blocked_s, slept.others_s) == pytest.approx((0.5, 0.1))
    assert (unknown.blocked_s, unknown.others_s) == pytest.approx((0.5, 0.1))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count sleeps of a thread")
def test_sleeping_is_counted_and_computing_is_not() -> None:
    began = now()
    time.sleep(0.002)
    assert now().since(began).sleeps >= 1
    free = 0.0
    for _ in range(50):  # a busy machine makes a thread sleep now and then
        began = now()
        sum(range(1000))
        free += now().since(began).sleeps == 0
    assert free > 25


def wrong(batch: Any) -> None:
    torch.nn.functional.linear(batch, torch.ones(4, 16))


def test_a_step_that_raises_is_told_with_its_line_and_its_batch() -> None:
    data = TensorDataset(torch.randn(16, 16), torch.zeros(16))
    with pytest.raises(UsageError) as caught:
        audit_input(loader(data), wrong, seconds=0.4, max_workers=0)
    said = str(caught.value)
    line = wrong.__code__.co_firstlineno + 1
    assert said.startswith(
        f"your step raised TypeError in wrong (test_fits.py:{line}) on a batch that is a list of [Tensor, Tensor]: "
    )
    assert len(said) < 320
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_empty_dataset_and_a_length_that_lies_are_told_in_the_words_of_a_loader() -> None:
    with pytest.raises(DataError, match=r"its dataset TensorDataset has 0 examples\.$"):
        audit_input(DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=4), TrainStep(), seconds=0.4)

    class Lies(Items):
        def __len__(self) -> int:
            return 50

    with pytest.raises(DataError, match=r"item \d+ of the loader's dataset .*loader\.dataset\[\d+\]"):
        audit_input(loader(Lies(40)), TrainStep(), seconds=0.4, max_workers=0)


def test_an_audit_within_the_import_of_a_worker_names_the_main_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match='if __name__ == "__main__"'):
        audit_input(loader(Items(40)))


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, workbench as wb\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "own = DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=4, num_workers=1, multiprocessing_context='spawn')\n"
        "wb.audit_input(own, 0.01, seconds=0.5, max_workers=1)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )  # fmt: skip
    assert ran.returncode
    last = ran.stderr.strip().splitlines()[-1]
    assert 'if __name__ == "__main__"' in last
    assert "'spawn'" in last
