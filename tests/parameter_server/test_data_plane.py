"""How values travel between processes: packed, through memory that both ends see, and to all servers at once."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.held import pull
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.links import RayPlane, ServerLink
from workbench.parameter_server.servers.server import Grad, Place, Push, Take
from workbench.parameter_server.workers.closure import from_wire, to_wire
from workbench.ray import shared_memory
from workbench.ray.cluster import NotYet
from workbench.ray.shared_memory import (
    BlockReader,
    SharedBlock,
    SharedMemory,
    Witness,
    attach,
    machine,
    shared_memory_missing,
)

needs_memory = pytest.mark.skipif(shared_memory_missing() is not None, reason="no memory to share here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape).to(dtype)
    found = from_wire(pickle.loads(pickle.dumps(to_wire({"a": [given, 1]}))))
    assert torch.equal(found["a"][0], given)
    assert found["a"][0].dtype is dtype
    found["a"][0].fill_(0)  # it is the reader's own, and may be written


@needs_memory
def test_another_process_sees_and_writes_the_same_memory() -> None:
    """And a process that ended is seen to have, though nobody has asked after it yet."""
    memory = SharedMemory(64)
    program = (
        "from workbench.ray.shared_memory import Where, attach, machine\n"
        f"content = attach({memory.where!r}); content[0] = content[1] + 1; print(machine())"
    )
    memory.content[1] = 41
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    witness = Witness(process.pid)
    assert not witness.gone()
    assert process.stdout is not None
    assert process.stdout.read().strip() == machine()
    process.stdout.close()
    until = time.monotonic() + 20
    while not witness.gone():
        assert time.monotonic() < until
    assert memory.content[0] == 42
    process.wait()
    memory.close()


@needs_memory
def test_nothing_is_left_of_it_and_a_number_that_is_used_again_deceives_nobody() -> None:
    def held() -> int:
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum("memfd:workbench" in each for each in links)

    before, files = held(), set(os.listdir("/dev/shm"))
    block = SharedBlock(1000, torch.float32, 2)
    assert held() == before + 1
    assert set(os.listdir("/dev/shm")) == files
    where = block.located.where
    block.close()
    assert held() == before
    second = SharedMemory(64)
    assert second.where.fd == where.fd
    with pytest.raises(FileNotFoundError, match="another file"):
        attach(where)
    second.close()


@needs_memory
def test_no_reader_sees_half_of_a_write() -> None:
    """Every value of a version is that version's number."""
    block = SharedBlock(200_000, torch.float32, 1)
    reader, values = BlockReader(block.located, 0), torch.empty(200_000)
    ended = threading.Event()

    def write() -> None:
        for version in itertools.count(1):
            if ended.is_set():
                return
            with block.writing(partial(int, version)):
                half = len(block.values) // 2
                block.values[:half] = version
                time.sleep(1e-4)
                block.values[half:] = version
            time.sleep(5e-4)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(100):
            at = reader.read_into(values.copy_)
            if at is not None:
                assert values.min() == values.max() == at
                seen.add(at)
        assert len(seen) > 3
    finally:
        ended.set()
        writer.join()


@needs_memory
def test_a_writer_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "BUSY_S", 0.005)
    block = SharedBlock(4, torch.float32, 1)
    reader = BlockReader(block.located, 0)
    with block.writing(lambda: 1):
        assert reader.read_into(torch.clone) is None
        assert reader.read_rows(torch.tensor([0]), 2) is None
    assert reader.read_into(torch.clone) == 1
    assert block.counts()["requests"] == 1, "what came to nothing is no request"


@needs_memory
def test_memory_that_is_not_there_is_an_error_at_once() -> None:
    """Not a bus error at the first write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(OSError, match="File too large|No space"):
            SharedBlock(1 << 20, torch.float32, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    SharedBlock(1 << 20, torch.float32, 1).close()


A, B, C = Place(1, "a"), Place(0, "b"), Place(1, "c")


class FakeLink:
    """Notes what it is asked, in a diary that all links share."""

    name, why = "fake", "a test"

    def __init__(self, server: int, diary: list[str]) -> None:
        self.server, self.diary = server, diary

    def gone(self) -> bool:
        return False

    def _ending(self, what: str, end: Callable[[], list[int]]) -> Callable[[], list[int]]:
        self.diary.append(f"begin {what} {self.server}")

        def ended() -> list[int]:
            self.diary.append(f"end {what} {self.server}")
            return end()

        return ended

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        def end() -> list[int]:
            for k, block in enumerate(blocks):
                take(k, torch.full((2,), float(ord(block))))
            return [ord(block) for block in blocks]

        return self._ending("pull", end)

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        versions = [int(sum(map(torch.sum, grad))) + push.pulled for grad, push in zip(grads, pushes, strict=True)]
        return self._ending("push", lambda: versions)


def test_all_servers_work_at_once_and_answers_keep_their_order() -> None:
    diary: list[str] = []
    plane = RayPlane(2, lambda server: FakeLink(server, diary))  # type: ignore[arg-type, return-value]
    found: dict[int, float] = {}
    versions = plane.pull_into([A, B, C], lambda k, values: found.update({k: float(values[0])}))
    assert versions == [ord("a"), ord("b"), ord("c")]
    assert found == {0: ord("a"), 1: ord("b"), 2: ord("c")}
    assert diary == ["begin pull 1", "begin pull 0", "end pull 1", "end pull 0"]
    assert [float(values[1]) for values in pull(plane, [B, A])] == [ord("b"), ord("a")]
    grads = [[torch.ones(1)], [torch.ones(2), torch.ones(3)], [torch.ones(7)]]
    assert plane.push([A, B, C], grads, [Push(10), Push(20), Push(30)]) == [11, 25, 37]
    assert (plane.name, plane.why) == ("fake", "a test")


class Waiting:
    """A cluster that answers a call when it has been asked so often, or never."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.limits = list(answers), []

    def call(self, *_: Any, **__: Any) -> str:
        return "call"

    def answer(self, call: str, timeout_s: float | None = None) -> Any:
        self.limits.append(timeout_s)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@needs_memory
def test_a_call_is_waited_for_as_long_as_its_server_is_seen_to_live() -> None:
    """T10.2: Ray may take seconds to tell; a time-out of the server's own is its answer."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def link(ray: Any, why: str | None = None) -> ServerLink:
        return ServerLink(ray, None, 3, why, pid=process.pid)

    assert link(Waiting(NotYet(), NotYet(), "answer")).call("pull")() == "answer"
    with pytest.raises(TimeoutError, match="of the method"):
        link(Waiting(TimeoutError("of the method"))).call("pull")()
    unseen = Waiting("answer")
    assert link(unseen, "another machine").call("pull")() == "answer"
    assert unseen.limits == [None], "where nobody sees it, Ray tells"
    slow = Waiting(*[NotYet()] * 9)
    waiting = link(slow)
    process.communicate(b"\n")
    with pytest.raises(UnavailableError, match="ps 3"):
        waiting.call("pull")()
    assert len(slow.answers) == 8
