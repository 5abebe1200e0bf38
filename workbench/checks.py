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


def check_number(name: str, value: Any, *, above: float = 0.0) -> None:
    """Raise unless `value` is a finite number above `above`."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) and above < value < math.inf):
        raise ConfigError(f"{name}={value!r} must be a finite number above {above:g}.")


def check_fields(item: Any, names: str, holds: Callable[[Any], bool], what: str) -> None:
    """Raise unless `holds` is true of every named field of `item`; `names` has spaces between, `what` follows "must be"."""
    for name in names.split():
        if not holds(value := getattr(item, name)):
            raise ConfigError(f"{name}={value!r} must be {what}.")
