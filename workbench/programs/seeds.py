"""The seeds of a trial, and those that a program sets itself."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from workbench.instruments.caller import own_line

MAX_PLACES = 5
_NAMES = {"seed", "a"}
"""What the functions that set a seed call it."""


class Seed(int):
    """The seed of a trial, in the hands of a program: it is used as it is, where others are moved by it."""


def set_seeds(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy, as far as they are imported."""
    for owner, name in _owners():
        getattr(owner, name)(seed)


def move_seeds(
    seed_of: Callable[[], int | None], *, seeded: Callable[[str], None] = lambda _: None
) -> tuple[list[str], Callable[[], None]]:
    """Add `seed_of()` to every seed that a person's own code sets, until what is returned is called; the baseline's is 0, None adds and notes nothing.
    `seeded` is told the module whose generator is seeded, by whomever.

    Returns the places of the code that set one, which grows, and what puts the functions back.
    """
    places: list[str] = []

    def other(given: Any) -> Any:
        return given + (seed_of() or 0) if isinstance(given, int) and not isinstance(given, Seed) else given

    def moved(original: Any, module: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if seed_of() is None:
                return original(*args, **kwargs)
            seeded(module)
            where = own_line()
            if where:
                if where not in places and len(places) < MAX_PLACES:
                    places.append(where)
                args = (*map(other, args[:1]), *args[1:])
                kwargs = {name: other(value) if name in _NAMES else value for name, value in kwargs.items()}
            return original(*args, **kwargs)

        return call

    kept = [(owner, name, getattr(owner, name)) for owner, name in _owners()]
    for owner, name, original in kept:
        setattr(owner, name, moved(original, owner.__name__))

    def undo() -> None:
        for owner, name, original in kept:
            setattr(owner, name, original)

    return places, undo


def _owners() -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = [(torch, "manual_seed"), (random, "seed")]
    return [*found, (sys.modules["numpy"].random, "seed")] if "numpy" in sys.modules else found


def states() -> dict[str, str]:
    """Return, by module, what tells the present state of Python's and NumPy's generators from another one."""
    found = {"random": repr(random.getstate())}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = repr((kind, keys.tobytes(), *rest))
    return {name: hashlib.sha256(state.encode()).hexdigest() for name, state in found.items()}
