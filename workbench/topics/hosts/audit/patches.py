"""`Patches`: functions of other packages that are watched for a while, and put back exactly as they were."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """Wrappers around functions and methods; `undo` takes them off in the reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Put `make(original)` in the place of `owner.name`; nothing happens where there is no such name.

        A module that has imported a function by its name is given the wrapper too: `from torch.distributed import all_reduce`.

        Args:
            owner: a module or a class.
            name: of the function in it.
            make: takes the original and returns what is called instead of it.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        own = vars(owner).get(name, _ABSENT)
        wrapper = functools.wraps(original)(make(original))
        for other in _importers(owner, name, original):
            setattr(other, name, wrapper)
            self._undo.append(functools.partial(_put_back, other, name, original))
        setattr(owner, name, wrapper)
        self._undo.append(functools.partial(_put_back, owner, name, own))

    def handle(self, handle: Any) -> None:
        """Remember a hook's handle, so that `undo` removes the hook."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def _importers(owner: Any, name: str, original: Any) -> list[Any]:
    """Return scripts and modules of the user's own that have imported the function by name before it was wrapped."""
    if not isinstance(owner, ModuleType):
        return []
    package = owner.__name__.partition(".")[0]
    others = [m for key, m in list(sys.modules.items()) if m is not owner and key.partition(".")[0] != package]
    return [m for m in others if isinstance(m, ModuleType) and vars(m).get(name) is original]


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
