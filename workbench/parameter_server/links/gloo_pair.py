"""`GlooPair`: two processes, here or on two machines, that send tensors to each other; the death of one is noticed by the other alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GlooPair"]


class GlooPair:
    """One end of the pair. Making it waits for the other end; no port is open but that of the connection.

    Args:
        rank: 0 at one end, 1 at the other.
        put: (key, content): lets the other end know something.
        get: key -> what the other end, or this one, put there; waits for it.
        address: of this machine, as the other end reaches it.
        timeout_s: for making it, and for each message.

    Raises:
        OSError: the other end was not found in time, or gloo cannot listen at that address.
    """

    def __init__(
        self, rank: int, put: Callable[[str, bytes], None], get: Callable[[str], bytes], address: str, timeout_s: float
    ) -> None:
        self._other = 1 - rank
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            options._devices = [gloo.create_device(hostname=address)]
            self._group = gloo(_Notes(put, get), rank, 2, options)
        except (RuntimeError, TimeoutError) as error:
            raise OSError(f"gloo: {error}") from error

    def send(self, content: Tensor) -> Callable[[], None]:
        """Begin to send; call what is returned before `content` changes.

        Both raise `OSError` where the other end is gone.
        """
        with _as_os_error():
            work = self._group.send([content], self._other, 0)
        return lambda: _end(work)

    def receive(self, content: Tensor) -> Callable[[], None]:
        """Begin to fill `content` with what the other end sends; it is there when what is returned was called."""
        with _as_os_error():
            work = self._group.recv([content], self._other, 0)
        return lambda: _end(work)


class _Notes(torch.distributed.Store):  # type: ignore[name-defined,misc]
    """What gloo asks of a store while it connects, by two functions."""

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put, self._get = put, get

    def set(self, key: str, value: Any) -> None:
        self._put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        for key in keys:
            self._get(key)

    def has_extended_api(self) -> bool:
        return False


def _end(work: Any) -> None:
    with _as_os_error():
        work.wait()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"gloo: {error}") from error
