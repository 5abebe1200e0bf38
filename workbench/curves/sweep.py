"""The points of a learning-rate sweep: the loss of each lr over its seeds, and its paired distance to the best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.curves.instability import ignorance
from workbench.curves.smoothing import noise_per_step
from workbench.curves.trial_curves import TrialCurve, TrialVerdict, initial_losses, judge

FloatArray = NDArray[np.float64]
_BLOCKS = 8  # blocks that the last steps are cut into (rule of thumb)
_NOISE_SDS = 4.0  # standard errors that what was learned must stand out by (rule of thumb)
FEWEST_STEPS = 10
"""Updates on minibatches from which a run shows its noise, as `CurveThresholds.min_steps` has it (rule of thumb)."""


@dataclass(frozen=True, kw_only=True)
class LRPoint:
    """All full-length trials at one learning rate."""

    lr: float
    loss: float  # mean over the seeds of the tail loss (the objective), infinite when a seed diverged
    loss_se: float  # standard error of `loss` over the last steps and the seeds
    # above_best, above_best_se: paired difference to the best lr (same seeds, steps and batches), and its standard
    # error
    above_best: float = math.nan
    above_best_se: float = math.nan
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    outcomes: tuple[str, ...]
    lasting: int  # how many seeds are lastingly unstable
    trials: tuple[int, ...]
    peak: float = math.nan  # highest loss of its runs that stayed finite

    @property
    def unstable(self) -> bool:
        """At least half of the seeds are lastingly unstable."""
        return 2 * self.lasting >= len(self.seeds)

    @property
    def disputed(self) -> bool:
        """The seeds disagree on whether this lr is stable."""
        return 0 < self.lasting < len(self.seeds)


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """The points of a sweep in order of lr, with what is common to them."""

    points: tuple[LRPoint, ...]
    noise_free: bool  # every trial saw the full batch in every step
    memory: float  # momentum or beta1 of the optimizer
    loss_ref: float  # loss of the initial model, mean over the seeds
    progress: float  # how far the best trial came below the initial model, or below chance where that is lower
    learned: bool  # the progress of some lr, its lead over a smaller one, or its fall, stands out of the noise
    noise: float = 0.0  # standard error of that progress: of the end, and of the first batch where that sets the level
    total_steps: int
    chance: float | None = None  # loss of the best constant output, None where unknown

    @property
    def too_short(self) -> bool:
        """Whether what was learned cannot be told from the noise of minibatches."""
        return not self.noise_free and self.total_steps < FEWEST_STEPS

    @property
    def lowest(self) -> int | None:
        """Index of the lowest objective among the lrs that are not unstable, on the seeds that they share."""
        usable = [i for i, p in enumerate(self.points) if math.isfinite(p.loss) and not p.unstable]
        if not usable:
            return None
        shared = set.intersection(*(set(self.points[i].seeds) for i in usable))

        def mean(point: LRPoint) -> float:
            chosen = [v for s, v in zip(point.seeds, point.losses, strict=True) if not shared or s in shared]
            return float(np.mean(chosen))

        return min(usable, key=lambda i: mean(self.points[i]))

    @property
    def best(self) -> int | None:
        """The same, or None when no lr makes progress: then the lowest objective is a matter of chance."""
        return self.lowest if self.learned else None

    def exploded(self, point: LRPoint, *, times: float = 10.0) -> bool:
        """Whether the loss rose `times` as high as it began, though it came back (rule of thumb, as for the axes of figures)."""
        return not point.unstable and point.peak > times * max(abs(self.loss_ref), self.progress)

    @property
    def level(self) -> float:
        """The loss of knowing nothing."""
        return ignorance(self.loss_ref, self.chance)

    @property
    def loss_scale(self) -> float:
        """What relative differences refer to: the best loss, or what was learned where that is smaller."""
        lowest = min((p.loss for p in self.points if math.isfinite(p.loss)), default=math.nan)
        fitted = lowest == 0 and not self.noise_free  # to the last example: differences are what they are
        return min(self.progress, lowest) if lowest > 0 or fitted else self.progress


def objective(curve: TrialCurve, *, tail_frac: float = 0.1) -> float:
    """Return the mean training loss of the last tenth of the steps at full length; infinite for a diverged run."""
    return math.inf if curve.diverged else float(np.mean(curve.loss[-_tail(curve, tail_frac) :]))


def _tail(curve: TrialCurve, tail_frac: float) -> int:
    return max(1, round(tail_frac * curve.planned_rows))


def paired_difference(one: TrialCurve, other: TrialCurve, *, tail_frac: float = 0.1) -> tuple[float, float]:
    """Return the mean of `one - other`, of one length, over the last steps, and its standard error (0 for full batches)."""
    if one.diverged or other.diverged:
        return (0.0 if other.diverged else math.inf) if one.diverged else -math.inf, 0.0
    n = min(_tail(one, tail_frac), _tail(other, tail_frac))
    difference = one.loss[-n:] - other.loss[-n:]
    return float(np.mean(difference)), 0.0 if one.full_batch and other.full_batch else _mean_se(difference)


def _mean_se(values: FloatArray) -> float:
    """Return the standard error of a mean, from blocks (neighbouring steps are correlated) around their line (a trend is no noise)."""
    count = min(_BLOCKS, values.size)
    if count < 3:
        return math.nan
    scale = float(np.max(np.abs(values))) or 1.0
    means = np.array([(part / scale).mean() for part in np.array_split(values, count)])
    place = np.arange(count) - (count - 1) / 2
    residual = means - means.mean() - place * (place @ means) / (place @ place)
    return scale * math.sqrt(float(residual @ residual) / (count - 2) / count)


def mean_and_error(parts: Sequence[FloatArray]) -> tuple[float, float]:
    """Return the mean of stretches of training loss of one length, one a seed, and its standard error, free of their trends."""
    errors = [_finite_or_zero(_mean_se(part)) for part in parts]
    return float(np.mean([np.mean(part) for part in parts])), math.hypot(*errors) / len(errors)


def sweep_of_curves(full_length: Sequence[TrialCurve], *, tail_frac: float = 0.1) -> SweepTable:
    """Return the sweep of finished trials of one config but for the learning rate and the seeds.

    Of trials with one lr and seed the first counts: the same run twice is no second opinion. `tail_frac` of the steps are averaged.
    """
    kept: dict[tuple[str, int], TrialCurve] = {}
    for curve in full_length:
        kept.setdefault((f"{curve.lr:.9e}", curve.seed), curve)
    peers = list(kept.values())
    by_lr: dict[str, list[TrialVerdict]] = {}
    for item in sorted(judge(peers, peers), key=lambda v: (v.curve.lr, v.curve.seed)):
        by_lr.setdefault(f"{item.curve.lr:.9e}", []).append(item)
    groups = list(by_lr.values())
    points = tuple(_point(group, tail_frac) for group in groups)
    starts = dict(zip((c.seed for c in peers), initial_losses(peers, peers), strict=True))
    loss_ref = float(np.mean(list(starts.values()))) if starts else math.nan
    finite = [p.loss for p in points if math.isfinite(p.loss)]
    table = SweepTable(
        points=points, noise_free=bool(peers) and all(c.full_batch for c in peers), memory=peers[0].memory if peers else 0.0,
        loss_ref=loss_ref, progress=ignorance(loss_ref, peers[0].chance) - min(finite) if finite else 0.0, learned=False,
        total_steps=peers[0].total_steps if peers else 0, chance=peers[0].chance if peers else None,
    )  # fmt: skip
    best = table.lowest
    if best is None:
        return table
    table = replace(table, points=_with_differences(points, groups, best, tail_frac))
    se = max(_finite_or_zero(table.points[best].loss_se), 4 * float(np.finfo(np.float32).eps) * abs(table.level))
    table = replace(table, noise=se if table.level < table.loss_ref else math.hypot(_start_noise(peers), se))
    return replace(table, learned=_learned(table, best, [item.curve for item in groups[best]], se, peers))


def _learned(
    table: SweepTable, best: int, curves: Sequence[TrialCurve], se: float, peers: Sequence[TrialCurve]
) -> bool:
    """Tell whether the best lr came below the loss of knowing nothing by more than the noise."""
    if table.too_short:
        return False
    if table.progress > _NOISE_SDS * table.noise:
        return True
    if table.noise_free or table.progress <= 0:
        return False
    if table.level < table.loss_ref:
        later, error = mean_and_error([c.loss[c.planned_rows // 2 :] for c in curves])
        return table.level - later > _NOISE_SDS * max(error, se / 4)
    worse_below = any(
        p.above_best > max(_NOISE_SDS * _finite_or_zero(p.above_best_se), 0.0) for p in table.points[:best]
    )
    return worse_below or _fell(table, table.points[best].loss, se, peers)


def _fell(table: SweepTable, end: float, se: float, peers: Sequence[TrialCurve]) -> bool:
    """Tell whether the best run ends lower than the smallest lr spent its first tenth, and than chance: a lucky first batch hides that."""
    smallest = [c for c in peers if c.lr == table.points[0].lr]
    head, error = mean_and_error([c.loss[: max(10, c.planned_rows // 10)] for c in smallest])
    below = table.chance is None or table.chance - end > _NOISE_SDS * se
    return below and head - end > _NOISE_SDS * math.hypot(error, se)


def _point(group: Sequence[TrialVerdict], tail_frac: float) -> LRPoint:
    losses = tuple(objective(v.curve, tail_frac=tail_frac) for v in group)
    finite = [v for v in losses if math.isfinite(v)]
    own = [_mean_se(v.curve.loss[-_tail(v.curve, tail_frac) :]) for v in group if not v.curve.diverged]
    within = 0.0 if group[0].curve.full_batch else math.hypot(*own) / max(1, len(own))
    between = _spread(finite) / math.sqrt(len(finite)) if len(finite) > 1 else 0.0
    return LRPoint(
        lr=group[0].curve.lr, loss=float(np.mean(losses)), loss_se=max(within, between), losses=losses,
        seeds=tuple(v.curve.seed for v in group), outcomes=tuple(v.verdict.outcome for v in group),
        lasting=sum(v.is_lasting() for v in group), trials=tuple(v.curve.trial for v in group),
        peak=max((float(v.curve.loss.max()) for v in group if not v.curve.diverged), default=math.nan),
    )  # fmt: skip


def _with_differences(
    points: tuple[LRPoint, ...], groups: Sequence[Sequence[TrialVerdict]], best: int, tail_frac: float
) -> tuple[LRPoint, ...]:
    """Add each point's paired difference to the best; the spread over seeds is pooled over the lrs near it."""
    reference, star = {v.curve.seed: v.curve for v in groups[best]}, points[best].lr
    pairs: list[list[tuple[float, float]]] = []
    for group in groups:
        shared = [(v.curve, reference[v.curve.seed]) for v in group if v.curve.seed in reference]
        pairs.append([paired_difference(a, b, tail_frac=tail_frac) for a, b in shared])
    spreads = [
        _spread([d for d, _ in found])
        for point, found in zip(points, pairs, strict=True)
        if 0.25 <= point.lr / star <= 4 and point.lr != star and len(found) > 1 and math.isfinite(point.loss)
    ]
    pooled = float(np.median(spreads)) if spreads and not groups[best][0].curve.full_batch else 0.0
    done = []
    for k, (point, group, found) in enumerate(zip(points, groups, pairs, strict=True)):
        if not found:
            mean, se = point.loss - points[best].loss, math.hypot(point.loss_se, points[best].loss_se)
        else:
            mean = float(np.mean([d for d, _ in found]))
            within = math.hypot(*(s for _, s in found)) / len(found)
            se = 0.0 if k == best else max(within, pooled / math.sqrt(len(found)))
        lasting = sum(v.is_lasting(star) for v in group)
        done.append(replace(point, above_best=mean, above_best_se=se, lasting=lasting))
    return tuple(done)


def _start_noise(peers: Sequence[TrialCurve]) -> float:
    """Return the standard error of the initial loss, mean over the seeds."""
    found = []
    for curve in peers:
        head = curve.loss[: max(10, curve.planned_rows // 10)]
        head = head[np.isfinite(head)]
        if head.size:
            found.append(float(noise_per_step(head, curve.loss_se, full_batch=curve.full_batch)[0]))
    return min(found, default=0.0) / math.sqrt(max(1, len({c.seed for c in peers})))


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation, without overflow for the huge losses of unstable runs."""
    scale = max(map(abs, values)) or 1.0
    return scale * float(np.std(np.asarray(values) / scale, ddof=1))
