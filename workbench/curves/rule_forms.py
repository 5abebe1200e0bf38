"""`RuleForms`: one update rule in the playbook's form and in torch's, fed the same gradients: where they part, by how much, why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Cause", "FloatArray", "RuleForms", "apart"]

FloatArray = NDArray[np.float64]


def apart(one: ArrayLike, other: ArrayLike) -> FloatArray:
    """Return the difference of two sequences of updates relative to the larger of the two, from 0 to 2, shape (steps,)."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    larger = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nan_to_num(np.where(larger > 0, np.abs(a - b) / larger, 0.0), nan=0.0))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing in which the forms differ, and what it does alone, all else made equal.

    Attributes:
        name: short.
        text: what each form does.
        apart: relative difference of the updates that it makes, from 0 to 2, shape (steps,).
        tolerance: what is below is rounding.
    """

    name: str
    text: str
    apart: FloatArray
    tolerance: float

    @property
    def first(self) -> float:
        """Relative difference of the first updates that differ, 0 where none do."""
        seen = self.apart[self.apart > self.tolerance]
        return float(seen[0]) if seen.size else 0.0

    @property
    def largest(self) -> float:
        """Relative difference where it is largest."""
        return float(self.apart.max())

    def to_dict(self) -> dict[str, Any]:
        """Return what a record keeps: no arrays."""
        return {name: getattr(self, name) for name in ("name", "text", "first", "largest")}


@dataclass(frozen=True, kw_only=True)
class RuleForms:
    """The updates of both forms from the same gradients and learning rates.

    Attributes:
        optimizer: the rule.
        playbook: updates of the playbook's form for one parameter, shape (steps,).
        torch: those of torch's form.
        first_step: first step at which they differ, None where they never do.
        material_frac: relative difference from which on an update is another one.
        causes: the one that does most comes first; () where the formulas are the same.
    """

    optimizer: str
    playbook: FloatArray
    torch: FloatArray
    first_step: int | None
    material_frac: float
    causes: tuple[Cause, ...]

    @property
    def apart(self) -> FloatArray:
        """Relative difference of the updates, from 0 to 2, shape (steps,)."""
        return apart(self.playbook, self.torch)

    @property
    def first_ratio(self) -> float | None:
        """Update of torch's form over that of the playbook's at `first_step`; None where they never differ."""
        if self.first_step is None:
            return None
        play, torch = float(self.playbook[self.first_step]), float(self.torch[self.first_step])
        return torch / play if play else float("inf")

    @property
    def way_ratio(self) -> float:
        """Sum of all updates of torch's form over that of the playbook's: how much farther it has gone at the end."""
        play, torch = float(np.abs(self.playbook).sum()), float(np.abs(self.torch).sum())
        return torch / play if play else 1.0 if not torch else float("inf")

    @property
    def material_steps(self) -> int:
        """How many updates differ by more than `material_frac`."""
        return int((self.apart > self.material_frac).sum())

    @property
    def last_material_step(self) -> int | None:
        """The last of them."""
        found = np.flatnonzero(self.apart > self.material_frac)
        return int(found[-1]) if found.size else None

    def to_dict(self) -> dict[str, Any]:
        """Return what a record keeps: no arrays."""
        names = ("optimizer", "first_step", "first_ratio", "way_ratio", "material_steps", "last_material_step")
        found = {name: getattr(self, name) for name in names}
        largest = float(self.apart.max()) if self.apart.size else 0.0
        causes = [cause.to_dict() for cause in self.causes]
        return found | {"steps": len(self.playbook), "largest": largest, "causes": causes}

    def __repr__(self) -> str:
        """Return where the forms part, by how much, and why, line by line."""
        if self.first_step is None:
            return f"{self.optimizer}: the playbook's form and torch's give the same updates."
        last = self.last_material_step
        many = f"{self.material_steps:,} of {len(self.playbook):,} updates differ by more than {self.material_frac:.0%}"
        head = (
            f"{self.optimizer}: torch's update is {self.first_ratio:.4g} times the playbook's at step {self.first_step}; {many}"
            + (f", the last at step {last:,}" if last is not None else "")
            + f"; torch goes {self.way_ratio:.4g} times as far."
        )
        return "\n".join([head, *_lines(self.causes)])


def _lines(causes: Sequence[Cause]) -> list[str]:
    return [f"  {c.name}: {c.text}. Alone: {c.first:.2g} at first, {c.largest:.2g} at most." for c in causes]
