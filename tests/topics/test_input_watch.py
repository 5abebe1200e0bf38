"""What a step reads of a batch, where it fetches numbers; the clock, the rounds of a loop, and the time limit."""

from __future__ import annotations

import math
import signal
import time
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench.topics.input.loaders import TimedOut, now, time_limit
from workbench.topics.input.timed_loop import Loop, as_round, run_loop
from workbench.topics.input.watch import count_syncs, observe_reads, stale_fetches

NET = nn.Linear(4, 2)
BATCH: dict[str, Any] = {
    "x": torch.randn(8, 4),
    "y": torch.randn(8, 2),
    "mask": torch.ones(8, 100),
    "file": ["a"] * 8,
    "n": 3,
}
Both = namedtuple("Both", ["x", "y"])


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    return ((NET(x) - y) ** 2).mean()


def moved(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("cpu", non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def by_keyword(x: Tensor, y: Tensor, **rest: Any) -> Tensor:
    return loss_of(x, y)


@pytest.mark.parametrize(
    ("batch", "step", "read", "unread"),
    [
        (BATCH, lambda b: loss_of(b["x"], b["y"]), {"x", "y"}, {"mask", "file", "n"}),
        (BATCH, lambda b: loss_of(moved(b)["x"].float(), moved(b)["y"]), {"x", "y"}, {"mask"}),
        (BATCH, lambda b: by_keyword(**b), {"x", "y", "file", "n"}, {"mask"}),
        (BATCH, lambda b: (b["mask"].shape, len(b["mask"]), loss_of(b["x"], b["y"])), {"x", "y"}, {"mask", "file", "n"}),
        (BATCH, lambda b: loss_of(b["x"], b.get("y") * b["n"]), {"x", "y", "n"}, {"mask", "file"}),
        ([BATCH["x"], BATCH["y"], BATCH["mask"]], lambda b: loss_of(*b[:2]), {"0", "1"}, {"2"}),
        ((BATCH["x"], {"y": BATCH["y"], "file": ["a"]}), lambda b: NET(b[0]).sum(), {"0"}, {"1/y", "1/file"}),
        (Both(BATCH["x"], BATCH["y"]), lambda b: NET(b.x).sum(), {"x"}, {"y"}),
        (BATCH, lambda b: loss_of(b["x"][:, :4], b["y"].detach().clone()), {"x", "y"}, {"mask", "file", "n"}),
    ],
)  # fmt: skip
def test_parts_that_are_read_and_parts_that_are_not(batch: Any, step: Any, read: set[str], unread: set[str]) -> None:
    found = observe_reads(batch, step)
    assert (set(found["read"]), set(found["unread"]), found["known"]) == (read, unread, True)


def test_moving_is_no_reading_bytes_are_counted_and_a_batch_is_given_on_unchanged() -> None:
    found = observe_reads(BATCH, lambda b: loss_of(moved(b)["x"], moved(b)["y"]))
    assert found["bytes"] == {"x": 128, "y": 64, "mask": 3200, "file": 8, "n": 8}
    assert (found["moved_bytes"], found["read_bytes"]) == (128 + 64 + 3200, 192)
    seen: list[Any] = []
    assert not observe_reads(BATCH, seen.append)["known"]
    assert isinstance(seen[0], dict)
    assert all(seen[0][k] is BATCH[k] for k in BATCH)


def trained(fetch: Any) -> Any:
    optimizer = torch.optim.Adam(NET.parameters())
    count = [0]

    def step(batch: Any) -> None:
        loss = loss_of(batch["x"], batch["y"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(NET.parameters(), 1.0)
        optimizer.step()
        fetch(loss.detach(), count[0])
        count[0] += 1

    return step


@pytest.mark.parametrize(
    ("fetch", "share", "per_step"),
    [
        (lambda loss, k: None, 0.0, 0.0),
        (lambda loss, k: (float(loss), f"{loss:.3f}", loss.tolist()), 1.0, 3.0),
        (lambda loss, k: loss.cpu().numpy(), 1.0, 2.0),
        (lambda loss, k: loss.item() if k % 10 == 0 else None, 0.1, 0.1),
        (lambda loss, k: BATCH["y"].tolist(), 0.0, 0.0),
        (lambda loss, k: (BATCH["mask"].sum(1).max() + 1).item(), 0.0, 0.0),  # the longest text of the batch
        (lambda loss, k: torch.add(BATCH["x"].max(), other=loss).item(), 1.0, 1.0),
    ],
)
def test_fetches_are_counted_with_their_place(fetch: Any, share: float, per_step: float) -> None:
    found = count_syncs([BATCH], trained(fetch), steps=20)
    assert (found["share"], found["per_step"]) == (share, per_step)
    assert all(place.startswith("test_input_watch.py:") for place in found["places"])
    assert bool(found["places"]) == (share > 0)


def test_stale_fetches_are_made_once() -> None:
    fetched: list[float] = []
    step = trained(lambda loss, k: fetched.append(loss.item()))
    with stale_fetches():
        for _ in range(3):
            step(BATCH)
    assert len(set(fetched)) == 1
    step(BATCH)
    assert fetched[-1] != fetched[0]


def test_the_clock_tells_waiting_from_working() -> None:
    began = now()
    time.sleep(0.05)
    slept = now().since(began)
    assert slept.blocked_s == pytest.approx(0.05, abs=0.02)
    assert slept.cpu_s < 0.01
    began, until = now(), time.process_time() + 0.05
    while time.process_time() < until:
        pass
    worked = now().since(began)
    assert worked.cpu_s == pytest.approx(0.05, abs=0.01)
    assert worked.blocked_s < 0.02


LOOP = Loop(
    wait_s=[1.0, 0.010, 0.020, 0.5, 0.030], queued_s=[0.9, 0.004, 0.002, 0.1, 0.0], step_s=[0.1] * 5, step_queued_s=[0.05, 0.0, 0.03, 0.05, 0.06],
    first=[True, False, False, True, False], total_s=2.06,
)  # fmt: skip


def test_time_that_other_programs_had_is_no_wait_and_first_batches_stand_apart() -> None:
    found = as_round(LOOP, ahead=False)
    assert found["wait_s"] == pytest.approx((0.006 + 0.018 + 0.030) / 3)
    assert found["steady_s"] == pytest.approx((2.06 - 1.1 - 0.6) / 3)
    assert found["queued_s"] == pytest.approx((0.006 + 0.03 + 0.06) / 3)
    assert (found["steps"], found["step_s"], found["starts"]) == (5, pytest.approx(0.1), [1.0, 0.5])
    assert as_round(LOOP, ahead=True)["steady_s"] == pytest.approx((2.06 - 1.5) / 5), "a device's work is shared out"
    assert all(math.isnan(as_round(Loop(), ahead=False)[name]) for name in ("steady_s", "wait_s", "step_s"))


def test_epochs_are_told_apart_and_few_batches_are_kept() -> None:
    kept: list[Any] = []
    found = run_loop([1, 2, 3], seconds=9, least=1, most=9, timeout_s=9, epochs=2, keep=kept)
    assert (found.first, found.ended, kept) == ([True, False, False] * 2, [(3, 3), (3, 3)], [1, 2, 3, 1])


def test_the_time_limit_gives_the_alarm_back() -> None:
    def own(*_: object) -> None:
        raise AssertionError("the alarm of somebody else")

    before = signal.signal(signal.SIGALRM, own)
    try:
        with (
            pytest.raises(TimedOut, match=r"nothing came for 0.05 s.*test_input_watch.py"),
            time_limit(0.05, "nothing came"),
        ):
            time.sleep(5)
        assert signal.getsignal(signal.SIGALRM) is own
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        with time_limit(20.0, "nothing came"):
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
