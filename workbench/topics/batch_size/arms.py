"""What a study of batch sizes trained: as it is and retuned, at equal steps and at equal examples (F6.2, F6.3, F6.7)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from workbench.curves.judged import trials_with
from workbench.curves.selection import metric_sign, selected_by_seed
from workbench.curves.trial_curves import RecordLike, equal, memory_field, plain_cell

EQUAL = ("steps", "examples")
_TUNED = ("peak_lr", "momentum", "beta1")
_FOLLOWS = (
    "batch_size", "total_steps", "warmup_steps", "eval_every_steps", "checkpoint_every_steps", "eval_batch_size",
    "shared_seed", "per_host_seed",
)  # fmt: skip


class Tuned(NamedTuple):
    """One point of a search, and the selected metric under the seeds that choose."""

    lr: float
    memory: float
    value: float  # mean over the choosing seeds; inf (or -inf where larger is better) where one was not finite
    seeds: int


@dataclass(frozen=True, kw_only=True)
class BatchArm:
    """One batch size at one number of steps.

    Attributes:
        points: what was tried with it under the seeds that choose, the baseline's own settings among them.
        ranked: those with a finite metric, best first; one more choosing seed goes before a better metric.
        warmup_steps: of its trials; a share of the run, so another number for another length.
        fixed, tuned: fresh seed -> selected metric, with the baseline's own settings and with the best ones.
    """

    batch_size: int
    total_steps: int
    examples: int
    points: Sequence[Tuned]
    ranked: Sequence[Tuned]
    sign: float
    warmup_steps: int
    fixed: Mapping[int, float]
    tuned: Mapping[int, float]

    @property
    def best(self) -> Tuned | None:
        """The first of `ranked`, None where nothing was finite."""
        return next(iter(self.ranked), None)

    @property
    def at_edge(self) -> bool:
        """Whether the best lr is the smallest or the largest that was tried with its memory."""
        best = self.best
        lrs = [p.lr for p in self.points if best is not None and math.isclose(p.memory, best.memory)]
        return best is not None and best.lr in (min(lrs), max(lrs))


def tuned_fields(arm: BatchArm, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that an arm was tuned by, with their best values; there has to be a best one."""
    assert arm.best is not None
    memory = memory_field(config["optimizer"])
    found = {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "peak_lr": arm.best.lr}
    return found | ({memory: arm.best.memory} if memory else {})


def read_arms(record: RecordLike) -> list[BatchArm]:
    """Return every batch size and number of steps that was trained with nothing else but lr and memory changed, in their order."""
    own = dict(record.config)
    same = [name for name in own if name not in (*_TUNED, *_FOLLOWS)]
    arms: dict[tuple[int, int], list[Mapping[Any, Any]]] = {}
    for row in record.trials.to_dict("records"):
        if all(equal(plain_cell(row[name]), own[name]) for name in same if name in row):
            arms.setdefault((int(row["batch_size"]), int(row["total_steps"])), []).append(row)
    return [_arm(record, rows, *key) for key, rows in sorted(arms.items())]


def comparable(arms: Sequence[BatchArm], own: BatchArm, equal: str) -> list[BatchArm]:
    """Return the baseline's arm, and those of other batch sizes with as many "steps" or "examples"; to 5 %, as steps are whole."""
    name = {"steps": "total_steps", "examples": "examples"}[equal]
    others = [arm for arm in arms if arm.batch_size != own.batch_size]
    return [own, *(arm for arm in others if math.isclose(getattr(arm, name), getattr(own, name), rel_tol=0.05))]


def choosing_seeds(record: RecordLike) -> list[int]:
    """Return the seeds by which settings are chosen; what is compared was trained under others."""
    count = int((record.facts.get("batch_size") or {}).get("choosing_seeds", 1))
    return [int(record.config["shared_seed"]) + k for k in range(count)]


def _arm(record: RecordLike, rows: Sequence[Mapping[Any, Any]], batch_size: int, total_steps: int) -> BatchArm:
    own, sign = dict(record.config), metric_sign(record)
    memory, choosing = memory_field(own["optimizer"]), choosing_seeds(record)
    tried: dict[tuple[float, float], list[float]] = {}
    for row in rows:
        seed = int(row["seed"])
        if seed in choosing and row["state"] in ("complete", "diverged"):
            found = selected_by_seed(record, [int(row["trial"])]) if row["state"] == "complete" else {}
            key = (float(row["peak_lr"]), float(row[memory]) if memory else 0.0)
            tried.setdefault(key, []).append(found.get(seed, sign * math.inf))
    points = [Tuned(*key, sum(values) / len(values), len(values)) for key, values in sorted(tried.items())]
    finite = [point for point in points if math.isfinite(point.value)]
    ranked = sorted(finite, key=lambda point: (-point.seeds, sign * point.value))
    seeds = {int(row["trial"]): int(row["seed"]) for row in rows if int(row["seed"]) not in choosing}
    fixed = {name: own[name] for name in _TUNED} | {"batch_size": batch_size, "total_steps": total_steps}

    def fresh(settings: Mapping[str, Any]) -> dict[int, float]:
        """Return the selected metric of the seeds that had no part in the choice; NaN for a trial that has none."""
        numbers = [number for number in trials_with(record, settings) if number in seeds]
        values = selected_by_seed(record, numbers)
        return {seeds[number]: values.get(seeds[number], math.nan) for number in numbers}

    arm = BatchArm(
        batch_size=batch_size, total_steps=total_steps, examples=batch_size * total_steps, points=points, ranked=ranked, sign=sign,
        warmup_steps=int(rows[0].get("warmup_steps", own["warmup_steps"])), fixed=fresh(fixed), tuned={},
    )  # fmt: skip
    return replace(arm, tuned=fresh(fixed | tuned_fields(arm, own))) if ranked else replace(arm, fixed={})


def next_points(
    tried: Mapping[float, float], centre: float, *, ratio: float, reach: int, sign: float = 1.0
) -> list[float]:
    """Return the learning rates to try next, until the best of a geometric grid has a worse neighbour on both sides.

    The grid is centre * ratio**k with |k| up to `reach`; `tried` holds the selected metric, inf where nothing was finite.
    """
    first = [centre * ratio**k for k in (-1, 0, 1)]
    missing = [lr for lr in first if not any(math.isclose(lr, known, rel_tol=1e-9) for known in tried)]
    if missing:
        return missing
    places = {lr: math.log(lr / centre, ratio) for lr in tried}
    steps = {round(k): tried[lr] for lr, k in places.items() if abs(k - round(k)) < 1e-6}
    finite = {k: sign * v for k, v in steps.items() if math.isfinite(v)}
    if not finite:  # nothing trained: the way out is down
        lowest = min(steps) - 1
        return [centre * ratio**lowest] if lowest >= -reach else []
    best = min(finite, key=lambda k: finite[k])
    return [centre * ratio**k for k in (best - 1, best + 1) if k not in steps and abs(k) <= reach]
