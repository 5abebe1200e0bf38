"""Memory that processes of one machine share, and blocks of values in it that one process writes and others read where they lie.

The memory has no name, so it ends with the last process that uses it and leaves no file; /dev/shm and its size do not matter to it.
"""

import contextlib
import functools
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

LINE = 8  # numbers of 8 bytes in what a processor moves at once: what different processes write lies that far apart
BUSY_S = 0.02  # rule of thumb: ten times what an update of a million values takes
ALIGNED = 64  # bytes

_SEQUENCE, _VERSION, _DELETED = range(3)
_REQUESTS, _BYTES_OUT, _BYTES_IN = range(3)


class Where(NamedTuple):
    """Where another process finds shared memory."""

    pid: int  # of the process that made it
    fd: int  # its number there
    inode: int  # which memory that is, because numbers are used again
    nbytes: int


class SharedMemory:
    """Memory of `nbytes` that this process makes, reserved at once, so that a write cannot fail later; `OSError` where there is not that much."""

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("workbench")
        try:
            os.posix_fallocate(self._fd, 0, max(nbytes, 1))
        except BaseException:
            os.close(self._fd)
            raise
        self.where = Where(os.getpid(), self._fd, os.fstat(self._fd).st_ino, max(nbytes, 1))
        self.content = attach(self.where)

    def close(self) -> None:
        """Let nobody find it any more; who has it keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def attach(where: Where) -> Tensor:
    """Return the memory of another process as bytes, shape (nbytes,); raises `OSError` where it is gone, or may not be seen."""
    path = f"/proc/{where.pid}/fd/{where.fd}"
    if os.stat(path).st_ino != where.inode:
        raise FileNotFoundError(f"{path} is another file by now")
    try:
        return torch.from_file(path, shared=True, size=where.nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


class Witness:
    """Sees at once whether another process of this machine still lives; a number that is used again does not deceive it."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def gone(self) -> bool:
        """Return whether it has ended."""
        return bool(self._poll.poll(0))

    def __del__(self) -> None:
        """Close the file."""
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)


@functools.cache
def machine() -> str:
    """Return an id that two processes have in common where they can share memory: the same kernel, and no wall of a container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown to process {os.getpid()}"


@functools.cache
def shared_memory_missing() -> str | None:
    """Return why this process cannot share memory; None where it can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this platform has no memory to share without a name (memfd)"
    try:
        SharedMemory(4096).close()
        Witness(os.getpid())
    except OSError as error:
        return f"shared memory cannot be made or seen here ({error})"
    return None


Offset = tuple[int, int, torch.dtype]  # where a packed tensor lies: first byte, number of values, dtype


def offsets_of(tensors: Sequence[Sequence[Tensor]]) -> tuple[list[Offset], int]:
    """Return where tensors, each given in pieces, will lie when packed, and how many bytes they take together."""
    offsets: list[Offset] = []
    end = 0
    for pieces in tensors:
        size, dtype = sum(piece.numel() for piece in pieces), pieces[0].dtype
        offsets.append((end, size, dtype))
        end += -(-size * dtype.itemsize // ALIGNED) * ALIGNED
    return offsets, max(end, 1)


def pack(tensors: Sequence[Sequence[Tensor]], offsets: Sequence[Offset], content: Tensor) -> None:
    """Copy tensors, each given in pieces, to their offsets in `content`, shape (bytes,)."""
    for pieces, packed in zip(tensors, unpack(content, offsets), strict=True):
        torch.cat(list(pieces), out=packed)


def unpack(content: Tensor, offsets: Sequence[Offset]) -> list[Tensor]:
    """Return the tensors that lie in `content`, shape (bytes,), as views of it."""
    return [content[begin : begin + size * dtype.itemsize].view(dtype) for begin, size, dtype in offsets]


class Located(NamedTuple):
    """What a reader has to know of a block."""

    where: Where
    size: int
    dtype: torch.dtype
    readers: int

    def parts(self, content: Tensor) -> tuple[Any, Tensor]:
        """Return the lines of numbers as an array, shape (1 + readers, `LINE`), and the values, shape (size,)."""
        head = 8 * (1 + self.readers) * LINE
        lines = content[:head].view(torch.int64).numpy().reshape(-1, LINE)
        return lines, content[head : head + self.size * self.dtype.itemsize].view(self.dtype)


class SharedBlock:
    """Values and, before them, a line of numbers that tell whether they are being written, and a line for each reader to count in."""

    def __init__(self, size: int, dtype: torch.dtype, readers: int) -> None:
        self._memory = SharedMemory(8 * (1 + readers) * LINE + size * dtype.itemsize)
        self.located = Located(self._memory.where, size, dtype, readers)
        lines, self.values = self.located.parts(self._memory.content)
        lines[:] = 0
        self._head, self._counts = lines[0], lines[1:]

    @contextlib.contextmanager
    def writing(self, version: Callable[[], int]) -> Iterator[None]:
        """Let readers wait, or read again, while the values change; `version` returns the block's new version afterwards."""
        self._head[_SEQUENCE] += 1  # odd from here
        try:
            yield
        finally:
            self._head[_VERSION] = version()
            self._head[_SEQUENCE] += 1

    def counts(self) -> dict[str, int]:
        """Return requests, bytes_out and bytes_in of all readers together."""
        total = self._counts.sum(axis=0)
        return {
            "requests": int(total[_REQUESTS]), "bytes_out": int(total[_BYTES_OUT]), "bytes_in": int(total[_BYTES_IN]),
        }  # fmt: skip

    def close(self) -> None:
        """Tell the readers that it is deleted."""
        self._head[_DELETED] = 1
        self._memory.close()


class BlockReader:
    """A `SharedBlock` as another process sees it, which counts in the line `reader`; `OSError` where it is not there any more."""

    def __init__(self, located: Located, reader: int) -> None:
        lines, self._values = located.parts(attach(located.where))
        self._head, self._counts = lines[0], lines[1 + reader]

    @property
    def deleted(self) -> bool:
        """Whether the server has forgotten the block."""
        return bool(self._head[_DELETED])

    def read_into(self, take: Callable[[Tensor], object]) -> int | None:
        """Let `take` copy the values, again where they were written meanwhile; returns their version, None where the server writes without a pause."""
        version = self._unchanged(lambda: take(self._values))
        if version is not None:
            self._count(self._values.nbytes)
        return version

    def read_rows(self, rows: Tensor, width: int) -> tuple[Tensor, int] | None:
        """Return a copy of some rows of `width` values and their version; None where the server writes without a pause."""
        table = self._values.view(-1, width)
        found: list[Tensor] = []
        version = self._unchanged(lambda: found.append(table[rows]))
        if version is None:
            return None
        self._count(found[-1].nbytes, rows.nbytes)
        return found[-1], version

    def _unchanged(self, copy: Callable[[], object]) -> int | None:
        head, until = self._head, None
        while True:
            before = head[_SEQUENCE]
            if not before & 1:
                copy()
                version = int(head[_VERSION])
                if head[_SEQUENCE] == before:
                    return version
            now = time.perf_counter()
            until = until or now + BUSY_S
            if now > until:
                return None
            time.sleep(2e-5)

    def _count(self, bytes_out: int, bytes_in: int = 0) -> None:
        self._counts[_REQUESTS] += 1
        self._counts[_BYTES_OUT] += bytes_out
        self._counts[_BYTES_IN] += bytes_in
