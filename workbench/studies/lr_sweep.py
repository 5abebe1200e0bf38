"""`LRSweep`: the learning rates to train at, so that lr* and the onset of instability are known (F1.6, F1.12).

With `lrs` given, exactly those are trained. Without, the sweep finds its own range: forward passes give the scale,
short runs the decade, full-length runs by factors of 2 the interior of the bowl, bisection the onset of instability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.config import TrainConfig
from workbench.diagnostics.growth import growth_edge
from workbench.diagnostics.lr_points import SweepTable, sweep_table
from workbench.diagnostics.lr_search import bisect_next, refine_next, unstable_bracket
from workbench.diagnostics.stages import stage_view
from workbench.errors import ConfigError
from workbench.studies.base import Study
from workbench.studies.critical_lr import measure_critical_lr
from workbench.studies.session import Session

__all__ = ["LRSweep"]

RANGE_STAGE, SWEEP_STAGE, EDGE_STAGE = "lr_range", "lr_sweep", "lr_unstable"


@dataclass(frozen=True, kw_only=True)
class LRSweep(Study):
    """A sweep of the learning rate over one workload.

    Attributes:
        lrs: exactly these, without extension or bisection; None finds the range.
        seeds: trials per learning rate; the same seeds, and so the same batches, at every lr.
        steps: length of a trial; None is the baseline's.
        tolerance: width of the bracket around `lr.unstable`, as a share of its lower end.
        short_frac: length of a range-finding run as a share of `steps` (rule of thumb; the best lr of a short run is
            several times that of the whole, so short runs only say where to look).
        min_short_steps: where a short run would have fewer steps, the range is found at full length.
        refinements: at most this many further lrs near lr* on minibatches, whose noise hides small differences.
        full_batch_refinements: the same for full batches, where every digit counts.
        decades: how far from the initial model's critical lr the sweep may go, both ways together.
    """

    stem: ClassVar[str] = "lr_sweep"

    lrs: Sequence[float] | None = None
    seeds: int = 1
    steps: int | None = None
    tolerance: float = 0.05
    short_frac: float = 0.0625
    min_short_steps: int = 200
    refinements: int = 1
    full_batch_refinements: int = 16
    decades: float = 12.0

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds!r} must be an integer of at least 1.")
        if not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance={self.tolerance!r} must be between 0 and 1: 0.05 brackets to 5 %.")
        for name in ("refinements", "full_batch_refinements", "min_short_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0.")
        if not 0 < self.short_frac <= 1 or not self.decades > 0:
            raise ConfigError(f"short_frac={self.short_frac!r} must be in (0, 1] and decades={self.decades!r} above 0.")
        if self.lrs is not None:
            wrong = [lr for lr in self.lrs if not (isinstance(lr, (int, float)) and 0 < lr < math.inf)]
            if wrong or not len(self.lrs):
                raise ConfigError(
                    f"lrs={list(self.lrs)!r} must hold at least one lr, each finite and above 0; wrong: {wrong}."
                )

    def extend(self, session: Session) -> None:
        """Run the sweep's trials inside a study that is already open."""
        if self.lrs is not None:
            for lr in self.lrs:
                self._at(session, float(lr), SWEEP_STAGE)
            return
        limits = self._limits(session)
        center = self._coarse(session, limits)
        if center is None:
            return
        self._climb(session, center, limits)
        if sweep_table(session.record).best is not None:
            self._bracket(session, limits)
            self._refine(session)

    def _limits(self, session: Session) -> tuple[float, float, float]:
        """Return (lowest, critical, highest) lr: the scale comes from forward passes on the initial model."""
        known = session.record.facts.get("initial_critical_lr")
        if known is None:
            critical = measure_critical_lr(session.workload, session.config, session.device).value
            known = critical if critical is not None else session.config.peak_lr
            session.facts(initial_critical_lr=known, initial_critical_lr_found=critical is not None)
        reach = 10 ** (self.decades / 2)
        return known / reach, known, known * reach

    def _short_steps(self, session: Session) -> int:
        steps = int(session.config.total_steps * self.short_frac)
        return steps if steps >= self.min_short_steps else session.config.total_steps

    def _coarse(self, session: Session, limits: tuple[float, float, float]) -> float | None:
        """Return the best lr of a coarse grid of short runs, from 4 times the critical lr down, and beyond both ends.

        The grid goes down at least to 1/16 of the critical lr, and on as long as its lowest lr is the best.
        """
        low, critical, high = limits
        steps = self._short_steps(session)
        full = steps == session.config.total_steps
        stage = SWEEP_STAGE if full else RANGE_STAGE
        base = session.config.peak_lr
        for k in (1, 0, -1, -2):
            self._at(session, _on_lattice(critical * 4.0**k, base, 4.0), stage, steps=steps)

        def table() -> SweepTable:
            return sweep_table(session.record if full else stage_view(session.record, RANGE_STAGE))

        self._widen(table, lambda lr: self._at(session, lr, stage, steps=steps), 4.0, low, high)
        found = table()
        return None if found.best is None else found.points[found.best].lr

    def _climb(self, session: Session, center: float, limits: tuple[float, float, float]) -> None:
        """Run full-length trials by factors of 2 around `center` until the best lies between two others."""
        low, _, high = limits
        for lr in (center, center * 2):
            self._at(session, lr, SWEEP_STAGE)
        self._widen(lambda: sweep_table(session.record), lambda lr: self._at(session, lr, SWEEP_STAGE), 2.0, low, high)

    def _widen(
        self,
        table: Callable[[], SweepTable],
        run: Callable[[float], None],
        factor: float,
        low: float,
        high: float,
    ) -> None:
        """Extend the grid by `factor` on the side where its best lies on the border, within the limits."""
        while True:
            now = table()
            lrs = [p.lr for p in now.points]
            best = now.best
            if best is None:
                # Nothing learned: too high is the usual reason, and costs least to rule out.
                following: float | None = lrs[0] / factor if lrs[0] / factor >= low else lrs[-1] * factor
            else:
                following = _beyond(lrs, best, factor)
            if following is None or not low <= following <= high:
                return
            run(following)

    def _bracket(self, session: Session, limits: tuple[float, float, float]) -> None:
        """Find the smallest lasting unstable lr above lr*, then bisect."""
        table = sweep_table(session.record)
        while unstable_bracket(table) is None and table.points[-1].lr * 2 <= limits[2]:
            self._at(session, table.points[-1].lr * 2, EDGE_STAGE)
            table = sweep_table(session.record)
        hint = self._short_edge(session) or growth_edge(session.record)
        while (lr := bisect_next(sweep_table(session.record), tolerance=self.tolerance, hint=hint)) is not None:
            self._at(session, lr, EDGE_STAGE)

    def _short_edge(self, session: Session) -> float | None:
        """Return where short runs become unstable, as a hint that saves full-length trials; None without short runs."""
        steps = self._short_steps(session)
        bracket = unstable_bracket(sweep_table(session.record))
        if steps == session.config.total_steps or bracket is None or bracket.lower is None:
            return None
        for lr in (bracket.lower, bracket.upper):
            self._at(session, lr, RANGE_STAGE, steps=steps)

        def table() -> SweepTable:
            return sweep_table(stage_view(session.record, RANGE_STAGE))

        while (lr_next := bisect_next(table(), tolerance=self.tolerance)) is not None:
            self._at(session, lr_next, RANGE_STAGE, steps=steps)
        found = unstable_bracket(table())
        return None if found is None else found.middle

    def _refine(self, session: Session) -> None:
        """Sharpen lr*."""
        table = sweep_table(session.record)
        for _ in range(self.full_batch_refinements if table.noise_free else self.refinements):
            lr = refine_next(table)
            if lr is None:
                return
            self._at(session, lr, SWEEP_STAGE)
            table = sweep_table(session.record)

    def _at(self, session: Session, lr: float, stage: str, *, steps: int | None = None) -> None:
        for config in seeded(session.config, lr, self.seeds, steps=steps):
            session.trial(config, stage=stage)


def seeded(config: TrainConfig, lr: float, seeds: int, *, steps: int | None = None) -> list[TrainConfig]:
    """Return `config` at `lr` under each seed, the baseline's own first; optionally shortened to `steps`."""
    from workbench.studies.session import at_length

    return [
        at_length(config, steps).replace(
            peak_lr=lr, shared_seed=config.shared_seed + k, per_host_seed=config.per_host_seed + k
        )
        for k in range(seeds)
    ]


def _beyond(lrs: Sequence[float], best: int, factor: float) -> float | None:
    if best == 0:
        return lrs[0] / factor
    return lrs[-1] * factor if best == len(lrs) - 1 else None


def _on_lattice(lr: float, base: float, factor: float) -> float:
    """Return the lr nearest to `lr` among base * factor^k, so that the baseline's own lr is one of the grid."""
    return base * factor ** round(math.log(lr / base) / math.log(factor))
