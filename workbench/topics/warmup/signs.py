"""The two signs that call for a warmup: the best lr at the edge, and a rise after a decline far above it (F3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.curves.judged import judged
from workbench.curves.rise_causes import confirmation
from workbench.curves.trials import RecordLike
from workbench.record.roles import Role
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep

__all__ = ["WarmupSigns", "warmup_signs"]


@dataclass(frozen=True, kw_only=True)
class WarmupSigns:
    """What calls for a warmup.

    Attributes:
        at_edge: the best lr sits at the edge of the unstable region, and no fix run has shown that this costs nothing
            (F1.12, F1.4); None where it was not measured, or between lrs too far apart to tell.
        rises: a run far above the best lr falls steadily and then rises (F1.13); None where none was made.
        unstable_lr: the lr at which training becomes lastingly unstable, None where it was not found.
        lower: largest lr below it that is stable.
        upper: smallest lr that is not.
    """

    at_edge: bool | None
    rises: bool | None
    unstable_lr: float | None
    lower: float | None
    upper: float | None

    @property
    def holds(self) -> bool | None:
        """Whether one of them holds; None where neither does and one was not looked for."""
        if self.at_edge or self.rises:
            return True
        return None if None in (self.at_edge, self.rises) else False


def warmup_signs(record: RecordLike, *, edge_ratio: float = 2.0, far: tuple[float, float] = (5.0, 10.0)) -> WarmupSigns:
    """Return the two signs, from the sweep and from the runs at 5 and 10 times the best lr.

    Args:
        record: a study.
        edge_ratio: lr* is at the edge when instability starts at or below this many times lr*, so a bracket wider than that
            does not tell (rule of thumb).
        far: between these multiples of the best lr a run of the sweep is as good as one made to confirm (F1.13).
    """
    sweep = diagnose_lr_sweep(record)
    edge, unstable = sweep["lr.at_edge"], sweep["lr.unstable"]
    lower, upper = unstable.evidence.get("lower"), unstable.evidence.get("upper")
    told = lower is not None and upper is not None and upper <= edge_ratio * lower * (1 + 1e-9)
    return WarmupSigns(
        at_edge=edge.status == "warn" if told else None,
        rises=_rises(record, record.facts.get("lr_star") or sweep["lr.best"].value, far),
        unstable_lr=unstable.value,
        lower=lower,
        upper=upper,
    )


def _rises(record: RecordLike, lr_star: float | None, far: tuple[float, float]) -> bool | None:
    if lr_star is None:
        return None
    study = judged(record)
    peers = {c.trial for c in study.full_length}
    low, high = far[0] * lr_star * (1 - 1e-6), far[1] * lr_star * (1 + 1e-6)
    runs = study.verdicts(lambda c: c.trial in peers and (c.stage == Role.CONFIRM or low <= c.lr <= high))
    shapes = [confirmation(item, lr_star=lr_star)["shape"] for item in runs]
    return any(shape == "rise after decline" for shape in shapes) if shapes else None
