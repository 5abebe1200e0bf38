"""`CASES`: every fault in every base it is planted in, and every control, by name."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import tests.zoo.faults_config
import tests.zoo.faults_data
import tests.zoo.faults_model  # noqa: F401
from tests.zoo.bases import of
from tests.zoo.controls import CONTROLS
from tests.zoo.faults import FAULTS
from tests.zoo.pairs import OF, SAME
from tests.zoo.recipe import Recipe


@dataclass(frozen=True)
class Case:
    """One training to be diagnosed.

    Attributes:
        name: `fault-kind/base`, or `control/name`.
        recipe: makes it.
        area: of the fault, "healthy" for a control.
        accepts: codes that name the fault; empty for a control.
        twin: name of the control that differs in the fault alone.
    """

    name: str
    recipe: Callable[[], Recipe]
    area: str = "healthy"
    accepts: tuple[str, ...] = ()
    twin: str | None = None

    @property
    def half(self) -> str:
        """Whether one may look at it while tuning ("tune"), or only at the totals ("scored"): drawn by the name."""
        return ("tune", "scored")[hashlib.sha256(self.name.encode()).digest()[0] % 2]

    @property
    def kind(self) -> str:
        """What it is: "faults", "controls", or "pairs", a case after a change that must change nothing."""
        return "pairs" if self.name.startswith("pair/") else "faults" if self.accepts else "controls"

    def named(self) -> Recipe:
        """Return the training under a name that does not say what is wrong with it."""
        return dataclasses.replace(self.recipe(), name="case")


def _all() -> Iterator[Case]:
    for kind, fault in FAULTS.items():
        for base in fault.bases:
            twin = f"control/{base}-{'seed0' if fault.twin is None else kind}"
            yield Case(f"{kind}/{base}", partial(_planted, fault.plant, base), fault.area, fault.accepts, twin)
            if fault.twin is not None:
                yield Case(twin, partial(_planted, fault.twin, base))
    for name, make in CONTROLS.items():
        yield Case(f"control/{name}", make)


def _pairs(cases: dict[str, Case]) -> Iterator[Case]:
    for change, plant in SAME.items():
        for name in OF:
            case = cases[name]
            recipe = partial(_changed, plant, case.recipe)
            yield dataclasses.replace(case, name=f"pair/{change}/{name}", recipe=recipe, twin=name)


def _changed(plant: Callable[[Recipe], Recipe], make: Callable[[], Recipe]) -> Recipe:
    return plant(make())


def _planted(plant: Callable[[Recipe], Recipe], base: str) -> Recipe:
    return plant(of(base))


CASES: dict[str, Case] = {case.name: case for case in _all()}
CASES |= {case.name: case for case in _pairs(CASES)}
