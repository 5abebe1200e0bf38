"""Update rules: the forms they come in, and the range of learning rates in which each trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.judged import JudgedStudy
from workbench.curves.lr_search import lr_best, unstable_bracket
from workbench.curves.selection import selected_by_seed
from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trials import RecordLike
from workbench.record.roles import POINTS, Role

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


SWEEP, RANGE, SEEDS, TWIN = Role.OPTIMIZERS, Role.OPTIMIZERS_RANGE, Role.OPTIMIZERS_SEEDS, Role.OPTIMIZERS_TWIN
"""Stages of a study of rules: another rule than the baseline's at full length, and in short runs; fresh seeds of what was chosen, which
play no part in choosing; and a run beside another with a single change."""


@dataclass(frozen=True, kw_only=True)
class RuleRange:
    """What one update rule does at the learning rates that were tried.

    The range holds the lrs around lr* that train: they are stable, and their end loss lies within a tenth of what the rule
    learned. Both ends are brackets, so its width has a smallest and a largest value. Where an adaptive rule turns unstable can lie
    far above it: what it oscillates by grows with the lr, without bound and without a sudden end.

    Attributes:
        optimizer: the rule.
        best_lr: lr*, None where no lr learned anything.
        low, high: interval of lrs that are as good.
        loss, loss_se: mean training loss of the last tenth of the steps at lr*, and its standard error.
        trains_from, trains_to: smallest and largest lr that train, without a gap; None with `best_lr`.
        fails_below, fails_above: the next smaller and larger lr tried, which do not; None where none was tried.
        stable: largest lr below `unstable` that is not lastingly unstable; None where `unstable` is.
        unstable: smallest lr above lr* that is lastingly unstable; None where none was found.
        top: largest lr tried.
        selected_lr: lr of the best selected checkpoint among the lrs that train, under the first seed; None without any.
        selected: its selected metric.
        points: the measurements, in order of lr.
        trial: number of the trial at lr* under the first seed.
        noise_free: full batches.
        progress: what the rule learned at best.
        table: what the sweep's search reads.
        sign: 1 where a smaller selected metric is the better one, else -1.
    """

    optimizer: str
    best_lr: float | None
    low: float | None
    high: float | None
    loss: float
    loss_se: float
    trains_from: float | None
    trains_to: float | None
    fails_below: float | None
    fails_above: float | None
    stable: float | None
    unstable: float | None
    top: float | None
    selected_lr: float | None
    selected: float | None
    points: tuple[LRPoint, ...]
    trial: int | None
    noise_free: bool
    progress: float
    table: SweepTable
    sign: float

    @property
    def decades(self) -> float | None:
        """Width of the range: decades from the smallest lr that trains to the largest."""
        return self._width(self.trains_from, self.trains_to)

    @property
    def most_decades(self) -> float:
        """The width that the brackets of both ends allow at most; infinite where an end was not found."""
        return self._width(self.fails_below, self.fails_above) or math.inf

    @staticmethod
    def _width(low: float | None, high: float | None) -> float | None:
        return None if low is None or high is None else math.log10(high / low)


def rules_in(record: RecordLike) -> list[str]:
    """Return the rules that a study has trained at full length, the baseline's own first."""
    trials, own = record.trials, str(record.config.get("optimizer"))
    if not len(trials):
        return []
    there = trials["optimizer"][~trials["stage"].isin([RANGE, SEEDS, TWIN])].astype(str).tolist()
    return [name for name in dict.fromkeys([own, *there]) if name in there]


def rule_view(record: RecordLike, optimizer: str) -> JudgedStudy:
    """Return the trials of one rule as a learning-rate sweep of their own.

    Args:
        record: a study; trials of the baseline's rule count whatever part of the study asked for them.
        optimizer: the rule, as the record writes it.
    """
    table = record.trials
    trials = table[table["optimizer"].astype(str) == optimizer] if len(table) else table
    return JudgedStudy(record, trials=trials, config={"optimizer": optimizer}, points=POINTS | {SWEEP})


def read_ranges(record: RecordLike, *, trains_frac: float = 0.1, tail_frac: float = 0.1) -> dict[str, RuleRange]:
    """Return the range of every rule of a study, the baseline's own first.

    Args:
        record: a study of one or more rules.
        trains_frac: an lr trains where its end loss is above the rule's best by no more than this share of what the rule
            learned (rule of thumb).
        tail_frac: share of the steps that the end loss averages (O1).
    """
    return {name: _range(rule_view(record, name), name, trains_frac, tail_frac) for name in rules_in(record)}


def _range(view: JudgedStudy, optimizer: str, trains_frac: float, tail_frac: float) -> RuleRange:
    table = view.sweep(tail_frac=tail_frac)
    best, bracket = lr_best(table), unstable_bracket(table)
    if best is None or table.best is None:
        number = math.nan
        return RuleRange(
            optimizer=optimizer, best_lr=None, low=None, high=None, loss=number, loss_se=number, trains_from=None,
            trains_to=None, fails_below=None, fails_above=None, stable=None, unstable=None, top=_top(table), selected_lr=None, selected=None,
            points=table.points, trial=None, noise_free=table.noise_free, progress=table.progress, table=table,
            sign=_sign(view),
        )  # fmt: skip
    first, last = _trains(table, table.best, trains_frac)
    points, point = table.points, best.point
    selected = _selected(view, points[first : last + 1])
    return RuleRange(
        optimizer=optimizer,
        best_lr=best.lr,
        low=best.low,
        high=best.high,
        loss=point.loss,
        loss_se=point.loss_se,
        trains_from=points[first].lr,
        trains_to=points[last].lr,
        fails_below=points[first - 1].lr if first else None,
        fails_above=points[last + 1].lr if last + 1 < len(points) else None,
        stable=None if bracket is None else bracket.lower,
        unstable=None if bracket is None else bracket.upper,
        top=_top(table),
        selected_lr=None if selected is None else selected[0],
        selected=None if selected is None else selected[1],
        points=table.points,
        trial=_first_trial(point, view),
        noise_free=table.noise_free,
        progress=table.progress,
        table=table,
        sign=_sign(view),
    )


def _top(table: SweepTable) -> float | None:
    return table.points[-1].lr if table.points else None


def _first_trial(point: LRPoint, view: JudgedStudy) -> int | None:
    """Return the trial of the baseline's own seed, which the search used."""
    first = int(view.config.get("shared_seed") or 0)
    return dict(zip(point.seeds, point.trials, strict=True)).get(first, point.trials[0] if point.trials else None)


def _trains(table: SweepTable, best: int, trains_frac: float) -> tuple[int, int]:
    """Return the indices of the smallest and the largest lr that train, down and up from the best without a gap."""
    limit = table.points[best].loss + trains_frac * table.progress
    good = [not p.unstable and p.loss <= limit for p in table.points]
    first = last = best
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(good) and good[last + 1]:
        last += 1
    return first, last


def ends_next(
    found: RuleRange, *, ratio: float = 2.0, factor: float = 4.0, lowest: float = 0.0, highest: float = math.inf
) -> tuple[float, ...]:
    """Return the lrs that narrow the two ends of a range; () where both are narrow enough.

    Args:
        ratio: how wide the bracket of an end may stay (rule of thumb).
        factor: step outwards while every lr tried trains (rule of thumb).
        lowest: smallest lr that may be tried.
        highest: largest.
    """
    ends = ((found.trains_from, found.fails_below, 1 / factor), (found.trains_to, found.fails_above, factor))
    asked = []
    for trains, fails, step in ends:
        if trains is None:
            continue
        if fails is None:
            asked.append(trains * step)
        elif max(trains / fails, fails / trains) > ratio * (1 + 1e-9):
            asked.append(math.sqrt(trains * fails))
    return tuple(lr for lr in asked if lowest <= lr <= highest)


def _selected(view: JudgedStudy, points: Sequence[LRPoint]) -> tuple[float, float] | None:
    """Return (lr, selected metric) of the best checkpoint among the lrs that train, under the first seed."""
    first = int(view.config.get("shared_seed") or 0)
    sign, found = _sign(view), []
    for point in points:
        trials = [t for s, t in zip(point.seeds, point.trials, strict=True) if s == first]
        values = selected_by_seed(view, trials[:1]).values() if trials else ()
        found += [(sign * value, point.lr) for value in values]
    if not found:
        return None
    value, lr = min(found)
    return lr, float(np.float64(sign * value))


def _sign(view: JudgedStudy) -> float:
    return 1.0 if view.config.get("select_mode", "min") == "min" else -1.0
