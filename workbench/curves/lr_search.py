"""What a sweep's table says of lr* and of where instability starts, and which lrs to train next.

Lrs of one round train side by side; () means that the question is settled. Ratios without a source are rules of thumb.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.curves.sweep import LRPoint, SweepTable

_DENSE_RATIO = 1.118  # neighbours this close bracket lr* to a factor of 1.25 (1.118 squared)
EDGE_MARGIN = 1.5
"""How far below the unstable lr a recommended one stays (rule of thumb: another seed moves it by so much)."""
SAME = 1.001  # lrs closer than this are the same question
_SAME_LOSS = 1.04  # without noise, a lower neighbour with a loss up to this many times the lowest is as good


@dataclass(frozen=True, kw_only=True)
class BestLR:
    """lr*, with its doubt. Beyond the first unstable lr nothing counts: a run that trains well there is luck."""

    lr: float
    # low, high: interval around `lr` in which all lrs tried are as good
    low: float
    high: float
    measured_lr: float  # the lr with the lowest objective; `lr` may be its lower neighbour
    point: LRPoint  # the measurement at `lr`
    tied: tuple[float, ...]  # lrs whose paired difference to the best is within the tolerance
    border: str | None  # "low" or "high" where the lowest objective lies at the border of the lrs tried, else None
    needs_refinement: bool  # the grid around the minimum is too coarse for the promise made in `reason`
    reason: str  # how `lr` follows from the measurements


@dataclass(frozen=True, kw_only=True)
class UnstableBracket:
    """Where lasting instability starts above lr*."""

    lower: float | None  # largest lr below `upper` that is not lastingly unstable; None if none was run
    upper: float  # smallest lr above lr* at which at least half of the seeds are lastingly unstable
    stable_above: tuple[float, ...]  # larger lrs that are not lastingly unstable all the same

    @property
    def ratio(self) -> float:
        """Upper / lower, infinite when the lower end is unknown."""
        return math.inf if self.lower is None else self.upper / self.lower

    @property
    def middle(self) -> float:
        """Geometric middle of the bracket."""
        return self.upper if self.lower is None else math.sqrt(self.lower * self.upper)


def _tied(
    table: SweepTable,
    point: LRPoint,
    *,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    progress_tolerance: float = 1e-3,
    material_frac: float = 0.05,
) -> bool:
    """Tell whether a point is as good as the best, by the paired difference.

    Args:
        noise_sds: standard errors of the paired difference that count as equal, where they are a small share of what was
            learned: a run that blew up has so large an error that it would be as good as any.
        loss_tolerance: relative difference that counts as equal (O1).
        progress_tolerance: on minibatches, a difference below this share of what was learned counts as equal too: once a
            network fits its training set, rounding decides which lr ends at 4e-5 and which at 6e-5.
        material_frac: the small share of what was learned.
    """
    se = point.above_best_se if math.isfinite(point.above_best_se) else 0.0
    noise = min(noise_sds * se, material_frac * table.progress)
    rounding = 0.0 if table.noise_free else progress_tolerance * table.progress
    return point.above_best <= max(noise, loss_tolerance * table.loss_scale, rounding)


def _as_good(table: SweepTable, **thresholds: float) -> list[int]:
    """Return the points that are as good as the best, wherever they lie."""
    at = enumerate(table.points)
    return [i for i, p in at if i == table.best or (not p.unstable and _tied(table, p, **thresholds))]


def lr_best(
    table: SweepTable, *, own: float | None = None, noise_sds: float = 2.0, loss_tolerance: float = 0.02
) -> BestLR | None:
    """Return lr* with its interval, or None when no lr makes progress.

    With noise several lrs may be as good as the one with the lowest objective: lr* is the person's own (`own`) where it is one of
    them, else the middle of them, with a margin to where training becomes unstable. Without noise the loss may explode right above
    lr*, so the lower neighbour is reported where it is as good, or, for a rule without memory, where the grid is dense: with one
    minimum that neighbour cannot lie above the true lr*.
    """
    if table.best is None:
        return None
    points = table.points
    equal = _as_good(table, noise_sds=noise_sds, loss_tolerance=loss_tolerance)
    bracket = unstable_bracket(table, above=points[equal[0]].lr)
    top = math.inf if bracket is None else bracket.upper
    equal = [i for i in equal if not points[i].lr >= top]  # the lr of a log may be unknown
    best = table.best if not points[table.best].lr >= top else min(equal, key=lambda i: points[i].above_best)
    chosen, reason = _lower_neighbour(table, best) if table.noise_free else _middle(table, equal, own)
    among = {*equal, chosen, best}
    low = high = chosen
    while low - 1 in among:
        low -= 1
    while high + 1 in among:
        high += 1
    above = points[high + 1] if high + 1 < len(points) else None  # half a step towards it, never to an unstable one
    return BestLR(
        lr=points[chosen].lr,
        low=math.sqrt(points[low].lr * points[max(low - 1, 0)].lr),
        high=points[high].lr if above is None or above.unstable else math.sqrt(points[high].lr * above.lr),
        measured_lr=points[best].lr, point=points[chosen], tied=tuple(points[i].lr for i in equal),
        border="low" if best == 0 else "high" if best == len(points) - 1 else None,
        needs_refinement=bool(refine_round(table, lanes=1)), reason=reason,
    )  # fmt: skip


def below_edge(table: SweepTable, indices: Sequence[int]) -> list[int]:
    """Return the points that keep `EDGE_MARGIN` to the lr where training becomes unstable; the lowest of them where none does."""
    bracket = unstable_bracket(table)
    if bracket is None:
        return list(indices)
    safe = [i for i in indices if table.points[i].lr * EDGE_MARGIN <= bracket.middle]
    return safe or sorted(indices)[:1]


def _middle(table: SweepTable, equal: Sequence[int], own: float | None) -> tuple[int, str]:
    """Return the person's own of several points that are as good, or the middle one away from the edge, and why."""
    points, what = table.points, "the lowest mean loss of the last tenth of the steps"
    if len(equal) == 1:
        return equal[0], what
    mine = [i for i in equal if own is not None and math.isclose(points[i].lr, own, rel_tol=1e-9)]
    if mine:
        return mine[0], f"the baseline's own, which is as good as {what}"
    safe = below_edge(table, equal)
    middle = math.sqrt(points[safe[0]].lr * points[safe[-1]].lr)
    chosen = min(safe, key=lambda i: abs(math.log(points[i].lr / middle)))
    return chosen, f"the middle of those that are as good as {what}"


def _lower_neighbour(table: SweepTable, best: int) -> tuple[int, str]:
    points = table.points
    if best == 0 or points[best - 1].unstable:
        return best, "the lowest mean loss of the last tenth of the steps"
    below = points[best - 1]
    if below.above_best <= (_SAME_LOSS - 1) * table.loss_scale:
        return best - 1, f"the lower neighbour of the lowest loss, no more than {_SAME_LOSS:g} times as high"
    if table.memory == 0 and points[best].lr / below.lr <= _DENSE_RATIO * (1 + 1e-9):
        return best - 1, "the lower neighbour of the lowest loss, which cannot lie above the true minimum"
    return best, "the lowest loss; the true minimum may lie on either side of it"


def unstable_bracket(table: SweepTable, *, above: float | None = None) -> UnstableBracket | None:
    """Return where lasting instability starts above an lr, or None when no larger one is lastingly unstable.

    `above` None is the lowest lr that is as good as the one of the lowest objective.
    """
    if above is None:
        if table.best is None:
            return None
        above = table.points[_as_good(table)[0]].lr
    upper = next((p for p in table.points if p.lr > above and p.unstable), None)
    if upper is None:
        return None
    below = [p.lr for p in table.points if p.lr < upper.lr and not p.unstable]
    beyond = tuple(p.lr for p in table.points if p.lr > upper.lr and not p.unstable)
    return UnstableBracket(lower=max(below, default=None), upper=upper.lr, stable_above=beyond)


def refine_round(
    table: SweepTable, *, lanes: int, noisy_ratio: float = 1.25, min_ratio: float = 1.002, flat_loss: float = 1.15
) -> tuple[float, ...]:
    """Return the lrs that sharpen lr*; () when it is sharp enough or at the border of the grid.

    Args:
        lanes: lrs in a round, at most.
        noisy_ratio: with noise, a neighbour that is clearly worse and further away than this leaves a gap to look into.
        min_ratio: never try lrs closer than this.
        flat_loss: without noise, an optimizer with memory has several minima: lrs up to this many times the lowest
            loss are looked at as well.
    """
    best = table.best
    if best is None or best in (0, len(table.points) - 1):
        return ()
    below, at, above = table.points[best - 1 : best + 2]
    if not table.noise_free:
        worse = [p for p in (below, above) if _gap(p, at) > noisy_ratio and (p.unstable or not _tied(table, p))]
        return _cut(at, worse, lanes)
    wide = [p for p in (below, above) if _gap(p, at) > _DENSE_RATIO * (1 + 1e-9)]
    if wide:
        return _cut(at, wide, lanes)
    tolerance = (_SAME_LOSS - 1) * table.loss_scale
    # Further to the right the loss falls by at most this much more, if it keeps the slope it had on the left.
    further = below.above_best * math.log(_gap(above, at)) / math.log(_gap(below, at))
    gains = ((below, below.above_best), (above, further))
    sides = [p for p, gain in gains if gain > tolerance and _gap(p, at) > min_ratio]
    if sides:
        return _cut(at, sides, lanes)
    return _flat_gaps(table, (flat_loss - 1) * table.loss_scale)[:lanes] if table.memory > 0 else ()


def _cut(at: LRPoint, sides: Sequence[LRPoint], lanes: int) -> tuple[float, ...]:
    """Return lrs that cut the gaps between a point and its neighbours evenly, the widest gap first."""
    sides = sorted(sides, key=lambda p: -_gap(p, at))[:lanes]
    found: list[float] = []
    for k, side in enumerate(sides):
        parts = (lanes + len(sides) - 1 - k) // len(sides) + 1
        found += [at.lr * (side.lr / at.lr) ** (j / parts) for j in range(1, parts)]
    return tuple(found)


def _gap(one: LRPoint, other: LRPoint) -> float:
    return max(one.lr / other.lr, other.lr / one.lr)


def _flat_gaps(table: SweepTable, limit: float, *, flat_ratio: float = 1.5) -> tuple[float, ...]:
    """Return the middles of the gaps wider than `flat_ratio` beside lrs nearly as good as the best, the most promising first."""
    stable = [p for p in table.points if not p.unstable]
    open_gaps = [
        (min(p.above_best, q.above_best), math.sqrt(p.lr * q.lr))
        for p, q in pairwise(stable)
        if _gap(p, q) > flat_ratio and min(p.above_best, q.above_best) <= limit
    ]
    return tuple(lr for _, lr in sorted(open_gaps))


def spread(low: float, high: float, *, tolerance: float, lanes: int) -> tuple[float, ...]:
    """Return lrs that cut the gap between two lrs into equal factors."""
    needed = math.ceil(math.log(high / low) / math.log1p(tolerance) - 1e-6)
    if needed <= 1:
        return ()
    rounds = math.ceil(math.log(needed) / math.log(lanes + 1) - 1e-9)
    parts = math.ceil(needed ** (1 / rounds) - 1e-9)
    return tuple(low * (high / low) ** (k / parts) for k in range(1, parts))


def edge_round(
    table: SweepTable, *, lanes: int, tolerance: float = 0.05, near: Sequence[float] = (), wide: float = 2.2
) -> tuple[float, ...]:
    """Return the lrs that narrow the bracket of `lr.unstable`; () when it is narrow enough, or there is none yet.

    Args:
        tolerance: width of the bracket, as a share of its lower end.
        near: two lrs between which the edge may lie, from short runs or from `growth_edge`; tried first.
        wide: where the edge turns out to lie beside them, a bracket wider than this is searched from their side,
            a factor of 2 at a time.
    """
    bracket = unstable_bracket(table)
    if bracket is None or bracket.lower is None or bracket.ratio <= (1 + tolerance) * (1 + 1e-9):
        return ()
    low, high = bracket.lower, bracket.upper
    fresh = tuple(lr for lr in near if low * SAME < lr < high / SAME)
    if fresh:
        return fresh[:lanes]
    if near and bracket.ratio > wide:
        if high <= max(near) * SAME:
            return tuple(high / 2 ** (k / lanes) for k in range(1, lanes + 1))
        if low >= min(near) / SAME:
            return tuple(low * 2 ** (k / lanes) for k in range(1, lanes + 1))
    return spread(low, high, tolerance=tolerance, lanes=lanes)


def around(hint: float | None, tolerance: float) -> tuple[float, ...]:
    """Return the two lrs that bracket a hint to the tolerance; () without a hint."""
    side = math.sqrt(1 + tolerance)
    return () if hint is None else (hint / side, hint * side)


def raise_round(
    table: SweepTable, *, highest: float, near: Sequence[float] = (), steps: Sequence[float] = (2.0, 8.0)
) -> tuple[float, ...]:
    """Return lrs above all that were tried, up to `highest`, where no lr above the best one is lastingly unstable yet."""
    if table.best is None or unstable_bracket(table) is not None:
        return ()
    top = table.points[-1].lr
    ahead = [lr for lr in near if lr > top * SAME] or [top * (step**0.5 if near else step) for step in steps]
    return tuple(lr for lr in ahead if lr <= highest)


def climb_round(
    table: SweepTable, *, lowest: float, highest: float, lanes: int, blind_lanes: int, factor: float = 4.0
) -> tuple[float, ...]:
    """Return lrs from `lowest` to `highest`, below all that were tried where the best lies at that border.

    Where no lr learned anything, usually all are too high, and lower ones cost least to rule out: down by `factor` from the densest
    part of the lrs tried, then up from it. A baseline far from the others leaves a gap that nobody has looked into. Below a run that
    only comes down slowly, and above one that is unstable, there is nothing to look for. `lanes` are lrs in a round, at most;
    `blind_lanes` where no lr learned anything.
    """
    if table.best is not None:
        low = table.points[0].lr
        return () if table.best else tuple(low / factor**k for k in range(1, lanes + 1) if low / factor**k >= lowest)
    groups: list[list[LRPoint]] = []
    for point in table.points:
        if groups and point.lr / groups[-1][-1].lr <= factor**1.5:
            groups[-1].append(point)
        else:
            groups.append([point])
    at = max(range(len(groups)), key=lambda k: (len(groups[k]), -k))
    room = math.sqrt(factor)
    floor = max(lowest, groups[at - 1][-1].lr * room) if at else lowest
    ceiling = min(highest, groups[at + 1][0].lr / room) if at + 1 < len(groups) else highest
    first, last = groups[at][0], groups[at][-1]
    down = [] if _slow(table, first) else [first.lr / factor**k for k in range(1, blind_lanes + 1)]
    up = [] if _blown(last) else [last.lr * factor**k for k in range(1, blind_lanes + 1)]
    return tuple(lr for lr in down if lr >= floor) or tuple(lr for lr in up if lr <= ceiling)


def _slow(table: SweepTable, point: LRPoint, *, far_frac: float = 0.25) -> bool:
    """Tell whether a stable run ends with this share of the way to chance still before it."""
    way = table.loss_ref - table.level
    return way > 0 and not _blown(point) and point.loss - table.level > far_frac * way


def _blown(point: LRPoint) -> bool:
    return any(outcome in ("lasting", "divergent") for outcome in point.outcomes)


def fill_round(table: SweepTable, *, base: float, factor: float = 2.0, lanes: int = 2) -> tuple[float, ...]:
    """Return the lrs beside the best one that are missing in the lattice of `factor` through `base`, the baseline's own lr."""
    if table.best is None:
        return ()
    at, found = table.points[table.best], list[tuple[float, float]]()
    for index in (table.best - 1, table.best + 1):
        side = table.points[index] if 0 <= index < len(table.points) else None
        if side is None or side.unstable or (not table.noise_free and _tied(table, side)):
            continue
        if _gap(at, side) > factor**1.5:
            found.append((side.loss, on_lattice(at.lr * factor ** (index - table.best), base, factor)))
    return tuple(lr for _, lr in (found if lanes > 1 else sorted(found)[:lanes]))


def beside_round(table: SweepTable, *, base: float, lowest: float, highest: float) -> tuple[float, ...]:
    """Return the lrs a factor of 4 to both sides of the best one, then of 2, then of 1.4, where its neighbours are further away than that."""
    if table.best is None:
        return ()
    at = table.points[table.best]
    for factor in (4.0, 2.0, math.sqrt(2.0)):
        found = []
        for index, lr in ((table.best - 1, at.lr / factor), (table.best + 1, at.lr * factor)):
            side = table.points[index] if 0 <= index < len(table.points) else None
            if side is None or (_gap(at, side) > factor**1.5 and (side.unstable or not _tied(table, side))):
                found.append(on_lattice(lr, base, factor))
        if found := [lr for lr in found if lowest <= lr <= highest]:
            return tuple(found)
    return ()


def on_lattice(lr: float, base: float, factor: float) -> float:
    """Return the lr nearest to `lr` among base * factor^k, so that the baseline's own lr is one of the grid."""
    return float(base * factor ** round(math.log(lr / base) / math.log(factor)))
