"""`Series`: one quantity against the step, put in order: restarts, steps written twice, other counters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.logs.columns import Floats, Ints

_WENT_ON, _ANEW = "went on with its steps counted from the start", "was begun anew"
_HEAD = 10  # values at each end of a stretch whose median says where it begins or ends (rule of thumb)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values and their steps, in the order in which they were written, both of shape (values,)."""

    steps: Ints
    value: Floats

    @property
    def every(self) -> int:
        """Median distance of neighbouring steps; 1 for fewer than two."""
        apart = np.diff(self.steps)
        return max(1, int(np.median(apart))) if apart.size else 1

    def once(self, *, mean: bool = False) -> Series:
        """Return one value a step, ascending: of several the last, or their mean."""
        steps, counts = np.unique(self.steps, return_counts=True)
        if steps.size == self.steps.size:
            order = np.argsort(self.steps, kind="stable")
            return Series(steps=self.steps[order], value=self.value[order])
        order = np.argsort(self.steps, kind="stable")
        ordered, starts = self.value[order], np.concatenate([[0], np.cumsum(counts)[:-1]])
        last = ordered[starts + counts - 1]
        with np.errstate(invalid="ignore", over="ignore"):
            return Series(steps=steps, value=np.add.reduceat(ordered, starts) / counts if mean else last)

    def at(self, steps: Ints) -> Floats:
        """Return the values at other steps, straight lines between those that are known; NaN beyond one distance of the ends."""
        known = np.isfinite(self.value)
        if not known.any():
            return np.full(steps.size, np.nan)
        own, values = self.steps[known], self.value[known]
        found = np.interp(steps, own, values)
        outside = (steps < own[0] - 2 * self.every) | (steps > own[-1] + 2 * self.every)
        return np.where(outside, np.nan, found)

    def nearest(self, steps: Ints) -> Floats | None:
        """Return the value written nearest to each of other steps; None where these are far more than there are values."""
        if self.steps.size < 2 or self.every > 2 * max(1, int(np.median(np.diff(steps)) if steps.size > 1 else 1)):
            return None if self.steps.size < steps.size else self.value[: steps.size]
        right = np.clip(np.searchsorted(self.steps, steps), 1, self.steps.size - 1)
        left_is_nearer = steps - self.steps[right - 1] <= self.steps[right] - steps
        return self.value[np.where(left_is_nearer, right - 1, right)]


def in_order(series: Series, decisions: list[str] | None = None) -> tuple[Series, list[str]]:
    """Return a series whose steps never fall, and what was made of each place where they do.

    A run that was resumed writes steps again: the later ones count ("was resumed from step 500"). Where the counter starts over, the run
    goes on where its first values lie nearer to the end of what came before than to its start ("went on with its steps from the
    start"), else it was begun anew and only that counts ("was begun anew").

    Args:
        decisions: what was made of another series of the same log.
    """
    falls = np.flatnonzero(np.diff(series.steps) < 0) + 1
    if not falls.size:
        return series, []
    parts = [
        Series(steps=s, value=v)
        for s, v in zip(np.split(series.steps, falls), np.split(series.value, falls), strict=True)
    ]
    kept, said = parts[0], list[str]()
    for number, written in enumerate(parts[1:]):
        part = written
        first, known = int(part.steps[0]), decisions[number] if decisions and number < len(decisions) else None
        if known is None and first > kept.steps[0]:
            known = f"was resumed from step {first:,}"
        known = known or (_WENT_ON if _goes_on(kept, part) else _ANEW)
        said.append(known)
        if known == _WENT_ON:
            part = replace(part, steps=part.steps + int(kept.steps[-1]) + kept.every - first)
        before = np.searchsorted(kept.steps, part.steps[0]) if known != _ANEW else 0
        kept = Series(
            steps=np.concatenate([kept.steps[:before], part.steps]),
            value=np.concatenate([kept.value[:before], part.value]),
        )
    return kept, said


def _goes_on(before: Series, after: Series) -> bool:
    start, end, new = (_median(v) for v in (before.value[:_HEAD], before.value[-_HEAD:], after.value[:_HEAD]))
    return bool(abs(new - end) < abs(new - start))


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


def thinned(series: Series, every: int) -> Series:
    """Return means over stretches of `every` steps, at the last step of each."""
    groups = (series.steps - series.steps[0]) // every
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    counts = np.diff(np.append(starts, groups.size))
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.add.reduceat(series.value, starts) / counts
    return Series(steps=series.steps[starts + counts - 1], value=means)
