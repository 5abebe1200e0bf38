"""`ArmTables`: the sweeps of a baseline, a modified workload and the modified one with a warmup, side by side (F1.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trials import RecordLike

__all__ = ["ArmLimits", "ArmTables", "Arms", "lr_key"]

RISING = frozenset({"recovered", "settling", "lasting", "divergent"})


class Arms(NamedTuple):
    """Three studies of the same learning rates; `diagnose_comparison(*arms)` reads them.

    Attributes:
        baseline: the workload as it was.
        modified: the workload with the modification.
        warmed: the modified workload with a warmup in front; None where that was not trained.
    """

    baseline: RecordLike
    modified: RecordLike
    warmed: RecordLike | None = None


@dataclass(frozen=True, kw_only=True)
class ArmLimits:
    """The thresholds of `diagnose_comparison`, where their sources stand."""

    noise_sds: float
    material_frac: float
    low_ratio: float
    min_low_lrs: int
    min_seeds: int
    min_ratio: float
    collapse_frac: float
    cure_frac: float
    up_to_lr: float | None


@dataclass(frozen=True)
class ArmTables:
    """The three sweeps, and what they are held against."""

    baseline: SweepTable
    modified: SweepTable
    warmed: SweepTable | None
    limits: ArmLimits

    @property
    def shared(self) -> list[tuple[LRPoint, LRPoint]]:
        """The baseline's and the modified point of every lr that both were trained at under enough seeds."""
        modified = {lr_key(p.lr): p for p in self.modified.points}
        pairs = [(p, modified[lr_key(p.lr)]) for p in self.baseline.points if lr_key(p.lr) in modified]
        return [(a, b) for a, b in pairs if min(len(a.seeds), len(b.seeds)) >= self.limits.min_seeds]

    @property
    def lost(self) -> list[tuple[LRPoint, LRPoint]]:
        """Those at which the baseline trains under every seed, and the modified one ends worse with a sign of instability."""
        return [(a, b) for a, b in self.shared if not a.lasting and self.worse(b, a) and self.sign(b)]

    @property
    def edge(self) -> float | None:
        """The smallest lr at which instability is seen in either arm."""
        unstable = [a.lr for a, b in self.shared if a.unstable or b.unstable]
        return min([b.lr for _, b in self.lost] + unstable, default=None)

    @property
    def low(self) -> list[tuple[LRPoint, LRPoint]]:
        """The shared lrs well below the edge; without an edge none is known to be low."""
        edge = self.edge
        if edge is None:
            return []
        return [(a, b) for a, b in self.shared if a.lr * self.limits.low_ratio <= edge * (1 + 1e-9)]

    @property
    def unreadable(self) -> str | None:
        """Why nothing can be said at all, None where something can."""
        if not self.shared:
            trained = self.baseline.points or self.modified.points
            few = f"no lr was trained under {self.limits.min_seeds} seeds in both arms"
            return few if trained else "no sweep was trained to its end"
        if not self.baseline.learned:
            return "no lr brought the baseline's loss clearly below that of its initial model"
        return None

    def sign(self, point: LRPoint) -> Literal["rise", "collapse"] | None:
        """What of the modified runs at an lr looks unstable, and not merely slow.

        A rise: the loss of at least half of the seeds goes up. A collapse: it does not, but the runs end clearly above those of
        a smaller lr. They got stuck, and the curve alone cannot tell whether instability is why.
        """
        if 2 * sum(outcome in RISING for outcome in point.outcomes) >= len(point.outcomes):
            return "rise"
        smaller = [p for p in self.modified.points if p.lr < point.lr and not p.unstable]
        best = min(smaller, key=lambda p: p.loss, default=None)
        if best is None or not self.worse(point, best):
            return None
        return "collapse" if point.loss - best.loss > self.limits.collapse_frac * self.modified.progress else None

    def cured(self, before: LRPoint, without: LRPoint) -> bool | None:
        """Whether the warmup makes an lr train that the modification lost; None where that was not tried often enough.

        It has to close enough of the gap to the baseline; a run that diverged stands at the loss of the initial model.
        """
        points = () if self.warmed is None else self.warmed.points
        tried = [p for p in points if lr_key(p.lr) == lr_key(without.lr) and len(p.seeds) >= self.limits.min_seeds]
        if not tried:
            return None
        lost = min(without.loss, self.baseline.loss_ref) if math.isinf(without.loss) else without.loss
        enough = lost - tried[0].loss >= self.limits.cure_frac * (lost - before.loss)
        return not tried[0].unstable and enough and self.worse(without, tried[0])

    def margin(self, one: LRPoint, other: LRPoint) -> float:
        """How far two mean losses lie apart by the seeds alone, and at least what is not worth a word."""
        finite = [[loss for loss in p.losses if math.isfinite(loss)] for p in (one, other)]
        variances = [float(np.var(losses, ddof=1)) for losses in finite if len(losses) > 1]
        spread = math.sqrt(float(np.mean(variances))) if variances else 0.0
        return max(self.limits.noise_sds * spread, self.limits.material_frac * self.baseline.progress)

    def worse(self, one: LRPoint, other: LRPoint) -> bool:
        """Whether `one` ends clearly above `other`."""
        return math.isfinite(other.loss) and one.loss - other.loss > self.margin(one, other)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the points of every arm that was trained, as JSON values for a figure."""
        known = {"baseline": self.baseline, "modified": self.modified, "warmed": self.warmed}
        return {
            name: [
                {"lr": p.lr, "loss": p.loss, "losses": list(p.losses), "seeds": list(p.seeds), "unstable": p.unstable}
                for p in table.points
            ]
            for name, table in known.items()
            if table is not None
        }


def lr_key(lr: float) -> str:
    """Return a learning rate to ten digits: two that agree to them are one."""
    return f"{lr:.9e}"
