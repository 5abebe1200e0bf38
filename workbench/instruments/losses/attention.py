"""`Attention`: which updates of a loop are looked at in full, so that looking costs no more than a share of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

FIRST = 20
"""Updates that are all looked at, whatever that takes (rule of thumb)."""
WINDOW = 200
"""Updates until which looks may take `_EARLY` times their share, and are at most `_EARLY_GAP` updates apart on the mean (rules of thumb)."""
AFTER = 5
"""Updates that are looked at after a loss that stands out."""
_EARLY, _EARLY_GAP, _LATE_GAP = 10, 20, 4
_NORMS = 0.25
"""Of the share, for gradient norms of updates that are not looked at (rule of thumb)."""
_FADE = 1 / 50
_GOLDEN = 0.6180339887498949


class Attention:
    """Says of each update whether it is looked at: each of the `FIRST`, then one in `every` on the mean.

    How many are passed over follows from what the last looks took of the time of a step. Gaps are of changing length, 1 to 2 * `every` - 1,
    so that they keep step with nothing that the loop does on a cadence of its own. An update whose
    loss or gradient stands out is looked at too, with those after it.

    Args:
        share: of the time of a step that looking may take after the first updates; None looks at every update.
        most: updates between two looks on the mean, however dear they are; after the window `_LATE_GAP` times as many.
        sds: distance from their moving mean, in standard deviations, that makes a loss or a gradient stand out (rule of thumb).

    Attributes:
        awake: whether the update in progress is looked at from its beginning.
        roused: whether it stands out, so that its gradients are looked at nevertheless.
        weight: updates that the one in progress stands for, where what it does is counted.
        sees: whether losses are seen before their update is made.
        spent: seconds that looking took since it was set to 0.
        around: those that getting ready for the next look took, and ending the last one.
        begins: updates after which the next look begins.
        wanted: the update that is to be looked at, with the one before it, where it is still to come.
        norms_every: updates between two gradient norms where nothing else is looked at.
    """

    def __init__(self, share: float | None, *, most: int, sds: float = 6.0) -> None:
        self.share, self._most = share, most
        self.awake, self.roused = True, False
        self.spent = self.around = self._now = 0.0
        self.every, self.weight, self._looked, self._seen, self._jumps = 1, 1, 0, 0, 0
        self.begins, self._ends = 0, FIRST  # of the look in progress, or the next one
        self._costs: deque[tuple[float, float]] = deque(maxlen=2 * AFTER + 1)  # of looks, and the rest of their steps
        self.sees, self.wanted = False, 0
        self.norms_every, self._step = 1, math.inf
        self._norm_costs: deque[float] = deque(maxlen=AFTER)
        self.losses, self.probes = Level(sds), Level(sds)

    def saw(self, loss: float) -> None:
        """Take in the loss of an update in progress."""
        self.sees = True
        if self.losses.stands_out(loss):
            self.rouse()

    def probed(self, norm: float) -> None:
        """Take in the norm of one small gradient of an update in progress, which stands for the others."""
        if self.probes.stands_out(norm):
            self.rouse()

    def rouse(self) -> None:
        """Look at the gradients of the update in progress, and at the updates after it."""
        self.roused = True
        self._jumps += 1

    def is_last(self, updates: int) -> bool:
        """Tell whether the look in progress, after so many updates, ends with this one."""
        return self.share is not None and updates + 1 >= self._ends

    def updated(self, updates: int, now: float, *, pairs: bool) -> None:
        """Take in that so many updates were made, and the clock of the thread now, and decide on the next one.

        A look goes on for two updates with `pairs`: where several optimizers step, what belongs to one update of the second is spread over two
        of the first, and where one steps twice in a row, looks at single updates may all fall on the first step.
        """
        if self.share is None:
            return
        if self.awake:
            self._looked, self._seen = self._looked + 1, updates
            self._costs.append((self.spent + self.around, max(now - self._now - self.spent, 1e-9)))
            self.around = 0.0
        else:
            self.around += self.spent
        self.spent, self._now = 0.0, now
        if self.roused:
            self.roused, self.begins, self._ends = False, updates, max(updates + AFTER, FIRST)
        elif updates >= self._ends:
            self.every = self._paced(updates)
            length = 1 + pairs
            gap = 1 + int((2 * self.every - 1) * (self._looked * _GOLDEN % 1.0))
            self.begins = self._ends + length * (gap - 1)
            self._ends = self.begins + length
            if updates <= self.wanted < self._ends:
                self.begins, self._ends = max(updates, self.wanted - 1), self.wanted + 1
        awake = updates >= self.begins
        if awake and not self.awake:
            self.weight = max(round((self._ends - self._seen) / (self._ends - self.begins)), 1)
        elif awake and updates == self.begins:
            self.weight = 1
        self.awake = awake

    def _paced(self, updates: int) -> int:
        """Return in how many updates one is looked at, by what the last looks took."""
        assert self.share is not None
        early = updates < WINDOW
        cost, step = map(median, zip(*self._costs, strict=True))
        self._step = step
        share = (1 - _NORMS) * self.share * (_EARLY if early else 1)
        most = min(_EARLY_GAP, self._most) if early else _LATE_GAP * self._most
        return int(min(max(math.ceil(cost / (share * step)), 1), most))

    def paced_norms(self, seconds: float) -> int:
        """Take in what a gradient norm took, and return after how many updates the next one is taken."""
        assert self.share is not None
        self._norm_costs.append(seconds)
        every = math.ceil(median(self._norm_costs) / (_NORMS * self.share * self._step))
        self.norms_every = min(max(every, 1), _LATE_GAP * self._most)
        return self.norms_every

    def to_dict(self) -> dict[str, Any]:
        """Return what was looked at, as JSON values."""
        return {
            "share": self.share,
            "first": FIRST,
            "window": WINDOW,
            "every": self.every,
            "looked": self._looked,
            "roused": self._jumps,
        }


class Level:
    """Tells which values of a series stand out above those before them: the first one of several in a row; `most` is the largest that does not."""

    __slots__ = ("_apart", "_limit", "_mean", "_spread", "most")

    def __init__(self, sds: float) -> None:
        self._limit = 1.2533 * sds  # in mean deviations, of which a normal standard deviation has so many
        self._mean, self._spread, self._apart, self.most = math.nan, 0.0, False, math.nan

    def take(self, values: Sequence[float]) -> None:
        """Take in values that do not stand out."""
        mean, spread = self._mean, self._spread
        for value in values:
            away = value - mean
            mean += _FADE * away
            spread += _FADE * (abs(away) - spread)
        self._mean, self._spread, self._apart = mean, spread, self._apart and not values
        self.most = mean + self._limit * max(spread, 1e-3 * abs(mean), 1e-12)

    def stands_out(self, value: float) -> bool:
        """Take in a value, and tell whether it stands out."""
        before = self._apart
        if not math.isfinite(value):
            self._apart = True
            return not before
        if math.isnan(self._mean):
            self._mean, self._spread, apart = value, abs(value), False
        else:
            apart = value > self.most
        self.take([self.most if apart else value])  # one outlier does not hide the next
        self._apart = apart
        return apart and not before
