"""`Budget`: what a diagnosis may cost, in baseline runs or in time, and which trials it still pays for."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.config import TrainConfig
from workbench.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(x|s|m|h)")
_SEARCH = 4.0
"""Baseline runs that the search keeps where a proof is paid for: the baseline and three more (rule of thumb)."""
_ALONE = 6.0  # baseline runs that a diagnosis without a proof may cost where nothing is said (rule of thumb)
_LOOK_RUNS = 3.0
"""Short runs that a first look pays for, where the budget does not pay for the baseline (rule of thumb)."""
_LOOK_STEPS = 20
"""Updates that each of them has at least: fewer show neither a loss that falls nor one that rises (rule of thumb)."""


class BudgetSpent(Exception):
    """The next trials cost more than is left: what was trained is judged."""


@dataclass
class Budget:
    """What a diagnosis may cost."""

    text: str = ""  # as it was given, "" where there is no limit
    runs: float = math.inf  # baseline runs, counted by their updates; `inf` where time is what counts
    seconds: float = math.inf  # of this call; `inf` where runs are what counts
    reserved: float = 0.0  # baseline runs that are kept for the proof, while others ask
    # configs of the proof that the search trains beside its own: what is reserved pays for them
    proof: frozenset[TrainConfig] = frozenset()
    look: bool = False  # whether it pays for runs shorter than the baseline alone
    whole: int = 0  # updates of the baseline's own run, where a first look is shorter
    ended: str = ""  # what could not be paid for, "" while all could
    default: bool = False  # whether nobody gave it
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, text: str | None, seeds: int) -> Budget:
        """Read "3x" (baseline runs), "45m", "2h", "90s" or "none".

        Args:
            text: as it was given; None is 4 baseline runs and 2 for each of the `seeds` of a proof (10x with three), 6x without one.
            seeds: of the proof; 1 is none.

        Raises:
            UsageError: it is none of these.
        """
        if text is None:
            runs = _SEARCH + 2.0 * seeds if seeds > 1 else _ALONE
            return cls(f"{runs:g}x", default=True, runs=runs)
        if text.strip() == "none":
            return cls()
        found = _FORM.fullmatch(text.strip())
        if found is None or not float(found[1]):
            raise UsageError(
                f"budget={text!r} is not known. Give baseline runs or time, or none for no limit: 3x, 90s, 45m, 2h."
            )
        amount = float(found[1])
        if found[2] != "x":
            return cls(text.strip(), seconds=amount * _UNITS[found[2]])
        return cls(text.strip(), runs=amount)

    def first_look(self, steps: int, run_s: float | None) -> int | None:
        """Return the updates of each run where the budget does not pay for a whole one of `steps`; None where it does.

        For a time they are a power of two less than `steps`: one that is measured again then gives the same number.

        Args:
            steps: updates of the baseline.
            run_s: seconds that it takes; None where that is not known.

        Raises:
            UsageError: nothing could be seen in so few updates.
        """
        paid = self.runs
        if self.seconds < math.inf and run_s:
            paid = self.seconds / run_s
        if paid >= 1:
            return None
        if self.seconds < math.inf:  # an estimate, of which too much may be refused
            short = int(steps / 2 ** math.ceil(math.log2(_LOOK_RUNS / paid)))
            return max(short, min(_LOOK_STEPS, steps))
        short = int(paid * steps / _LOOK_RUNS + 1e-9)
        if short < _LOOK_STEPS:
            least = _LOOK_RUNS * _LOOK_STEPS / steps
            raise UsageError(
                f"budget={self.text!r} pays for {paid * steps:,.0f} updates of the baseline's {steps:,}, and a first look takes at least "
                f"{_LOOK_RUNS:.0f} runs of {_LOOK_STEPS}. Give at least {min(math.ceil(100 * least) / 100, 1.0):g}x."
            )
        return short

    def check_whole(self) -> None:
        """Refuse a part of a run, for a training whose length nobody knows before it ends.

        Raises:
            UsageError: it is less than one baseline run.
        """
        if self.runs < 1:
            raise UsageError(
                f"budget={self.text!r} is less than one run of the program, whose length is not known before it ends. Give at least 1x; or a "
                "time, as 10m, of which each run takes a third at most; or shorter runs: steps=... (--steps)."
            )

    @property
    def run_s(self) -> float | None:
        """Seconds that a run may take where its length is not known beforehand; None is without a limit."""
        return None if self.seconds == math.inf else self.seconds / _LOOK_RUNS

    def told(self) -> str:
        """Return what the budget did not pay for, "" where it paid for all."""
        if not self.ended:
            return ""
        if self.look:
            return f"the budget of {self.text} paid for a first look, in shorter runs, and ran out at {self.ended!r}; a larger one trains longer runs, in a new folder"
        counted = ", counted in updates," if self.runs < math.inf else ""
        least = _SEARCH + _ALONE if self.runs < math.inf else 0.0  # what is given where nothing is said
        more = f"{max(2 * float(self.text[:-1]), least):g}{self.text[-1]}"
        given = (
            f"the same command with this folder (--out) and --budget {more}, or none for no limit, goes on from there"
        )
        return f"the budget of {self.text}{counted} ran out at {self.ended!r}; {given}"

    def go_on(self) -> None:
        """Let a search that it has ended have what is left, as where there is nothing to prove."""
        self.ended, self.reserved = "", 0.0

    def seeds(self, wanted: int, run_s: float | None = None) -> int:
        """Return how many seeds of a proof can be paid for beside the search, 1 for no proof, and keep what they cost.

        Args:
            wanted: seeds that would be trained without a budget.
            run_s: seconds of a baseline run, where that is known.
        """
        runs = self.left_s() / run_s if run_s and self.seconds < math.inf else self.runs
        if runs == math.inf:
            return wanted
        seeds = min(wanted, int((runs - _SEARCH) / 2))
        seeds = seeds if seeds >= 2 else 1
        self.reserved = 2.0 * seeds if seeds > 1 else 0.0
        return seeds

    def affordable(self, configs: Sequence[TrainConfig], *, run: int, spent: int, run_s: float | None) -> int:
        """Return how many of these trials, from the first on, can be paid for, and take from what is reserved what it pays.

        Args:
            configs: trials that are not there yet.
            run: updates of a baseline run.
            spent: updates of all trials so far.
            run_s: seconds of a baseline run; None where it was not run yet.
        """
        runs_left = self.runs - self.reserved - spent / run
        if self.seconds < math.inf:
            if run_s is None:
                return len(configs)
            runs_left = self.left_s() / max(run_s, 1e-9) - self.reserved
        for number, config in enumerate(configs):
            cost = config.total_steps / run
            if config in self.proof and self.reserved >= cost:
                self.reserved -= cost
                continue
            runs_left -= cost
            if runs_left < -1e-9:
                return number
        return len(configs)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.seconds - (time.monotonic() - self._began)
