"""`Patches`: functions of other packages that are watched for a while, and put back exactly as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """Wrappers around functions and methods; `undo` takes them off in the reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Put `make(original)` in the place of `owner.name`; nothing happens where there is no such name.

        Args:
            owner: a module or a class.
            name: of the function in it.
            make: takes the original and returns what is called instead of it.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        own = vars(owner).get(name, _ABSENT)
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._undo.append(functools.partial(_put_back, owner, name, own))

    def handle(self, handle: Any) -> None:
        """Remember a hook's handle, so that `undo` removes the hook."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
