"""A clipping threshold from the gradient norms of one run (F4.5, F4.9, O6), and what clipping did to each run (F4.9 to F4.12)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.curves.sweep import objective
from workbench.curves.trial_curves import RecordLike, TrialVerdict, comparable
from workbench.record.json_values import number
from workbench.record.metrics import passed_over
from workbench.record.roles import SHORT

FloatArray = NDArray[np.float64]
_WINDOWS = 10
_FREE = {
    "max_grad_norm", "eval_every_steps", "eval_batch_size", "keep_best", "checkpoint_every_steps", "select", "select_mode",
}  # fmt: skip
"""Config fields in which a run and its unclipped control run may differ."""
_SAME = tuple(field.name for field in fields(TrainConfig) if field.name not in _FREE)
_PLAIN_RULES = frozenset({"sgd", "momentum", "nesterov"})
"""Rules whose step is proportional to the gradient, so that a shorter gradient is a smaller lr."""
PLAIN = "plain"
"""Name among the constants of a person's own optimizer of whether it is such a rule, 1 or 0."""
ADAPTIVE_RULES = frozenset({"rmsprop", "adam", "nadam", "adamw"})
"""Rules that divide by the root of a mean of squared gradients, and so divide out whatever shortens all of them alike."""


@dataclass(frozen=True, kw_only=True)
class ClipThreshold:
    """A threshold for `max_grad_norm`, with the norms that it comes from; None where it cannot be measured.

    Attributes:
        reason: why there is no threshold, else "".
        all_steps: the same percentile over all finite norms, the first steps included.
        windows: the same percentile in each window of the whole run, in order of time; NaN for a window without finite norms.
        drift: largest over smallest median of as many windows of the steady stretch.
        median, low, high: of the steady stretch, the "typical" norm (F4.5) and its 25th and 75th percentile.
        ratio: threshold / median (F4.5).
        clip_frac: share of the finite norms of the whole run that lie above the threshold: what would be clipped.
        first_step, last_step: of the steady stretch.
        nonfinite, zeros: how many norms are NaN or infinite (counted, never averaged), and exactly 0.
    """

    threshold: float | None
    percentile: float
    reason: str = ""
    all_steps: float | None = None
    windows: tuple[float, ...] = ()
    drift: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    clip_frac: float | None = None
    first_step: int = 0
    last_step: int = -1
    steps: int = 0
    nonfinite: int = 0
    zeros: int = 0


def ordinal(percentile: float) -> str:
    """Return a percentile in words: 90th, 51st, 12th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(int(percentile) % 10, "th") if percentile % 1 == 0 else "th"
    return f"{percentile:g}{'th' if 10 <= percentile % 100 <= 20 else ending}"


def _arrival(values: FloatArray, *, start_frac: float = 0.1, rounding: float = 1e-6) -> int:
    """Return the step from which on a run has nothing left to learn, or its length: its norms stay near rounding.

    Without noise gradients shrink for as long as training goes on. Norms below the share `rounding` of the median over the
    first `start_frac` of the run are rounding (rule of thumb: the resolution of float32).
    """
    head = values[: max(1, math.ceil(start_frac * values.size))]
    head = head[np.isfinite(head)]
    if not head.size or not head.any():
        return int(values.size)
    alive = np.flatnonzero(~(values <= rounding * float(np.median(head[head > 0]))))
    return int(alive[-1]) + 1


def steady_stretch(
    steps: int,
    *,
    warmup_steps: int = 0,
    rises: Sequence[tuple[int, int | None]] = (),
    skip_frac: float = 0.1,
) -> tuple[int, int]:
    """Return (first, end) of the steps whose norms are typical; `end` is exclusive.

    Args:
        skip_frac: share of the run that counts as its start, the cap on warmup of F3.10.
    """
    start = min(max(math.ceil(skip_frac * steps), warmup_steps), steps)
    stretches = []
    for onset, back in sorted(rises, key=lambda rise: rise[0]):
        stretches.append((start, max(start, min(onset + 1, steps))))
        start = steps if back is None else max(start, min(back, steps))
    return max([*stretches, (start, steps)], key=lambda stretch: stretch[1] - stretch[0])


def choose_threshold(
    norms: ArrayLike,
    *,
    percentile: float = 90.0,
    first: int | None = None,
    end: int | None = None,
    min_steps: int = 20,
    equal_rtol: float = 1e-6,
) -> ClipThreshold:
    """Choose a clipping threshold: a percentile of the unclipped norms of a steady stretch of one run.

    Args:
        norms: L2 norms of the gradient before clipping, shape (steps,).
        percentile: 90 is the playbook's start (F4.9), to be lowered where instability stays (F4.10).
        first, end: of the steady stretch, `end` exclusive; None leaves out the start, and is the end of the run.
        min_steps: fewer finite norms in the stretch choose nothing: a tenth of 20 is 2 (rule of thumb).
        equal_rtol: norms that differ by no more than this share are equal (rule of thumb: rounding of float32).
    """
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile={percentile!r} must be above 0 and at most 100.")
    values = np.asarray(norms, dtype=np.float64).ravel()
    usual = steady_stretch(_arrival(values))
    start, stop = (usual[0] if first is None else first), (usual[1] if end is None else end)
    finite = np.isfinite(values)
    common: dict[str, Any] = {
        "percentile": float(percentile), "first_step": start, "last_step": stop - 1, "steps": values.size,
        "nonfinite": int((~finite).sum()), "zeros": int((values == 0).sum()),
        "all_steps": float(np.percentile(values[finite], percentile)) if finite.any() else None,
        "windows": tuple(_percentile(part, percentile) for part in np.array_split(values, _WINDOWS)),
    }  # fmt: skip
    steady = values[start:stop][finite[start:stop]]
    why = _useless(values, steady, percentile, min_steps, equal_rtol)
    if why:
        return ClipThreshold(threshold=None, reason=why, **common)
    low, median, high = (float(q) for q in np.percentile(steady, [25, 50, 75]))
    threshold = float(np.percentile(steady, percentile))
    typical = [_percentile(part, 50.0) for part in np.array_split(values[start:stop], _WINDOWS)]
    known = [value for value in typical if value > 0]
    return ClipThreshold(
        threshold=threshold, median=median, low=low, high=high, ratio=threshold / median if median > 0 else None,
        clip_frac=float((values[finite] > threshold).mean()), drift=max(known) / min(known) if len(known) > 1 else None, **common,
    )  # fmt: skip


def _useless(values: FloatArray, steady: FloatArray, percentile: float, min_steps: int, equal_rtol: float) -> str:
    """Return why no threshold can be chosen from these norms, "" where one can."""
    if not values.size:
        return "no gradient norm was recorded"
    if not np.isfinite(values).any():
        return f"none of the {values.size} gradient norms is finite"
    if steady.size < min_steps:
        return f"the steady stretch has {steady.size} finite gradient norms, and {min_steps} are needed"
    if not steady.any():
        return "all gradient norms are 0: no gradient reaches the parameters"
    if np.ptp(steady) <= equal_rtol * steady.max():
        return f"all gradient norms are equal ({steady[0]:.4g}): a threshold would clip every step or none"
    if np.percentile(steady, percentile) > 0:
        return ""
    return f"{(steady == 0).mean():.0%} of the gradient norms are 0, and so is their {ordinal(percentile)} percentile"


def _percentile(values: FloatArray, percentile: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percentile)) if known.size else math.nan


@dataclass(frozen=True, kw_only=True)
class ReferenceNorms:
    """The trial that thresholds are taken from: its L2 norms before clipping, shape (steps,), and its steady stretch, `end` exclusive."""

    item: TrialVerdict
    norms: FloatArray
    first: int
    end: int

    @property
    def clipped(self) -> bool:
        """The run was itself clipped: its norms before clipping are known, its path is another one."""
        return max_grad_norm_of(self.item.curve.config) is not None

    def threshold(self, percentile: float) -> ClipThreshold:
        """Return `choose_threshold` of these norms; its first and last step are those of the run."""
        found, at = (
            choose_threshold(self.norms, percentile=percentile, first=self.first, end=self.end),
            self.item.curve.at_steps,
        )
        found = replace(found, nonfinite=found.nonfinite - int(passed_over(self.item.curve.steps).sum()))
        if not self.first < self.end <= at.size:
            return found
        return replace(found, first_step=int(at[self.first]), last_step=int(at[self.end - 1]))


def reference_norms(record: RecordLike, *, skip_frac: float = 0.1) -> ReferenceNorms | None:
    """Return the norms of the run that says what is typical; None when there is none."""
    usable = judged(record).verdicts(lambda c: c.stage not in SHORT and "grad_norm" in c.steps)
    if not usable:
        return None
    wanted = [number(record.facts.get("clipping_reference_lr")), number(record.config.get("peak_lr"))]

    def preference(found: TrialVerdict) -> tuple[float, ...]:
        curve = found.curve
        other_lr = [not math.isclose(curve.lr, lr, rel_tol=1e-9) for lr in wanted]
        clipped, level = max_grad_norm_of(curve.config) is not None, objective(curve) if all(other_lr) else 0.0
        return (found.lost, clipped, not curve.point, not curve.finished, *other_lr, level, curve.trial)

    item = min(usable, key=preference)
    row = item.curve.row
    rises = [(row(r.onset_step), None if r.back_step is None else row(r.back_step)) for r in item.verdict.rises]
    norms = item.curve.column("grad_norm")
    warmup = row(int(item.curve.config.get("warmup_steps") or 0))
    first, end = steady_stretch(_arrival(norms), warmup_steps=warmup, rises=rises, skip_frac=skip_frac)
    return ReferenceNorms(item=item, norms=norms, first=first, end=end)


def max_grad_norm_of(config: Mapping[str, Any]) -> float | None:
    """Return the clipping threshold of a trial's row; None where clipping is off."""
    value = number(config.get("max_grad_norm"))
    return value if math.isfinite(value) else None


def clipped_runs(record: RecordLike, *, parked_frac: float = 0.5) -> list[dict[str, Any]]:
    """Return every finished run with a clipping threshold, loosest first within an lr, as JSON values.

    Each holds trial, stage, seed, lr, max_grad_norm, when, outcome, lasting and loss (as `judged_runs` has them), and
    clip_frac (share of its steps that were clipped), late_clip_frac (the same at its end), parked (that share is `parked_frac` or
    more; rule of thumb, as F4.11), falling (its loss is still coming down when it ends), alternation (-1: the loss swings to and fro
    from step to step), nonfinite (steps whose norm is not finite), effective_lr (lr times the mean factor that clipping shortened a
    step by (F4.6); null for the adaptive rules), and of the same run without clipping, where it was made: twin, twin_outcome,
    twin_lasting, twin_loss.
    """
    items = judged(record).verdicts(lambda c: c.stage not in SHORT and c.finished and "grad_norm" in c.steps)
    limits = [max_grad_norm_of(item.curve.config) for item in items]
    keys = [tuple(comparable(item.curve.config.get(name)) for name in _SAME) for item in items]
    twins = {key: item for key, item, limit in zip(keys, items, limits, strict=True) if limit is None}
    rows = [
        _row(item, limit, twins.get(key), parked_frac)
        for key, item, limit in zip(keys, items, limits, strict=True)
        if limit is not None
    ]
    return sorted(rows, key=lambda row: (row["lr"], -row["max_grad_norm"], row["seed"], row["trial"]))


def fixed_step(record: RecordLike, *, frac: float = 0.9, tried: bool = True) -> bool:
    """Tell whether the baseline clips nearly every step though it trains stably without: then its lr sets the length of every step.

    An adaptive rule hardly feels a clipping that is always on. `frac` is the share of the steps clipped (rule of thumb). Without `tried`,
    whether that may be, before it was trained without.
    """
    limit, lr = max_grad_norm_of(record.config), record.config.get("peak_lr")
    constants = (record.facts.get("replaced") or {}).get("constants") or {}
    if limit is None or not (str(record.config.get("optimizer")) in _PLAIN_RULES or constants.get(PLAIN)):
        return False
    own = {"max_grad_norm": limit, "lr": lr, "seed": record.config.get("shared_seed")}
    rows = [row for row in clipped_runs(record) if all(row[name] == value for name, value in own.items())]
    return any((row["clip_frac"] or 0.0) >= frac and (not tried or row["twin_lasting"] is False) for row in rows)


def alternation(loss: FloatArray) -> float | None:
    """Return the correlation of each change of the loss with the next one: -1 in a 2-cycle, about -0.5 in plain noise."""
    change = np.diff(loss)
    scale = float(np.max(np.abs(change))) if change.size else 0.0
    if loss.size < 4 or not math.isfinite(scale) or scale <= 1e-12 * float(np.max(np.abs(loss))):
        return None
    before, after = change[:-1] / scale, change[1:] / scale
    found = float(before @ after / math.sqrt(float(before @ before) * float(after @ after) or 1.0))
    return found if math.isfinite(found) else None


def _row(item: TrialVerdict, limit: float, twin: TrialVerdict | None, parked_frac: float) -> dict[str, Any]:
    curve, norms, table = item.curve, item.curve.column("grad_norm"), item.curve.steps
    finite, hit = np.isfinite(norms), norms > limit
    if "clipped" in table:  # as recorded, where it was
        recorded = curve.column("clipped")
        hit = np.where(np.isfinite(recorded), recorded > 0, hit)
    late = _late(item)
    late_frac = _share(hit[late & finite])
    plain = str(curve.config.get("optimizer")) in _PLAIN_RULES and finite.any()
    known = norms[finite]
    same: dict[str, Any] = dict.fromkeys(("twin", "twin_outcome", "twin_lasting", "twin_loss"))
    if twin is not None:
        same = {
            "twin": twin.curve.trial, "twin_outcome": twin.verdict.outcome, "twin_lasting": twin.lost,
            "twin_loss": objective(twin.curve),
        }  # fmt: skip
    return {
        "trial": curve.trial, "stage": curve.stage, "seed": curve.seed, "lr": curve.lr, "max_grad_norm": limit,
        "when": item.verdict.when, "outcome": item.verdict.outcome, "lasting": item.lost, "loss": objective(curve),
        "clip_frac": _share(hit[finite]), "late_clip_frac": late_frac,
        "parked": late_frac is not None and late_frac >= parked_frac,
        "norm_ratio": float(np.median(known)) / limit if len(known) else None,
        "falling": _falling(curve.loss), "alternation": alternation(curve.loss[late]), "nonfinite": int((~finite & ~passed_over(table)).sum()),
        "effective_lr": curve.lr * float(np.minimum(1.0, limit / np.maximum(known, limit)).mean()) if plain else None,
    } | same  # fmt: skip


def _late(item: TrialVerdict, *, tail_frac: float = 0.1, peak_frac: float = 0.9) -> NDArray[np.bool_]:
    """Return which steps are the end of the run, shape (steps,).

    Only steps with `peak_frac` of the largest lr count: a decayed lr leaves nothing to be masked (rule of thumb).
    """
    lr = item.curve.column("lr")
    high = np.flatnonzero(lr >= peak_frac * np.nanmax(lr)) if np.isfinite(lr).any() else np.arange(lr.size)
    late = np.zeros(lr.size, dtype=bool)
    late[high[-max(1, round(tail_frac * item.curve.planned_rows)) :]] = True
    return late


def _falling(loss: FloatArray, *, tail_frac: float = 0.1, falling_frac: float = 0.02) -> bool:
    """Tell whether the last steps gained more than a share of all that was learned, over the steps before (O1's 2 %)."""
    tail = max(1, round(tail_frac * loss.size))
    if loss.size < 3 * tail or not np.isfinite(loss).all():
        return False
    late, before = float(np.mean(loss[-tail:])), float(np.mean(loss[-2 * tail : -tail]))
    return before - late > falling_frac * max(float(loss[0]) - late, 0.0) and late < before


def _share(hit: NDArray[np.bool_]) -> float | None:
    return float(hit.mean()) if hit.size else None
