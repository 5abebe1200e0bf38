"""What clipping did to each run that had it, and the run whose norms a threshold is taken from (F4.9 to F4.12)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.config import TrainConfig
from workbench.curves.clip_threshold import ClipThreshold, arrival, choose_threshold, steady_stretch
from workbench.curves.judged import judged
from workbench.curves.sweep import objective
from workbench.curves.trials import RecordLike, TrialVerdict
from workbench.record.json_values import number
from workbench.record.roles import SHORT


@dataclass(frozen=True, kw_only=True)
class ReferenceNorms:
    """The norms that thresholds are taken from.

    Attributes:
        item: the trial, with the verdict on its loss.
        norms: L2 norms of its gradient before clipping, shape (steps,).
        first: index of the first step of its steady stretch.
        end: index behind the last one.
    """

    item: TrialVerdict
    norms: NDArray[np.float64]
    first: int
    end: int

    @property
    def clipped(self) -> bool:
        """The run was itself clipped: its norms before clipping are known, its path is another one."""
        return max_grad_norm_of(self.item.curve.config) is not None

    def threshold(self, percentile: float, **settings: Any) -> ClipThreshold:
        """Return `choose_threshold` of these norms."""
        return choose_threshold(self.norms, percentile=percentile, first=self.first, end=self.end, **settings)


def reference_norms(record: RecordLike, *, skip_frac: float = 0.1) -> ReferenceNorms | None:
    """Return the norms of the run that says what is typical; None when there is none.

    It is a full-length trial without clipping that trains stably, at the lr which a clipping study asked for, else
    at the baseline's, else the one with the lowest loss. Where no run is stable, the steps before its loss rises count.
    """
    usable = judged(record).verdicts(lambda c: c.stage not in SHORT and "grad_norm" in c.steps)
    if not usable:
        return None
    wanted = [number(record.facts.get("clipping_reference_lr")), number(record.config.get("peak_lr"))]
    item = min(usable, key=lambda found: _preference(found, wanted))
    rises = [(rise.onset_step, rise.back_step) for rise in item.verdict.rises]
    warmup = int(item.curve.config.get("warmup_steps") or 0)
    norms = norms_of(item)
    first, end = steady_stretch(arrival(norms), warmup_steps=warmup, rises=rises, skip_frac=skip_frac)
    return ReferenceNorms(item=item, norms=norms, first=first, end=end)


def reference_threshold(record: RecordLike, *, percentile: float = 90.0) -> ClipThreshold:
    """Return the clipping threshold that a record suggests, with the reason where it suggests none."""
    found = reference_norms(record)
    return choose_threshold([], percentile=percentile) if found is None else found.threshold(percentile)


def norms_of(item: TrialVerdict) -> NDArray[np.float64]:
    """Return the gradient norms of a trial before clipping, shape (steps,)."""
    return item.curve.steps["grad_norm"].to_numpy(dtype=np.float64, na_value=np.nan)


def max_grad_norm_of(config: Mapping[str, Any]) -> float | None:
    """Return the clipping threshold of a trial's row; None where clipping is off."""
    value = number(config.get("max_grad_norm"))
    return value if math.isfinite(value) else None


def _preference(item: TrialVerdict, wanted: Sequence[float]) -> tuple[float, ...]:
    """Return a key that is smallest for the best reference."""
    curve = item.curve
    unstable = item.verdict.is_lasting or item.verdict.high
    other_lr = [not math.isclose(curve.lr, lr, rel_tol=1e-9) for lr in wanted]
    clipped = max_grad_norm_of(curve.config) is not None
    level = objective(curve) if all(other_lr) else 0.0
    other_stage = not curve.point
    return (unstable, clipped, other_stage, not curve.finished, *other_lr, level, curve.trial)


FREE = frozenset(
    {
        "max_grad_norm",
        "eval_every_steps",
        "eval_batch_size",
        "keep_best",
        "checkpoint_every_steps",
        "select",
        "select_mode",
    }
)
"""Config fields in which a run and its unclipped twin may differ."""
SAME = tuple(field.name for field in fields(TrainConfig) if field.name not in FREE)
PLAIN_RULES = frozenset({"sgd", "momentum", "nesterov"})
"""Rules whose step is proportional to the gradient, so that a shorter gradient is a smaller lr."""


def clipped_runs(
    record: RecordLike, *, tail_frac: float = 0.1, peak_frac: float = 0.9, parked_frac: float = 0.5
) -> list[dict[str, Any]]:
    """Return every finished run with a clipping threshold, loosest first within an lr, as JSON values.

    Each holds trial, stage, seed, lr, max_grad_norm, when, outcome, lasting and loss (as `judged_runs` has them), and
    clip_frac (share of its steps that were clipped), late_clip_frac (the same at its end), parked (the norm stays above
    the threshold at the end), falling (its loss is still coming down when it ends), alternation (-1: the loss swings to and fro from step to step), nonfinite (steps whose norm is
    not finite), effective_lr (lr times the mean factor that clipping shortened a step by; null for the adaptive rules),
    and of the same run without clipping: twin, twin_outcome, twin_lasting, twin_loss (null where it was not run).

    Args:
        tail_frac: share of the steps that is the end.
        peak_frac: only steps with at least this share of the largest lr count as the end: at the foot of a decaying
            schedule nothing is left to be masked (rule of thumb).
        parked_frac: share of the steps clipped at the end from which the norm counts as parked (rule of thumb, as F4.11).
    """
    items = judged(record).verdicts(lambda c: c.stage not in SHORT and c.finished and "grad_norm" in c.steps)
    twins = {_key(item.curve.config): item for item in items if max_grad_norm_of(item.curve.config) is None}
    rows = [
        _row(item, twins.get(_key(item.curve.config)), tail_frac, peak_frac, parked_frac)
        for item in items
        if max_grad_norm_of(item.curve.config) is not None
    ]
    return sorted(rows, key=lambda row: (row["lr"], -row["max_grad_norm"], row["seed"], row["trial"]))


def fixed_step(record: RecordLike, *, frac: float = 0.9) -> bool:
    """Tell whether the baseline clips nearly every step though it trains stably without: then its lr sets the length of every step.

    An adaptive rule hardly feels a clipping that is always on, so its lr is what it is everywhere.

    Args:
        frac: share of the steps clipped (rule of thumb).
    """
    limit, lr = max_grad_norm_of(record.config), record.config.get("peak_lr")
    if limit is None or str(record.config.get("optimizer")) not in PLAIN_RULES:
        return False
    own = {"max_grad_norm": limit, "lr": lr, "seed": record.config.get("shared_seed")}
    rows = [row for row in clipped_runs(record) if all(row[name] == value for name, value in own.items())]
    return any((row["clip_frac"] or 0.0) >= frac and row["twin_lasting"] is False for row in rows)


def step_scale(norms: ArrayLike, max_grad_norm: float) -> NDArray[np.float64]:
    """Return the factor by which clipping shortens each finite gradient, shape (finite norms,) (F4.6)."""
    values = np.asarray(norms, dtype=np.float64)
    values = values[np.isfinite(values)]
    return np.asarray(np.minimum(1.0, max_grad_norm / np.maximum(values, max_grad_norm)))


def alternation(loss: ArrayLike) -> float:
    """Return the correlation of each change of the loss with the next one: -1 in a 2-cycle, about -0.5 in plain noise.

    Args:
        loss: shape (steps,). Fewer than 4 steps, or a loss that stands still, give NaN.
    """
    values = np.asarray(loss, dtype=np.float64)
    change = np.diff(values)
    scale = float(np.max(np.abs(change))) if change.size else 0.0
    if values.size < 4 or not math.isfinite(scale) or scale <= 1e-12 * float(np.max(np.abs(values))):
        return math.nan
    change = change / scale
    return float(
        change[:-1] @ change[1:] / math.sqrt(float(change[:-1] @ change[:-1]) * float(change[1:] @ change[1:]) or 1.0)
    )


def _row(
    item: TrialVerdict, twin: TrialVerdict | None, tail_frac: float, peak_frac: float, parked_frac: float
) -> dict[str, Any]:
    curve, norms = item.curve, norms_of(item)
    limit = max_grad_norm_of(curve.config)
    assert limit is not None
    finite = np.isfinite(norms)
    hit = _clipped(item, norms, limit)
    late = _late(item, tail_frac, peak_frac)
    late_frac = _share(hit[late & finite])
    plain = str(curve.config.get("optimizer")) in PLAIN_RULES
    return {
        "trial": curve.trial, "stage": curve.stage, "seed": curve.seed, "lr": curve.lr, "max_grad_norm": limit,
        "when": item.verdict.when, "outcome": item.verdict.outcome, "lasting": _lasting(item), "loss": objective(curve),
        "clip_frac": _share(hit[finite]), "late_clip_frac": late_frac,
        "parked": late_frac is not None and late_frac >= parked_frac,
        "falling": _falling(curve.loss, tail_frac),
        "alternation": _null(alternation(curve.loss[late])), "nonfinite": int((~finite).sum()),
        "effective_lr": curve.lr * float(step_scale(norms, limit).mean()) if plain and finite.any() else None,
        "twin": None if twin is None else twin.curve.trial,
        "twin_outcome": None if twin is None else twin.verdict.outcome,
        "twin_lasting": None if twin is None else _lasting(twin),
        "twin_loss": None if twin is None else objective(twin.curve),
    }  # fmt: skip


def _clipped(item: TrialVerdict, norms: NDArray[np.float64], limit: float) -> NDArray[np.bool_]:
    """Return which steps were clipped, shape (steps,): as recorded, else by the rule."""
    table = item.curve.steps
    recorded = (
        table["clipped"].to_numpy(dtype=np.float64, na_value=np.nan)
        if "clipped" in table
        else np.full(norms.size, np.nan)
    )
    return np.where(np.isfinite(recorded), recorded > 0, norms > limit)


def _late(item: TrialVerdict, tail_frac: float, peak_frac: float) -> NDArray[np.bool_]:
    """Return which steps are the end of the run, while the lr is near its peak, shape (steps,)."""
    lr = item.curve.steps["lr"].to_numpy(dtype=np.float64, na_value=np.nan)
    high = np.flatnonzero(lr >= peak_frac * np.nanmax(lr)) if np.isfinite(lr).any() else np.arange(lr.size)
    late = np.zeros(lr.size, dtype=bool)
    late[high[-max(1, round(tail_frac * item.curve.total_steps)) :]] = True
    return late


def _falling(loss: NDArray[np.float64], tail_frac: float, *, falling_frac: float = 0.02) -> bool:
    """Tell whether the last steps gained more than a share of all that was learned, over the steps before (O1's 2 %)."""
    tail = max(1, round(tail_frac * loss.size))
    if loss.size < 3 * tail or not np.isfinite(loss).all():
        return False
    late, before = float(np.mean(loss[-tail:])), float(np.mean(loss[-2 * tail : -tail]))
    return before - late > falling_frac * max(float(loss[0]) - late, 0.0) and late < before


def _lasting(item: TrialVerdict) -> bool:
    return item.verdict.is_lasting or item.verdict.high


def _share(hit: NDArray[np.bool_]) -> float | None:
    return float(hit.mean()) if hit.size else None


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _key(config: Mapping[str, Any]) -> Sequence[Hashable]:
    return tuple(_plain(config.get(name)) for name in SAME)


def _plain(value: Any) -> Hashable:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return float(value) if isinstance(value, (bool, int, float, np.number)) else str(value)
