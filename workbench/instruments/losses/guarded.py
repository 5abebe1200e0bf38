"""`looks`: a fault of what looks at a loop is its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from workbench.instruments.taps import TAPS

Looks = TypeVar("Looks", bound=Callable[..., None])


def looks(method: Looks) -> Looks:
    """Return a method of a `LoopObserver` whose fault, where an intervention goes on, ends only the observation."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.faulty:
            return
        attention = self.attention
        began = time.thread_time() if attention.awake else 0.0
        try:
            method(self, *args, **kwargs)
            if began:
                attention.spent += time.thread_time() - began
        except Exception as error:
            if self.intervention is None:  # whoever calls takes the observer out
                raise
            self.faulty = True
            TAPS.tell_fault(self, error)

    return cast("Looks", guarded)
