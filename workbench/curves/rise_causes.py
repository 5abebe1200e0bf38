"""What can be said about one rise of the loss: its cause, its warning, and who would have seen it (F1.9, F1.10, F1.13)."""

import math
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from workbench.curves.instability import Rise
from workbench.curves.judged import judged
from workbench.curves.lr_search import unstable_bracket
from workbench.curves.trial_curves import RecordLike, TrialCurve, TrialVerdict

Cause = Literal["data", "curvature", "optimizer_state", "schedule"]
FloatArray = NDArray[np.float64]


def rise_cause(
    curve: TrialCurve, rise: Rise, *, outlier_ratio: float = 5.0, lr_jump: float = 1.5, window: int = 50, slack: int = 5
) -> dict[str, Any]:
    """Say what the steps around the onset point to: a hint with its numbers, no proof (F1.2).

    "schedule": the lr jumps. "data": the gradient norm jumps within one step, from a quiet level. "curvature": it
    grows over several steps. "optimizer_state": the update's norm jumps and the gradient's does not.

    Args:
        outlier_ratio: times its median in the steps before that make a norm an outlier (rule of thumb).
        lr_jump: ratio of two neighbouring lrs that counts as a jump (rule of thumb).
        window: steps before the onset that the median is taken over.
        slack: steps before the onset in which the cause may lie.

    Returns:
        cause (None: the record cannot tell), outlier_step, outlier_ratio, jump_step, lead_steps.
    """
    jump, onset = _jump_row(curve, rise), curve.row(rise.onset_step)
    found: dict[str, Any] = dict.fromkeys(("cause", "outlier_step", "outlier_ratio", "jump_step", "lead_steps"))
    found["jump_step"] = int(curve.at_steps[jump])
    first, last = max(0, onset - slack), min(max(jump, onset + 1), curve.loss.size - 1)
    found_in = (curve.column(name) for name in ("lr", "grad_norm", "update_norm"))
    lr, norms, updates = (values if np.isfinite(values).any() else None for values in found_in)
    if lr is not None and _jumps(lr[first : last + 2], lr_jump, 0.05 * min(curve.lr, _largest(lr[:first], curve.lr))):
        return found | {"cause": "schedule"}
    for values in () if norms is None else (norms, updates):
        seen = None if values is None else _outlier(values, first, last, window, outlier_ratio)
        if values is None or seen is None:
            continue
        row, cause = seen["outlier_step"], "optimizer_state"
        seen["outlier_step"] = int(curve.at_steps[row])
        if values is norms:
            cause = "data" if _sudden(values, curve.loss, row, 0.5 * outlier_ratio) else "curvature"
        return found | seen | {"cause": cause, "lead_steps": int(curve.at_steps[jump] - curve.at_steps[row])}
    return found


def _sudden(norms: FloatArray, loss: FloatArray, row: int, ratio: float) -> bool:
    """Tell whether a norm is `ratio` times the one before it; where that was not measured, whether the loss climbed by as much in one update."""
    if row == 0 or math.isfinite(norms[row - 1]) or row < 6:
        return bool(row == 0 or norms[row] >= ratio * norms[row - 1])
    level = float(np.nanmedian(loss[max(0, row - 50) : row]))
    return bool(loss[row] - level >= ratio * abs(loss[row - 1] - level))


def _largest(values: FloatArray, otherwise: float) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else otherwise


def _jump_row(curve: TrialCurve, rise: Rise) -> int:
    """Return the first of two rows in succession whose loss stands halfway up the rise."""
    onset, stop = curve.row(rise.onset_step), curve.row(rise.back_step) if rise.back_step else curve.loss.size
    part = np.nan_to_num(curve.loss[onset:stop], nan=math.inf, posinf=math.inf)
    finite = part[np.isfinite(part)]
    level = rise.trough_loss + 0.5 * (float(np.median(finite)) - rise.trough_loss) if finite.size else rise.trough_loss
    up = part > max(level, rise.trough_loss)
    both = np.flatnonzero(up & np.append(up[1:], True))
    return onset + (int(both[0]) if both.size else 0)


def _jumps(values: FloatArray, ratio: float, floor: float) -> bool:
    if values.size < 2:
        return False
    before, after = values[:-1], values[1:]
    return bool(((after >= ratio * before) & (before >= floor)).any())


def _outlier(values: FloatArray, first: int, last: int, window: int, ratio: float) -> dict[str, Any] | None:
    """Return step and size of the first value in [first, last] far above the median of the steps before `first`."""
    before = values[:first]
    before = before[np.isfinite(before)][-window:]
    if before.size < 5 or np.median(before) <= 0:
        return None
    sizes = np.nan_to_num(values[first : last + 1] / np.median(before), nan=0.0, posinf=math.inf)
    hits = np.flatnonzero(sizes >= ratio)
    return {"outlier_step": first + int(hits[0]), "outlier_ratio": float(sizes[hits[0]])} if hits.size else None


def seen_at_interval(
    item: TrialVerdict, evals: pd.DataFrame, interval: int, *, rise_frac: float = 0.1
) -> dict[str, Any]:
    """Tell whether evaluating every `interval` steps would have shown the rise that every step shows (F1.10).

    Args:
        evals: the record's evaluations; the training loss of each step stands in where they are sparser than steps.
        rise_frac: a sampled rise is seen when it is this share of what the samples fell by in all (rule of thumb).
    """
    rows = evals[(evals["trial"] == item.curve.trial) & (evals["split"] == "train") & (evals["metric"] == "loss")]
    rows = rows.sort_values("step")
    steps, values = rows["step"].to_numpy(dtype=np.int64), rows["value"].to_numpy(dtype=np.float64)
    source = "train loss evaluated at every step"
    if steps.size < 0.9 * item.curve.loss.size:
        dense = item.curve.planned_rows >= item.curve.total_steps
        steps, values, source = (
            item.curve.at_steps,
            item.curve.loss,
            f"training loss of every {'' if dense else 'logged '}step",
        )
    sampled = values[np.unique(steps // interval, return_index=True)[1]]  # the first of each interval
    sampled = sampled[np.isfinite(sampled)]
    if sampled.size < 2:
        return {"interval": interval, "missed": True, "source": source}
    fallen = sampled - np.minimum.accumulate(sampled)
    seen = bool((fallen > rise_frac * (sampled[0] - sampled.min())).any())
    return {"interval": interval, "missed": not seen, "source": source}


def confirmation(item: TrialVerdict, *, lr_star: float | None, decline_frac: float = 0.1) -> dict[str, Any]:
    """Read a run at several times lr*: a steady decline followed by a sudden rise points to instability (F1.13).

    `decline_frac` is the share of the initial loss's distance to the best end that counts as a decline (rule of thumb).
    """
    verdict = item.verdict
    start = verdict.loss_ref if verdict.loss_ref is not None else math.nan
    lowest = verdict.trough_loss if verdict.trough_loss is not None else math.nan
    fell = [r for r in verdict.rises if start - r.trough_loss > decline_frac * verdict.progress]
    shape = "rise at the start, then decline" if verdict.outcome == "recovered" else "never declined"
    if fell:
        shape = "rise after decline"
    elif not verdict.rises and start - lowest > decline_frac * verdict.progress and not verdict.high:
        shape = "monotone decline"
    return {
        "trial": item.curve.trial, "lr": item.curve.lr, "times_lr_star": None if lr_star is None else item.curve.lr / lr_star,
        "shape": shape, "jump_step": fell[-1].onset_step if fell else None, "outcome": verdict.outcome,
    }  # fmt: skip


def edge_from_growth(
    loss: ArrayLike, *, lr: float, optimizer: str, momentum: float = 0.9, beta1: float = 0.9, steps: int = 6
) -> float | None:
    """Return the largest stable lr that the growth of one unstable run points to; None when it does not grow, or for an unknown rule.

    On a quadratic the unstable mode grows by a factor rho a step, and rho fixes lr times curvature (the root of the
    rule's characteristic polynomial); its ratio to the rule's exact threshold is that of lr to the edge. On a network
    the curvature moves, so this only says where to confirm with two runs.

    Args:
        loss: training loss, shape (steps,); the growth is that of its last `steps`.
        lr: learning rate of its last steps.
    """
    values = np.asarray(loss, dtype=np.float64).ravel()
    finite = values[np.isfinite(values)]
    if finite.size < steps + 1:
        return None
    excess = finite - finite.min()
    first, last = excess[-1 - steps], excess[-1]
    if first <= 0 or last <= first:
        return None
    rho = math.exp((math.log(last) - math.log(first)) / (2 * steps))
    if optimizer == "sgd":
        return lr * 2.0 / (1.0 + rho)
    if optimizer == "nesterov":
        grown = 1.0 + rho**2 / ((1.0 + momentum) * rho + momentum)
        return lr * (1.0 + 1.0 / (1.0 + 2.0 * momentum)) / grown
    memory = {"momentum": momentum, "rmsprop": momentum, "adam": beta1, "adamw": beta1}.get(optimizer)
    return None if memory is None else lr * _heavy_ball(1.0, memory) / _heavy_ball(rho, memory)


def _heavy_ball(rho: float, memory: float) -> float:
    return (rho**2 + memory) / rho + 1.0 + memory


def growth_edge(record: RecordLike) -> float | None:
    """Return the edge that the growth of the sweep's lowest unstable trial points to, for full batches; else None."""
    study = judged(record)
    table = study.sweep()
    bracket = unstable_bracket(table)
    if bracket is None or bracket.lower is None or not table.noise_free:
        return None
    curve = next((c for c in study.full_length if math.isclose(c.lr, bracket.upper, rel_tol=1e-9)), None)
    if curve is None:
        return None
    momentum, beta1, rule = (curve.config[name] for name in ("momentum", "beta1", "optimizer"))
    return edge_from_growth(curve.loss, lr=curve.lr, optimizer=rule, momentum=momentum, beta1=beta1)
