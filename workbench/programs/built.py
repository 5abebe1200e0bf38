"""`BuiltLines`: in which line of a person's code each optimizer is built."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from workbench.instruments.caller import own_line

_MOST = 8


class BuiltLines:
    """Notes the line of each optimizer that is built while it watches, and calls `at_first` after the first one."""

    def __init__(self, at_first: Callable[[], None] = lambda: None) -> None:
        self._at_first = at_first
        self._lines: dict[int, tuple[weakref.ref[Optimizer], str]] = {}  # by identity: not every optimizer has a hash

    def watch(self) -> Callable[[], None]:
        """Begin, and return what ends it."""
        original = Optimizer.__init__

        @functools.wraps(original)
        def built(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._lines[id(optimizer)] = (weakref.ref(optimizer), own_line())
            original(optimizer, *args, **kwargs)
            self._at_first()

        Optimizer.__init__ = built  # type: ignore[method-assign,assignment]

        def end() -> None:
            Optimizer.__init__ = original  # type: ignore[method-assign]

        return end

    @property
    def any(self) -> bool:
        """Tell whether an optimizer was built."""
        return bool(self._lines)

    def of(self, optimizers: Sequence[Optimizer]) -> list[str]:
        """Return the line of each of the first few optimizers, empty where none was seen."""
        found = [(each, *self._lines.get(id(each), (lambda: None, ""))) for each in optimizers[:_MOST]]
        return [line if ref() is each else "" for each, ref, line in found]
