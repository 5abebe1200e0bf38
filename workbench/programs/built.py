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
    """Notes the line of each optimizer that is built while it watches."""

    def __init__(self) -> None:
        self._lines: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()

    def watch(self) -> Callable[[], None]:
        """Begin, and return what ends it."""
        original = Optimizer.__init__

        @functools.wraps(original)
        def built(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._lines[optimizer] = own_line()
            original(optimizer, *args, **kwargs)

        Optimizer.__init__ = built  # type: ignore[method-assign,assignment]

        def end() -> None:
            Optimizer.__init__ = original  # type: ignore[method-assign]

        return end

    def of(self, optimizers: Sequence[Optimizer]) -> list[str]:
        """Return the line of each of the first few optimizers, empty where none was seen."""
        return [self._lines.get(each, "") for each in optimizers[:_MOST]]
