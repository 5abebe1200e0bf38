"""`SharedBlock`: a server's block that other processes read where it lies, and see whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.parameter_server.links.shared_memory import SharedMemory, Where, share

__all__ = ["BlockReader", "Located", "SharedBlock"]

LINE = 8  # numbers of 8 bytes in what a processor moves at once: what different processes write lies that far apart
BUSY_S = 0.02  # rule of thumb: ten times what an update of a million values takes

_SEQUENCE, _VERSION, _DELETED = range(3)
_REQUESTS, _BYTES_OUT, _BYTES_IN = range(3)


class Located(NamedTuple):
    """What a reader has to know of a block."""

    where: Where
    size: int
    dtype: torch.dtype
    readers: int


class SharedBlock:
    """Values and, before them, a line of numbers that tell whether they are being written, and a line for each reader to count in.

    Args:
        size: number of values.
        dtype: of them.
        readers: processes that may read it.

    Raises:
        OSError: there is not that much memory to share.
    """

    def __init__(self, size: int, dtype: torch.dtype, readers: int) -> None:
        head = (1 + readers) * LINE
        self._memory = SharedMemory(8 * head + size * dtype.itemsize)
        self.located = Located(self._memory.where, size, dtype, readers)
        self._head = self._memory.content[: 8 * head].view(torch.int64).numpy()
        self._head[:] = 0
        self.values = self._memory.content[8 * head :].view(dtype)[:size]

    @contextlib.contextmanager
    def writing(self, version: Callable[[], int]) -> Iterator[None]:
        """Let readers wait, or read again, while the values change.

        Args:
            version: returns the block's new version afterwards.
        """
        self._head[_SEQUENCE] += 1  # odd from here
        try:
            yield
        finally:
            self._head[_VERSION] = version()
            self._head[_SEQUENCE] += 1

    def counts(self) -> dict[str, int]:
        """Return requests, bytes_out and bytes_in of all readers together."""
        lines = self._head.reshape(-1, LINE)[1:].sum(axis=0)
        return {
            "requests": int(lines[_REQUESTS]), "bytes_out": int(lines[_BYTES_OUT]), "bytes_in": int(lines[_BYTES_IN]),
        }  # fmt: skip

    def close(self) -> None:
        """Tell the readers that it is deleted."""
        self._head[_DELETED] = 1
        self._memory.close()


class BlockReader:
    """A `SharedBlock` as another process sees it.

    Args:
        located: what the server told of it.
        reader: which line of counts is this process's.

    Raises:
        OSError: it is not there any more.
    """

    def __init__(self, located: Located, reader: int) -> None:
        content = share(located.where)
        head = (1 + located.readers) * LINE
        self._head = content[: 8 * head].view(torch.int64).numpy()
        self._counts: Any = self._head.reshape(-1, LINE)[1 + reader]
        self._values = content[8 * head :].view(located.dtype)[: located.size]

    @property
    def deleted(self) -> bool:
        """Whether the server has forgotten the block."""
        return bool(self._head[_DELETED])

    def read(self) -> tuple[Tensor, int] | None:
        """Return a copy of the values, and their version; None where the server writes without a pause."""
        out = torch.empty_like(self._values)
        version = self.read_into(out.copy_)
        return None if version is None else (out, version)

    def read_into(self, take: Callable[[Tensor], object]) -> int | None:
        """Let `take` copy the values, again where they were written meanwhile; returns their version, None as `read`."""
        version = self._unchanged(lambda: take(self._values))
        if version is not None:
            self._count(self._values.nbytes)
        return version

    def read_rows(self, rows: Tensor, width: int) -> Tensor | None:
        """Return a copy of some rows of `width` values; None where the server writes without a pause.

        Raises:
            IndexError: there is no such row.
        """
        table = self._values.view(-1, width)
        found: list[Tensor] = []
        if self._unchanged(lambda: found.append(table[rows])) is None:
            return None
        self._count(found[-1].nbytes, rows.nbytes)
        return found[-1]

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
