"""`LRSweep`: the learning rates to train at, so that lr* and the onset of instability are known (F1.6, F1.12)."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

from workbench.checks import check_fields, check_integer
from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.curves.losses import bottomless
from workbench.curves.lr_search import (
    around,
    climb_round,
    edge_round,
    fill_round,
    on_lattice,
    raise_round,
    refine_round,
    unstable_bracket,
)
from workbench.curves.rise_causes import growth_edge
from workbench.curves.sweep import SweepTable
from workbench.curves.trial_curves import RecordLike
from workbench.errors import ConfigError
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session, at_length
from workbench.topics.lr_sweep.collect import measure_chance, measure_critical_lr
from workbench.train.stacks import check_lanes


class TrialRequest(NamedTuple):
    """A trial that a round asks for, and what for."""

    role: Role
    config: TrainConfig


def run_round(session: Session, requests: Sequence[TrialRequest]) -> list[TrialRecord]:
    """Run the trials of one round, of any roles and lengths, and return their records in the order asked; the same trial twice is one.

    Raises:
        WorkbenchError: one cannot be trained; it is named, and nothing is written.
    """
    unique: dict[TrainConfig, str] = {}
    for trial in requests:
        unique.setdefault(trial.config, trial.role)
    if not unique:
        return []
    session.collect("chance_loss", lambda: measure_chance(session.workload, session.config, session.device))
    sizes = check_lanes(session.workload, list(unique))
    mixed = len(set(unique.values())) > 1
    for config, stage in unique.items() if mixed else ():  # a trial keeps the stage that it was first written down with
        session.writer.trial(config.to_dict(), stage=stage, train_examples=sizes["train"])
    records = session.trials(list(unique), stage=next(iter(unique.values())))
    done = dict(zip(unique, records, strict=True))
    return [done[trial.config] for trial in requests]


ExtraTrials = Callable[[float], Sequence[TrialRequest]]

RANGE_STAGE, SWEEP_STAGE, EDGE_STAGE = Role.LR_RANGE, Role.LR_SWEEP, Role.LR_UNSTABLE
LARGEST = sys.float_info.max


class _Ask(Protocol):
    """Turns learning rates and what they are for into trials of each seed."""

    def __call__(self, lrs: Iterable[tuple[float, Role]]) -> list[TrialRequest]: ...


class _Limits(NamedTuple):
    """The lrs that a sweep may try: the scale it starts from, and how many times larger or smaller they may be.

    `reach` is how far where some lr learns, `blind` where none does, and `far` above the best lr and the baseline's
    in search of an unstable one.
    """

    critical: float
    reach: float
    blind: float
    far: float

    def of(self, table: SweepTable) -> tuple[float, float]:
        """Return the smallest and the largest lr."""
        reach = self.blind if table.best is None else self.reach
        return self.critical / reach, self.critical * reach

    def highest(self, table: SweepTable, base: float) -> float:
        """Return the largest lr at which to look for the onset of instability."""
        best = base if table.best is None else table.points[table.best].lr
        return min(self.critical * self.reach, self.far * max(best, base))


@dataclass(frozen=True, kw_only=True)
class LRSweep(Study):
    """A sweep of the learning rate over one workload.

    Attributes:
        lrs: exactly these, without extension or bisection, all in one round; None finds the range.
        seeds: trials per learning rate; the same seeds, and so the same batches, at every lr.
        steps: length of a trial; None is the baseline's.
        tolerance: width of the bracket around `lr.unstable`, as a share of its lower end.
        lanes: learning rates that one question asks for at a time, at most: more make fewer rounds of more trials.
        short_frac: length of a range-finding run as a share of `steps` (rule of thumb; the best lr of a short run is
            off by a factor of 2 to 4, so short runs only say where to look).
        min_short_steps: what a short run has at least.
        max_short_frac: where that is more than this share of `steps`, the range is found at full length (rule of thumb).
        refinements: at most this many further lrs near lr* on minibatches, whose noise hides small differences.
        full_batch_refinements: the same for full batches, where every digit counts.
        decades: how far from the initial model's critical lr the sweep may go, both ways together.
        blind_decades: the same while no lr learns anything (rule of thumb).
        far_ratio: how far above lr* and the baseline an unstable lr is looked for (rule of thumb).
    """

    stem: ClassVar[str] = "lr_sweep"

    lrs: Sequence[float] | None = None
    seeds: int = 1
    steps: int | None = None
    tolerance: float = 0.05
    lanes: int = 4
    short_frac: float = 0.0625
    min_short_steps: int = 200
    max_short_frac: float = 0.125
    refinements: int = 1
    full_batch_refinements: int = 20
    decades: float = 12.0
    blind_decades: float = 6.0
    far_ratio: float = 64.0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("seeds", "lanes"):
            check_integer(name, getattr(self, name))
        check_fields(self, "tolerance", lambda v: 0 < v < 1, "between 0 and 1: 0.05 brackets to 5 %")
        check_fields(self, "refinements full_batch_refinements min_short_steps", lambda v: v >= 0, "at least 0")
        check_fields(self, "short_frac max_short_frac", lambda v: 0 < v <= 1, "above 0 and at most 1")
        check_fields(self, "decades blind_decades far_ratio", lambda v: v > 0, "above 0")
        if self.lrs is not None:
            if isinstance(self.lrs, (str, bytes)) or not isinstance(self.lrs, Iterable):
                raise ConfigError(f"lrs={self.lrs!r} must be a list of learning rates, such as [0.1, 0.2].")
            _check_lrs(list(self.lrs))

    def extend(self, session: Session, *, extra_trials: ExtraTrials | None = None) -> None:
        """Run the sweep's trials inside a study that is already open.

        `extra_trials` takes the largest lr at which short runs were stable, and returns trials to train beside the first
        full-length ones: what another study is going to ask for costs less in company.
        """
        critical = partial(self._critical, session)
        rounds = self.rounds(session.config, lambda: session.record, critical=critical, extra_trials=extra_trials)
        for requests in rounds:
            run_round(session, requests)

    def rounds(
        self,
        config: TrainConfig,
        read: Callable[[], RecordLike],
        *,
        critical: Callable[[], float],
        extra_trials: ExtraTrials | None = None,
    ) -> Iterator[list[TrialRequest]]:
        """Yield the trials of one round after the other; the next one is asked for when the last one can be read.

        `config` is what is swept at its full length, `read` returns the trials so far, and `critical` the scale of the range.
        """
        ask = partial(self._requests, config)
        if self.lrs is not None:
            yield ask([(float(lr), SWEEP_STAGE) for lr in self.lrs])
            return
        limits = _Limits(critical(), 10 ** (self.decades / 2), 10 ** (self.blind_decades / 2), self.far_ratio)
        base, short = config.peak_lr, self._short_steps(config)
        coarse = [on_lattice(limits.critical * 4.0**k, base, 4.0) for k in (1, 0, -1, -2, -3, -4)]
        if short == config.total_steps:
            yield ask([(lr, SWEEP_STAGE) for lr in coarse[:4]])
            yield from self._search(ask, read, base, limits, near=())
            return
        start = yield from self._range(partial(ask, steps=short), read, base, limits, coarse)
        if start is None:
            yield ask([(lr, SWEEP_STAGE) for lr in coarse[1:5]])
            if judged(read()).sweep().best is None:
                return
        else:
            best, near = start
            extra = extra_trials(near[0]) if extra_trials is not None and near else ()
            yield [*ask(_first(best, near, base)), *extra]
        yield from self._search(ask, read, base, limits, near=() if start is None else near)

    def _critical(self, session: Session) -> float:
        """Return where the scale of the range lies: known from forward passes on the initial model."""
        known = session.record.facts.get("initial_critical_lr")
        if known is None:
            critical = measure_critical_lr(session.workload, session.config, session.device).value
            known = critical if critical is not None else session.config.peak_lr
            session.facts(initial_critical_lr=known, initial_critical_lr_found=critical is not None)
        return float(known)

    def _short_steps(self, config: TrainConfig) -> int:
        total = config.total_steps
        steps = max(int(total * self.short_frac), self.min_short_steps, 1)
        return steps if steps <= total * self.max_short_frac else total

    def _range(
        self, ask: _Ask, read: Callable[[], RecordLike], base: float, limits: _Limits, coarse: Sequence[float]
    ) -> Generator[list[TrialRequest], None, tuple[float, tuple[float, ...]] | None]:
        """Return the best lr of short runs and the two between which they turn unstable; None where none learns anything.

        The grid goes on as long as its border is the best.
        """
        lrs: Iterable[float] = coarse
        while lrs:
            yield ask([(lr, RANGE_STAGE) for lr in lrs])
            record = read()
            table = judged(record).role(RANGE_STAGE).sweep()
            if bottomless(record) is not None:
                break
            low, high = limits.of(table)
            lrs = (
                *climb_round(table, lowest=low, highest=high, lanes=2, blind_lanes=self.lanes),
                *raise_round(table, highest=limits.highest(table, base)),
                *edge_round(table, lanes=self.lanes, tolerance=self.tolerance),
            )
        bracket = unstable_bracket(table)
        near = () if bracket is None or bracket.lower is None else (bracket.lower, bracket.upper)
        return None if table.best is None else (table.points[table.best].lr, near)

    def _search(
        self, ask: _Ask, read: Callable[[], RecordLike], base: float, limits: _Limits, near: tuple[float, ...]
    ) -> Iterator[list[TrialRequest]]:
        """Ask for full-length trials until lr* lies inside its bowl and the onset of instability is bracketed."""
        refined = 0
        while True:
            record = read()
            table = judged(record).sweep()
            if bottomless(record) is not None:  # the higher the lr, the lower the loss
                return
            if table.noise_free and not near:
                near = around(growth_edge(record), self.tolerance)
            edge = raise_round(table, highest=limits.highest(table, base), near=near) or edge_round(
                table, lanes=self.lanes, tolerance=self.tolerance, near=near
            )
            left = (self.full_batch_refinements if table.noise_free else self.refinements) - refined
            low, high = limits.of(table)
            grid = climb_round(table, lowest=low, highest=high, lanes=1, blind_lanes=self.lanes)
            if not grid and not (table.noise_free and left > 0):
                grid = fill_round(table, base=base)
            sharper = () if grid or left < 1 else refine_round(table, lanes=min(self.lanes, left))
            if sharper and edge and table.best is not None:
                # The search for the edge is about to cut the same gap: on minibatches what it trains often answers the question.
                apart = table.noise_free and min(edge) > table.points[table.best + 1].lr
                sharper = sharper if apart else ()
            refined += len(sharper)
            wanted = [(lr, SWEEP_STAGE) for lr in (*grid, *sharper)] + [(lr, EDGE_STAGE) for lr in edge]
            if not wanted:
                return
            yield ask(wanted)

    def _requests(
        self, config: TrainConfig, lrs: Iterable[tuple[float, Role]], *, steps: int | None = None
    ) -> list[TrialRequest]:
        return [TrialRequest(stage, seed) for lr, stage in lrs for seed in seeded(config, lr, self.seeds, steps=steps)]


def _first(best: float, near: tuple[float, ...], base: float) -> list[tuple[float, Role]]:
    """Return the first full-length round: the best lr of the short runs, one up to 4 times as large, and the edge.

    The edge is looked for at the very lrs of the short runs: what had blown up for good by then has done so at full length as well.
    """
    center = on_lattice(best, base, 2.0)
    top = min((4 * center, *near[:1]))
    higher = base * 2.0 ** math.floor(math.log2(top / base) + 1e-9)
    other = higher if higher > center else center / 4
    return [(lr, SWEEP_STAGE) for lr in (center, other)] + [(lr, EDGE_STAGE) for lr in near]


def _check_lrs(lrs: list[float]) -> None:
    wrong = [lr for lr in lrs if type(lr) is bool or not (isinstance(lr, (int, float)) and 0 < lr <= LARGEST)]
    if not lrs:
        raise ConfigError("lrs=[] holds no learning rate: give at least one, or None to let the sweep find its range.")
    if wrong:
        raise ConfigError(f"lrs={lrs!r} must hold numbers that are finite and above 0; wrong: {wrong}.")
    twice = [lr for lr, count in Counter(float(lr) for lr in lrs).items() if count > 1]
    if twice:
        raise ConfigError(
            f"lrs={lrs!r} holds the same lr more than once: {twice}. Each is trained once; for several trials of one lr ask "
            "for seeds=..."
        )


def seeded(config: TrainConfig, lr: float, seeds: int, *, steps: int | None = None) -> list[TrainConfig]:
    """Return `config` at `lr` under each of so many seeds, the baseline's own first; with `steps` short runs of that length."""
    if steps is not None:
        config = at_length(config, steps).replace(eval_every_steps=steps, checkpoint_every_steps=steps)
    return [
        config.replace(peak_lr=lr, shared_seed=config.shared_seed + k, per_host_seed=config.per_host_seed + k)
        for k in range(seeds)
    ]
