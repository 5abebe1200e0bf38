"""The warmup lengths tried at one learning rate, and which one to try next: the shortest that trains is looked for (F3.6).

A length is tried by a short trial, the ramp and twice as many steps after it (F3.7), and by a run of the full budget, which alone
sees what comes later. Lengths are taken to be in order: what is shorter than one that fails is not trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from workbench.curves.judged import judged_runs
from workbench.curves.trial_curves import RecordLike
from workbench.record.roles import Role

_OWN = ("warmup", "warmup_full")
_ALL = (*_OWN, "fix", "confirm", "baseline", "lr_sweep", "lr_unstable")


@dataclass(frozen=True, kw_only=True)
class Length:
    """One warmup length at one learning rate.

    Attributes:
        steps: of the ramp that is prepended; 0 is no warmup.
        short, full: whether the short trial, and the run of the full budget, trained stably; None where it was not run.
        short_trial, full_trial: their numbers.
        outcome: of the loss curve of the longest run: "none" trained without a rise, "recovered" came back from one.
    """

    steps: int
    short: bool | None = None
    full: bool | None = None
    short_trial: int | None = None
    full_trial: int | None = None
    outcome: str | None = field(default=None, compare=False)

    @property
    def passes(self) -> bool | None:
        """What the longest run of this length shows."""
        return self.short if self.full is None else self.full


@dataclass(frozen=True, kw_only=True)
class WarmupSearch:
    """All warmup lengths tried at one learning rate, in order; `multiple` is lr over the one that is unstable without warmup."""

    lr: float
    multiple: float
    lengths: tuple[Length, ...]

    @property
    def longest_failing(self) -> Length | None:
        """The longest length that does not train stably."""
        return max((one for one in self.lengths if one.passes is False), key=lambda one: one.steps, default=None)

    @property
    def passing(self) -> Length | None:
        """The shortest length that trains stably, as do all longer ones that were tried."""
        return min(self._above("short") + self._above("full"), key=lambda one: one.steps, default=None)

    @property
    def confirmed(self) -> Length | None:
        """The same, on the full budget."""
        return min(self._above("full"), key=lambda one: one.steps, default=None)

    def _above(self, run: Literal["short", "full"]) -> list[Length]:
        low = self.longest_failing
        return [one for one in self.lengths if getattr(one, run) and (low is None or one.steps > low.steps)]

    def __getitem__(self, steps: int) -> Length:
        """Return what is known of a length; nothing where it was not tried."""
        return next((one for one in self.lengths if one.steps == steps), Length(steps=steps))


class NextRun(NamedTuple):
    """The run that answers the next question: its kind and its warmup in steps."""

    kind: Literal["short", "full"]
    steps: int


def cap_steps(total_steps: int, cap_frac: float) -> int:
    """Return the longest warmup that a baseline of `total_steps` may get (F3.10)."""
    return math.floor(cap_frac * total_steps * (1 + 1e-9))


def next_run(search: WarmupSearch, *, cap: int, refine_ratio: float = 2.0) -> NextRun | None:
    """Return the run to make next, after the short trials of a list of lengths; None when the shortest is known.

    Where no length passes, the cap is tried. Where one does, short trials halve the gap to the longest that fails, and then
    the shortest that is left has to pass on the full budget. Once such a run has failed, short trials have shown that they
    do not see far enough: the cap is run on the full budget, and if it passes, the gap is halved by full-budget runs.

    The shortest that passes and the longest that fails may stay a factor of `refine_ratio` apart.
    """
    low, passing = search.longest_failing, search.passing
    if any(one.full is False for one in search.lengths):
        top = search.confirmed
        if top is None:
            return NextRun("full", cap) if low is not None and low.steps < cap else None
        middle = _between(low, top, refine_ratio)
        return None if middle is None else NextRun("full", middle)
    if passing is None:
        return NextRun("short", cap) if search[cap].short is None else None
    if low is None and passing.steps:
        return NextRun("short", 0)
    middle = _between(low, passing, refine_ratio)
    if middle is not None:
        return NextRun("short", middle)
    return NextRun("full", passing.steps) if passing.full is None else None


def _between(low: Length | None, top: Length, ratio: float) -> int | None:
    """Return the geometric middle of the gap below `top`; None where the gap is narrow."""
    if low is None:
        return None
    bottom = max(low.steps, 1)
    middle = round(math.sqrt(bottom * top.steps))
    wide = top.steps > ratio * bottom * (1 + 1e-9)
    return middle if wide and low.steps < middle < top.steps else None


def read_searches(record: RecordLike, unstable_lr: float) -> tuple[WarmupSearch, ...]:
    """Return what a study tried, one search a learning rate, in order of the rates.

    Runs of other roles that are the same count; `unstable_lr` is the learning rate that is unstable without warmup.
    """
    config = record.config
    own, total, clip = int(config.get("warmup_steps") or 0), int(config["total_steps"]), config.get("max_grad_norm")
    runs = judged_runs(record, _ALL)
    rows = [row for row in runs if row["max_grad_norm"] == clip and row["outcome"] != "not_measured"]
    searches: dict[str, dict[int, Length]] = {f"{r['lr']:.9e}": {} for r in rows if r["stage"] in _OWN}
    rates: dict[str, float] = {}
    for row in rows:
        key, added, trial = f"{row['lr']:.9e}", row["warmup_steps"] - own, row["trial"]
        if key not in searches:
            continue
        rates.setdefault(key, row["lr"])
        one, passes = searches[key].get(added, Length(steps=added)), not row["lasting"]
        if row["stage"] == Role.WARMUP:
            outcome = row["outcome"] if one.full is None else one.outcome
            searches[key][added] = replace(one, short=passes, short_trial=trial, outcome=outcome)
        elif row["total_steps"] == total + added:
            searches[key][added] = replace(one, full=passes, full_trial=trial, outcome=row["outcome"])
    found = [
        WarmupSearch(
            lr=lr, multiple=lr / unstable_lr, lengths=tuple(sorted(searches[key].values(), key=lambda one: one.steps))
        )
        for key, lr in rates.items()
    ]
    return tuple(sorted(found, key=lambda search: search.lr))
