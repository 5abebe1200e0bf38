"""Blocks that other processes read where they lie: whole, counted, and gone with their processes."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from workbench.parameter_server.links import shm as shared_block
from workbench.parameter_server.links.shared_memory import (
    SharedMemory,
    Witness,
    machine,
    share,
    shared_memory_missing,
)
from workbench.parameter_server.links.shm import BlockReader, SharedBlock

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason="no memory to share here")


def test_another_process_sees_and_writes_the_same_memory() -> None:
    """And a process that ended is seen to have, though nobody has asked after it yet."""
    memory = SharedMemory(64)
    program = (
        "from workbench.parameter_server.links.shared_memory import Where, machine, share\n"
        f"content = share({memory.where!r}); content[0] = content[1] + 1; print(machine())"
    )
    memory.content[1] = 41
    names = "from workbench.parameter_server.links.shared_memory import Where\n"
    process = subprocess.Popen([sys.executable, "-c", names + program], stdout=subprocess.PIPE, text=True)
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


def test_nothing_is_left_of_it() -> None:
    def files() -> set[str]:
        return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}

    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    block = SharedBlock(1000, torch.float32, 2)
    assert any("memfd:workbench" in each for each in files())
    assert (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) == before
    where = block.located.where
    block.close()
    assert not any("memfd:workbench" in each for each in files())
    with pytest.raises(OSError):  # noqa: PT011 - which of them depends on what the number stands for by now
        share(where)


def test_a_number_that_is_used_again_deceives_nobody() -> None:
    first = SharedMemory(64)
    where = first.where
    first.close()
    second = SharedMemory(64)
    assert second.where.fd == where.fd
    with pytest.raises(FileNotFoundError, match="another file"):
        share(where)
    second.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool])
def test_a_reader_gets_values_version_and_rows(dtype: torch.dtype) -> None:
    block = SharedBlock(12, dtype, 2)
    values = torch.arange(12).to(dtype)
    with block.writing(lambda: 7):
        block.values.copy_(values)
    reader = BlockReader(block.located, 1)
    found = reader.read()
    assert found is not None
    assert torch.equal(found[0], values)
    assert found[1] == 7
    found[0].zero_()
    assert torch.equal(block.values, values), "what is read is the reader's own"
    rows = reader.read_rows(torch.tensor([2, 0, 2]), 3)
    assert rows is not None
    assert torch.equal(rows, values.reshape(4, 3)[[2, 0, 2]])
    with pytest.raises(IndexError):
        reader.read_rows(torch.tensor([4]), 3)
    block.close()
    assert reader.deleted


def test_each_reader_counts_in_its_own_line() -> None:
    block = SharedBlock(100, torch.float32, 3)
    readers = [BlockReader(block.located, k) for k in range(3)]
    for k, reader in enumerate(readers):
        for _ in range(k + 1):
            reader.read()
    readers[2].read_rows(torch.tensor([1, 2]), 10)
    assert block.counts() == {"requests": 7, "bytes_out": 6 * 400 + 80, "bytes_in": 16}
    again = BlockReader(block.located, 2)  # a worker that was started anew goes on counting
    again.read()
    assert block.counts()["requests"] == 8


def test_no_reader_sees_half_of_a_write() -> None:
    """Every value of a version is that version's number."""
    block = SharedBlock(200_000, torch.float32, 1)
    reader = BlockReader(block.located, 0)
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
            found = reader.read()
            if found is not None:
                values, at = found
                assert values.min() == values.max() == at
                seen.add(at)
        assert len(seen) > 3
    finally:
        ended.set()
        writer.join()


def test_a_writer_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_block, "BUSY_S", 0.005)
    block = SharedBlock(4, torch.float32, 1)
    reader = BlockReader(block.located, 0)
    with block.writing(lambda: 1):
        assert reader.read() is None
        assert reader.read_rows(torch.tensor([0]), 2) is None
    assert reader.read() is not None
    assert block.counts()["requests"] == 1, "what came to nothing is no request"


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
