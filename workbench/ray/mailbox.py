"""`Mailbox`: what workers tell, until the process that writes it down comes for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_BYTES = 64 * 2**20  # rule of thumb: workers wait for the reader while more than this is unread


class Mailbox:
    """Letters of several senders, in the order of each; a worker of its own, so that who sends never waits for who reads."""

    def __init__(self) -> None:
        self._letters: list[tuple[str, Sequence[Any]]] = []
        self._bytes = 0
        self._stopping: set[str] = set()

    def put(self, sender: str, messages: Sequence[Any], size: int) -> bool | None:
        """Take messages and return whether their sender is to stop; None where nothing was taken, because too much is unread."""
        if self._bytes > MOST_BYTES:
            return None
        self._letters.append((sender, messages))
        self._bytes += size
        return sender in self._stopping

    def take(self) -> list[tuple[str, Sequence[Any]]]:
        """Return sender and messages of what was not read yet."""
        letters, self._letters, self._bytes = self._letters, [], 0
        return letters

    def stop(self, senders: Sequence[str]) -> None:
        """Have these senders told to stop, the next time that they put something."""
        self._stopping |= set(senders)
