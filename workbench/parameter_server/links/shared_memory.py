"""Memory that processes of one machine share: it has no name, so it ends with the last process that uses it, and leaves no file."""

from __future__ import annotations

import functools
import os
import select
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Where:
    """Where another process finds shared memory.

    Attributes:
        pid: of the process that made it.
        fd: its number there.
        inode: which memory that is, because numbers are used again.
        nbytes: how large it is.
    """

    pid: int
    fd: int
    inode: int
    nbytes: int


class SharedMemory:
    """Memory that this process made; /dev/shm and its size do not matter to it.

    Args:
        nbytes: how large; the memory is reserved at once, so that a write cannot fail later.

    Raises:
        OSError: there is not that much.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("workbench")
        try:
            os.posix_fallocate(self._fd, 0, max(nbytes, 1))
        except BaseException:
            os.close(self._fd)
            raise
        self.where = Where(os.getpid(), self._fd, os.fstat(self._fd).st_ino, max(nbytes, 1))
        self.content = share(self.where)

    def close(self) -> None:
        """Let nobody find it any more; who has it keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def share(where: Where) -> Tensor:
    """Return the memory of another process as bytes, shape (nbytes,).

    Raises:
        OSError: it is not there any more, or this process may not see it.
    """
    path = f"/proc/{where.pid}/fd/{where.fd}"
    if os.stat(path).st_ino != where.inode:
        raise FileNotFoundError(f"{path} is another file by now")
    try:
        return torch.from_file(path, shared=True, size=where.nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


class Witness:
    """Sees at once whether another process of this machine still lives; a number that is used again does not deceive it.

    Raises:
        OSError: there is none.
    """

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
        memory = SharedMemory(4096)
        memory.close()
        Witness(os.getpid())
    except OSError as error:
        return f"shared memory cannot be made or seen here ({error})"
    return None
