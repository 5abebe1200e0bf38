"""Guards for numbers that a person gives: each raises an error with the name, the value and what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from workbench.errors import ConfigError, WorkbenchError


def check_integer(
    name: str, value: Any, *, low: int = 1, hint: str = "", error: type[WorkbenchError] = ConfigError
) -> int:
    """Return `value`; raise `error` unless it is an integer of at least `low`. `hint` goes on the sentence, without its full stop."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise error(f"{name}={value!r} must be an integer of at least {low}{hint}.")
    return value


def check_number(
    name: str, value: Any, *, above: float = 0.0, low: float | None = None, below: float = math.inf
) -> None:
    """Raise unless `value` is a finite number above `above`, or at least `low` where that is given, and below `below`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not ((value > above if low is None else value >= low) and value < below):
        bounds = f"above {above:g}" if low is None else f"at least {low:g}"
        raise ConfigError(
            f"{name}={value!r} must be a finite number {bounds}{'' if math.isinf(below) else f' and below {below:g}'}."
        )


def check_fields(item: Any, names: str, holds: Callable[[Any], bool], what: str) -> None:
    """Raise unless `holds` is true of every named field of `item`; `names` has spaces between, `what` follows "must be"."""
    for name in names.split():
        if not holds(value := getattr(item, name)):
            raise ConfigError(f"{name}={value!r} must be {what}.")
