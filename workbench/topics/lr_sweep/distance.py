"""`lr_distance`: how far one learning rate of a sweep lies from the best and from where instability starts (F1.6, F1.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.findings.diagnosis import Diagnosis

__all__ = ["LRDistance", "lr_distance", "swept_lrs", "swept_trials"]


class LRDistance(NamedTuple):
    """One trained learning rate, held against the findings of its sweep.

    Attributes:
        lr: the learning rate.
        loss: the objective there; infinite where a seed diverged, NaN where unknown.
        unstable: its runs did not stay stable.
        best: lr*; None where it was not measured.
        edge: the learning rate from which on training is unstable; None where none was found.
    """

    lr: float
    loss: float
    unstable: bool
    best: float | None
    edge: float | None

    @property
    def to_best(self) -> float | None:
        """The lr over lr*."""
        return None if self.best is None else self.lr / self.best

    @property
    def to_edge(self) -> float | None:
        """The lr over the unstable one: 1 is the edge, above it training does not stay stable."""
        return None if self.edge is None else self.lr / self.edge

    @property
    def words(self) -> str:
        """All of it as a sentence."""
        how = "diverged" if math.isinf(self.loss) else "unstable" if self.unstable else "stable"
        how = "not trained" if math.isnan(self.loss) else how
        end = f", training loss at the end {self.loss:.4g}" if math.isfinite(self.loss) else ""
        best = "lr* not measured" if self.to_best is None else f"{self.to_best:.3g} x lr* ({self.best:.4g})"
        edge = (
            "unstable not found" if self.to_edge is None else f"{self.to_edge:.3g} x the unstable lr ({self.edge:.4g})"
        )
        return f"lr {self.lr:.4g}: {how}{end}; {best}; {edge}."


def swept_lrs(diagnosis: Diagnosis) -> list[float]:
    """Return the learning rates of the sweep that `diagnose_lr_sweep` judged, in order."""
    return sorted(float(row["lr"]) for row in _points(diagnosis))


def swept_trials(diagnosis: Diagnosis) -> list[int]:
    """Return the trials behind them, in order of the learning rate."""
    rows = sorted(_points(diagnosis), key=lambda row: float(row["lr"]))
    return [int(trial) for row in rows for trial in row.get("trials") or ()]


def lr_distance(diagnosis: Diagnosis, lr: float) -> LRDistance:
    """Hold a learning rate against lr* and the unstable one.

    Args:
        diagnosis: of `diagnose_lr_sweep`.
        lr: one that was trained, or another; the objective is unknown there.
    """
    row = next((row for row in _points(diagnosis) if math.isclose(row["lr"], lr, rel_tol=1e-9)), {})
    loss = row.get("loss")
    return LRDistance(
        lr=lr,
        loss=math.inf if row.get("state") == "diverged" else math.nan if loss is None else float(loss),
        unstable=bool(row.get("unstable")),
        best=_value(diagnosis, "lr.best"),
        edge=_value(diagnosis, "lr.unstable"),
    )


def _points(diagnosis: Diagnosis) -> Sequence[Mapping[str, Any]]:
    found = diagnosis["lr.best"].evidence.get("points") if "lr.best" in diagnosis else None
    return found or ()


def _value(diagnosis: Diagnosis, code: str) -> float | None:
    found = diagnosis[code].value if code in diagnosis else None
    return None if found is None or not math.isfinite(found) else float(found)
