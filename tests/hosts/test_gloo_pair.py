"""Two ends that send tensors to each other, and notice when the other one is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from workbench.parameter_server.links.gloo import GlooPair

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
TIMEOUT_S = 30.0


def waiting(look: Callable[[], bytes | None]) -> bytes:
    until = time.monotonic() + TIMEOUT_S
    while (found := look()) is None:
        if time.monotonic() > until:
            raise TimeoutError("the other end was not there")
        time.sleep(0.002)
    return found


def test_tensors_arrive_in_order_and_both_ways() -> None:
    notes: dict[str, bytes] = {}
    ends: dict[int, GlooPair] = {}

    def join(rank: int) -> None:
        ends[rank] = GlooPair(
            rank, notes.__setitem__, lambda key: waiting(lambda: notes.get(key)), "127.0.0.1", TIMEOUT_S
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = [torch.arange(100_000.0), torch.tensor([1, 2, 3])]
    found = [torch.empty(100_000), torch.empty(3, dtype=torch.int64)]
    sending = [ends[0].send(each) for each in given]
    for each in found:
        ends[1].receive(each)()
    for end in sending:
        end()
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=True))
    back = torch.empty(2)
    sent = ends[1].send(torch.ones(2))
    ends[0].receive(back)()
    sent()
    assert back.tolist() == [1, 1]


PROGRAM = """
import sys, time, os
from pathlib import Path
import torch
from workbench.parameter_server.links.gloo import GlooPair
folder = Path(sys.argv[1])
def put(key, content):
    path = folder / key.replace("/", "_")
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)
def get(key):
    path = folder / key.replace("/", "_")
    while not path.exists():
        time.sleep(0.01)
    return path.read_bytes()
pair = GlooPair(1, put, get, "127.0.0.1", 30.0)
pair.send(torch.ones(1))()
os.kill(os.getpid(), 9)
"""


def test_an_end_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    """Not when the time-out has passed."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])

    def put(key: str, content: bytes) -> None:
        path = tmp_path / key.replace("/", "_")
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)

    def look(key: str) -> bytes | None:
        path = tmp_path / key.replace("/", "_")
        return path.read_bytes() if path.exists() else None

    pair = GlooPair(0, put, lambda key: waiting(lambda: look(key)), "127.0.0.1", TIMEOUT_S)
    first = torch.zeros(1)
    pair.receive(first)()
    assert first.item() == 1
    process.wait()
    begun = time.monotonic()
    with pytest.raises(OSError, match="gloo"):
        pair.receive(first)()
    assert time.monotonic() - begun < 5.0


def test_an_end_that_nobody_joins_is_given_up() -> None:
    def nobody(_: str) -> bytes:
        raise TimeoutError("nobody is there")

    with pytest.raises((OSError, TimeoutError)):
        GlooPair(0, lambda *_: None, nobody, "127.0.0.1", 1.0)


def test_an_address_that_is_not_here_is_an_error() -> None:
    with pytest.raises(OSError, match="gloo"):
        GlooPair(0, lambda *_: None, lambda _: b"", "192.0.2.1", 1.0)
