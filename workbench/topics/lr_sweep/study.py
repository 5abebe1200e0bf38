"""`LRSweep`: the learning rates to train at, so that lr* and the onset of instability are known (F1.6, F1.12)."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

from workbench.checks import check_fields, check_integer
from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.curves.losses import bottomless
from workbench.curves.lr_search import (
    SAME,
    around,
    below_edge,
    beside_round,
    climb_round,
    edge_round,
    fill_round,
    on_lattice,
    raise_round,
    refine_round,
    unstable_bracket,
)
from workbench.curves.spikes import growth_edge
from workbench.curves.sweep import FEWEST_STEPS, SweepTable
from workbench.curves.trial_curves import RecordLike
from workbench.errors import ConfigError
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.budget import BudgetSpent
from workbench.studies.session import Session, at_length
from workbench.topics.lr_sweep.collect import measure_chance, measure_critical_lr
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep


class TrialRequest(NamedTuple):
    """A trial that a round asks for, and what for."""

    role: Role
    config: TrainConfig


def run_round(session: Session, requests: Sequence[TrialRequest]) -> list[TrialRecord]:
    """Run the trials of one round, of any roles and lengths, and return their records in the order asked; the same trial twice is one."""
    unique: dict[TrainConfig, str] = {}
    for trial in requests:
        unique.setdefault(trial.config, trial.role)
    done: dict[TrainConfig, TrialRecord] = {}
    while len(done) < len(unique):  # a trial that diverges early leaves more for the next ones
        paid = session.within_budget([config for config in unique if config not in done])
        if not paid:
            raise BudgetSpent
        session.collect("chance_loss", lambda: measure_chance(session.workload, session.config, session.device))
        sizes = session.check(paid)
        mixed = len({unique[config] for config in paid}) > 1
        for config in paid if mixed else ():  # a trial keeps the stage that it was first written down with
            session.writer.trial(config.to_dict(), stage=unique[config], train_examples=sizes["train"])
        done |= dict(zip(paid, session.trials(paid, stage=unique[paid[0]]), strict=True))
    return [done[trial.config] for trial in requests]


ExtraTrials = Callable[[float], Sequence[TrialRequest]]
_PROBES = 8
"""Short runs that one of full length pays for where few are left: their best lr is that of full length, or up to twice as large (measured)."""
_COUNTS = 2.0  # how far from the own lr another one is that `lr.too_high` and `lr.too_low` compare it with
_OWN_START = (0.25, 1.0, 4.0)
"""Where a custom step is swept from, over its own lr: no forward pass tells the scale of its updates (rule of thumb)."""
LARGEST = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class LRSweep(Study):
    """A sweep of the learning rate over one workload.

    Without `lrs` forward passes give the scale, short runs the decade and where to look for the onset of instability, full-length runs
    the minimum's surroundings and the onset itself. Trials of one round do not depend on each other and train side by side.

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
        edge_margin: a bracket around `lr.unstable` whose lower end is so many times lr* is not narrowed any more, as no recommendation
            depends on it; narrowed one lr at a time until then. None narrows it wherever it is.
        start: lrs of the first round as multiples of the baseline's, whose own trial is there already; the sweep climbs from them at
            full length, for a training that was tuned by somebody. None finds the range as described above.
        scarce: whether fewer runs of full length are left than it takes to find the range: short ones choose the first of them then.
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
    edge_margin: float | None = None
    start: Sequence[float] | None = None
    scarce: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("seeds", "lanes"):
            check_integer(name, getattr(self, name))
        check_fields(self, "tolerance", lambda v: 0 < v < 1, "between 0 and 1: 0.05 brackets to 5 %")
        check_fields(self, "refinements full_batch_refinements min_short_steps", lambda v: v >= 0, "at least 0")
        check_fields(self, "short_frac max_short_frac", lambda v: 0 < v <= 1, "above 0 and at most 1")
        check_fields(self, "decades blind_decades far_ratio", lambda v: v > 0, "above 0")
        for lrs in (self.lrs, self.start):
            if lrs is not None:
                _check_lrs(lrs)

    def extend(
        self, session: Session, *, extra_trials: ExtraTrials | None = None, full_tolerance: float | None = None
    ) -> None:
        """Run the sweep's trials inside a study that is already open.

        `extra_trials` takes the largest lr at which short runs were stable, and returns trials to train beside the first
        full-length ones: what another study is going to ask for costs less in company. `full_tolerance` stands for `tolerance` in
        full-length runs, where the last digits of `lr.unstable` are not wanted yet.
        """
        critical = partial(self._critical, session)
        own = self.lrs is None and self.start is None and session.workload.step is not None
        rounds = (replace(self, start=_OWN_START) if own else self).rounds(
            session.config,
            lambda: session.record,
            critical=critical,
            extra_trials=extra_trials,
            full_tolerance=full_tolerance,
            pays=session.pays,
        )
        for requests in rounds:
            run_round(session, requests)

    def conclude(self, session: Session) -> None:
        """Store the best and the unstable learning rate, which the table of studies shows."""

        def found() -> dict[str, float | None]:
            told = diagnose_lr_sweep(session.record)
            return {code: told[code].value for code in ("lr.best", "lr.unstable")}

        session.collect("swept", found)

    def rounds(
        self,
        config: TrainConfig,
        read: Callable[[], RecordLike],
        *,
        critical: Callable[[], float],
        extra_trials: ExtraTrials | None = None,
        full_tolerance: float | None = None,
        pays: Callable[[Sequence[TrainConfig]], bool] = lambda _: True,
    ) -> Iterator[list[TrialRequest]]:
        """Yield the trials of one round after the other, the one that tells most first; the next one is asked for when the last one can be read.

        `config` is what is swept at its full length, `read` returns the trials so far, `critical` the scale of the range, and `pays` says
        whether trials can be paid for.
        """
        scale = critical() if self.lrs is None else config.peak_lr
        rounds = _Rounds(self, config, read, scale, full_tolerance or self.tolerance, pays)
        if self.lrs is not None:
            yield rounds.ask(self.lrs)
            return
        if self.start is not None:
            yield rounds.ask([factor * config.peak_lr for factor in self.start])
            yield from rounds.full_length(())
            return
        coarse = [on_lattice(rounds.critical * 4.0**k, config.peak_lr, 4.0) for k in (1, 0, -1, -2, -3, -4)]
        short, near = self._short_steps(config), tuple[float, ...]()
        if self.scarce or short == config.total_steps:
            chosen = (yield from rounds.chosen_by_short_runs((config.peak_lr, *coarse[2:4]))) if self.scarce else None
            yield rounds.ask([chosen] if chosen else (coarse[k] for k in (2, 1, 3, 0)))
        else:
            start, near = yield from rounds.short_runs(coarse, short)
            if start is not None:
                extra = extra_trials(near[0]) if extra_trials is not None and near else ()
                first = _first(start, near, config.peak_lr)
                if near and near[1] <= (1 + rounds.tolerance) * max(first):
                    near = near[1:]  # the first round's own lr is the stable side of a bracket that is narrow enough
                yield [*rounds.ask(first), *rounds.ask(near, Role.LR_UNSTABLE), *extra]
            else:
                yield rounds.ask(coarse[1:5])
                if judged(read()).sweep().best is None:
                    return
        yield from rounds.full_length(near)

    def _critical(self, session: Session) -> float:
        """Return where the scale of the range lies: known from forward passes on the initial model."""
        known = session.record.facts.get("initial_critical_lr")
        if known is None:
            found = session.workload, session.config, session.device
            critical = None if session.workload.step is not None else measure_critical_lr(*found).value
            known = critical if critical is not None else session.config.peak_lr
            session.facts(initial_critical_lr=known, initial_critical_lr_found=critical is not None)
        return float(known)

    def _short_steps(self, config: TrainConfig) -> int:
        total = config.total_steps
        steps = max(int(total * self.short_frac), self.min_short_steps, 1)
        return steps if steps <= total * self.max_short_frac else total


@dataclass(frozen=True)
class _Rounds:
    """The rounds of one sweep of `config`: what is asked for next, given the trials that `read` returns."""

    sweep: LRSweep
    config: TrainConfig
    read: Callable[[], RecordLike]
    critical: float
    tolerance: float
    pays: Callable[[Sequence[TrainConfig]], bool]

    def ask(self, lrs: Iterable[float], role: Role = Role.LR_SWEEP, *, steps: int | None = None) -> list[TrialRequest]:
        """Return a trial of each lr and seed."""
        seeds = self.sweep.seeds
        return [TrialRequest(role, one) for lr in lrs for one in seeded(self.config, float(lr), seeds, steps=steps)]

    def _limits(self, table: SweepTable) -> tuple[float, float, float]:
        """Return the smallest and the largest lr that may be tried, and the largest at which to look for instability."""
        wide, base = 10 ** (self.sweep.decades / 2), self.config.peak_lr
        reach = 10 ** (self.sweep.blind_decades / 2) if table.best is None else wide
        best = base if table.best is None else table.points[table.best].lr
        highest = min(self.critical * wide, self.sweep.far_ratio * max(best, base))
        return self.critical / reach, self.critical * reach, highest

    def _narrowed(self, table: SweepTable, near: tuple[float, ...]) -> tuple[float, ...]:
        """Return the lrs that narrow the bracket around the onset of instability, as far as it is wanted."""
        sweep, bracket = self.sweep, unstable_bracket(table)
        if sweep.edge_margin is None:
            return edge_round(table, lanes=sweep.lanes, tolerance=self.tolerance, near=near)
        if bracket is not None and table.best is not None:
            far = sweep.edge_margin * table.points[table.best].lr / SAME
            if (bracket.lower or 0.0) >= far:
                return ()
        return edge_round(table, lanes=1, tolerance=self.tolerance, near=near)

    def short_runs(
        self, lrs: Sequence[float], steps: int
    ) -> Generator[list[TrialRequest], None, tuple[float | None, tuple[float, ...]]]:
        """Return the best lr of short runs, None where none learns anything, and the two between which they turn unstable."""
        lanes, asked = self.sweep.lanes, set[float]()
        while lrs := [lr for lr in lrs if lr not in asked]:  # a run that was of no use is of none a second time
            asked.update(lrs)
            yield self.ask(lrs, Role.LR_RANGE, steps=steps)
            record = self.read()
            table = judged(record).role(Role.LR_RANGE).sweep()
            if bottomless(record) is not None:
                break
            low, high, highest = self._limits(table)
            lrs = (
                *climb_round(table, lowest=low, highest=high, lanes=2, blind_lanes=lanes),
                *raise_round(table, highest=highest),
            )
            edge = edge_round(table, lanes=lanes, tolerance=self.sweep.tolerance)
            if self._leaves_a_whole_run((*lrs, *edge), steps):  # which tells more than the edge of short ones
                lrs = (*lrs, *edge)
        bracket = unstable_bracket(table)
        if table.best is None:
            return None, ()
        near = () if bracket is None or bracket.lower is None else (bracket.lower, bracket.upper)
        return table.points[table.best].lr, near

    def _leaves_a_whole_run(self, lrs: Sequence[float], steps: int) -> bool:
        short = [trial.config for trial in self.ask(lrs, steps=steps)]
        return self.pays([*short, self.config.replace(peak_lr=self.config.peak_lr / 2)])

    def chosen_by_short_runs(self, lrs: Sequence[float]) -> Generator[list[TrialRequest], None, float | None]:
        """Return the best lr of short runs, from these on, but the own one; None where they tell nothing, or would leave no run of full length."""
        own, whole, asked, chosen = self.config.peak_lr, self.config.total_steps, set[float](), None
        steps = max(whole // _PROBES, FEWEST_STEPS)
        while 4 * steps <= whole:
            lrs = [lr for lr in dict.fromkeys(lrs) if lr not in asked][: _PROBES - len(asked)]
            while lrs and not self._leaves_a_whole_run(lrs, steps):
                lrs.pop()
            if not lrs:
                break
            asked.update(lrs)
            yield self.ask(lrs, Role.LR_RANGE, steps=steps)
            table = judged(self.read()).role(Role.LR_RANGE).sweep()
            low, high, _ = self._limits(table)
            if table.best is None:
                lrs = climb_round(table, lowest=low, highest=high, lanes=1, blind_lanes=2)
            else:
                best = table.points[table.best].lr
                apart = _COUNTS / SAME if own / SAME < best < own * SAME else SAME
                others = [
                    i for i, p in enumerate(table.points) if not p.unstable and not own / apart < p.lr < own * apart
                ]
                others = others if table.noise_free else below_edge(table, others)
                chosen = min((table.points[i] for i in others), key=lambda p: p.loss).lr if others else None
                lrs = beside_round(table, base=own, lowest=low, highest=high)
        return chosen

    def full_length(self, near: tuple[float, ...]) -> Iterator[list[TrialRequest]]:
        """Ask for full-length trials until lr* lies between two that are worse and the onset of instability is bracketed."""
        sweep, refined, asked = self.sweep, 0, set[float]()
        while True:
            record = self.read()
            table = judged(record).sweep()
            if bottomless(record) is not None:  # the higher the lr, the lower the loss
                return
            if table.noise_free and not near:
                near = around(growth_edge(record), sweep.tolerance)
            low, high, highest = self._limits(table)
            steps = {} if sweep.start is None else {"steps": (4.0,)}
            edge = raise_round(table, highest=highest, near=near, **steps)
            edge = edge or self._narrowed(table, near)
            left = (sweep.full_batch_refinements if table.noise_free else sweep.refinements) - refined
            grid = climb_round(table, lowest=low, highest=high, lanes=1, blind_lanes=sweep.lanes)
            if not grid and not (table.noise_free and left > 0) and (sweep.start is None or not edge):
                grid = fill_round(table, base=self.config.peak_lr, lanes=2 if sweep.start is None else 1)
            sharper = () if grid or left < 1 else refine_round(table, lanes=min(sweep.lanes, left))
            if sharper and edge and table.best is not None:
                # The search for the edge is about to cut the same gap: on minibatches what it trains often answers the question.
                apart = table.noise_free and min(edge) > table.points[table.best + 1].lr
                sharper = sharper if apart else ()
            refined += len(sharper)
            if asked.issuperset((*grid, *sharper, *edge)):  # also what is of no use, as its run ended early
                return
            asked.update((*grid, *sharper, *edge))
            yield [*self.ask((*grid, *sharper)), *self.ask(edge, Role.LR_UNSTABLE)]


def _first(best: float, near: tuple[float, ...], base: float) -> tuple[float, float]:
    """Return the lrs of the first full-length round: the best one of the short runs, and one up to 4 times as large."""
    center = on_lattice(best, base, 2.0)
    top = min((4 * center, *near[:1]))
    higher = base * 2.0 ** math.floor(math.log2(top / base) + 1e-9)
    return center, higher if higher > center else center / 4


def _check_lrs(lrs: Sequence[float]) -> None:
    if isinstance(lrs, (str, bytes)) or not isinstance(lrs, Iterable):
        raise ConfigError(f"lrs={lrs!r} must be a list of learning rates, such as [0.1, 0.2].")
    lrs = list(lrs)
    if not lrs:
        raise ConfigError("lrs=[] holds no learning rate: give at least one, or None to let the sweep find its range.")
    wrong = [lr for lr in lrs if type(lr) is bool or not (isinstance(lr, (int, float)) and 0 < lr <= LARGEST)]
    if wrong:
        raise ConfigError(f"lrs={lrs!r} must hold numbers that are finite and above 0; wrong: {wrong}.")
    twice = [lr for lr, count in Counter(float(lr) for lr in lrs).items() if count > 1]
    if twice:
        end = "Each is trained once; for several trials of one lr ask for seeds=..."
        raise ConfigError(f"lrs={lrs!r} holds the same lr more than once: {twice}. {end}")


def seeded(config: TrainConfig, lr: float, seeds: int, *, steps: int | None = None) -> list[TrainConfig]:
    """Return `config` at `lr` under each of so many seeds, the baseline's own first; with `steps` short runs of that length."""
    if steps is not None:
        config = at_length(config, steps).replace(eval_every_steps=steps, checkpoint_every_steps=steps)
    return [
        config.replace(peak_lr=lr, shared_seed=config.shared_seed + k, per_host_seed=config.per_host_seed + k)
        for k in range(seeds)
    ]
