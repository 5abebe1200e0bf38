"""`Fault`: a small function that spoils one thing of a base, and the codes that name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.zoo.recipe import Recipe

Plant = Callable[[Recipe], Recipe]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        kind: its name.
        area: the part of a training that it belongs to.
        accepts: codes that name it; the first is its own, the others are as right for the person who reads them.
        plant: base -> the same training with the fault, and no other difference.
        bases: names of the bases it is planted in.
        twin: base -> the healthy training that differs in the fault alone; None where that is the base itself.
    """

    kind: str
    area: str
    accepts: tuple[str, ...]
    plant: Plant
    bases: tuple[str, ...]
    twin: Plant | None = None


FAULTS: dict[str, Fault] = {}


def fault(
    area: str, accepts: str, on: str, kind: str | None = None, twin: Plant | None = None
) -> Callable[[Plant], Plant]:
    """Register a fault; `accepts` and `on` are words, the fault's own name is the function's."""

    def register(plant: Plant) -> Plant:
        name = kind or plant.__name__.replace("_", "-")
        assert name not in FAULTS
        FAULTS[name] = Fault(name, area, tuple(accepts.split()), plant, tuple(on.split()), twin)
        return plant

    return register
