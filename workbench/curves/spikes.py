"""What can be said about one rise of the loss: the update it begins with, its cause, its warning, and who would have seen it (F1.9, F1.10, F1.13)."""

import math
from collections.abc import Mapping
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
    shape = "rise at the start, then decline" if verdict.outcome == "recovered" else "no clear decline"
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


_WITH_SECOND_MOMENT = ("adam", "adamw", "nadam")


def first_update(
    curve: TrialCurve, rise: Rise, facts: Mapping[str, Any], *, lr_jump: float = 1.5, norm_ratio: float = 5.0, loss_sds: float = 6.0,
    window: int = 50, slack: int = 5,
) -> dict[str, Any] | None:  # fmt: skip
    """Return what is known of the update that a rise begins with; None where no update around its onset stands out.

    Args:
        lr_jump: times that of the update before that makes a learning rate stand out.
        norm_ratio: times the median of the `window` updates before the onset that makes a gradient norm stand out.
        loss_sds: distance from their median, in their standard deviations, that makes a loss stand out (rules of thumb, all five).

    Returns:
        update; loss, grad_norm and lr with the medians before the onset; examples (indices of the loader's dataset, the first 256) of size;
        usual_size, of the loader's batches; short: whether this one has at most half as many examples (rule of thumb);
        batch, where no sampler told: shape and sum of its first values; second_moment_ratio: squared gradient over the optimizer's second moment before it, both
        summed over the parameters: about 1 in quiet training.
    """
    onset = curve.row(rise.onset_step)
    stop = onset + 2 if rise.peak_step is None else curve.row(rise.peak_step) + 1
    start = max(0, onset - slack)
    rows = range(max(start, 1), min(max(stop, onset + 2), curve.loss.size))
    before = slice(max(0, start - window), start)
    loss, norm, lr = curve.loss, curve.column("grad_norm"), curve.column("lr")
    usual = {
        "loss": _median(loss[before]),
        "grad_norm": _median(norm[:start][np.isfinite(norm[:start])][-window:]),
        "lr": _median(lr[before]),
    }
    noise = 1.4826 * _median(np.abs(loss[before] - usual["loss"]))
    noise = max(noise, 1e-3 * abs(usual["loss"]))
    for row in rows:
        out = loss[row] > usual["loss"] + loss_sds * noise or not math.isfinite(loss[row])
        if lr[row] >= lr_jump * lr[row - 1] > 0 or norm[row] >= norm_ratio * usual["grad_norm"] > 0 or out:
            break
    else:
        return None
    update = int(curve.at_steps[row])
    loop = facts.get("loop") or {}
    notes = {note["update"]: note for note in (loop.get("batches") or {}).get("updates", ())}
    found: dict[str, Any] = {"update": update}
    for name, values in (("loss", loss), ("grad_norm", norm), ("lr", lr)):
        found |= {name: float(values[row]), f"{name}_before": usual[name]}
    found |= {name: notes.get(update, {}).get(name) for name in ("examples", "size", "batch")}
    usual_size = (loop.get("loaders") or {}).get("batch_size")
    found |= {"usual_size": usual_size, "short": bool(found["size"] and usual_size and 2 * found["size"] <= usual_size)}
    return found | {"second_moment_ratio": _second_moment_ratio(curve, row, loop)}


def told(found: Mapping[str, Any], *, most: int = 8) -> str:
    """Return the update in a sentence, with `most` of its examples."""
    said = []
    for name, word in (("lr", "learning rate"), ("loss", "loss"), ("grad_norm", "gradient norm")):
        value, before = found[name], found[f"{name}_before"]
        if value > 1.5 * before:
            said.append(f"{word} {value:.3g}, {before:.3g} before")
    if found["short"]:
        said.append(
            f"a short batch, {found['size']} examples where others have {found['usual_size']}; drop_last=True of the DataLoader leaves it out"
        )
    elif found["examples"] is not None:
        shown = ", ".join(str(i) for i in found["examples"][:most])
        more = found["size"] - most
        said.append(f"examples {shown}{f' and {more} more' if more > 0 else ''}")
    elif found["batch"] is not None and found["batch"]["sum"] is not None:
        shape, total = tuple(found["batch"]["shape"]), found["batch"]["sum"]
        said.append(f"a batch of shape {shape} whose first 4,096 values sum to {total:.6g}")
    if (found["second_moment_ratio"] or 0.0) > 10.0:
        said.append(f"a squared gradient {found['second_moment_ratio']:.3g} times the optimizer's second moment")
    return f" It begins with update {found['update']}: {'; '.join(said)}." if said else ""


def told_course(rise: Rise, times: int) -> str:
    """Return how high the loss went and how soon it was back; `times` is how often that happened in the same run."""
    took = rise.steps_to_recover
    back = "not back yet" if took is None else f"back after {took:,} step{'' if took == 1 else 's'}"
    which = f", the first of {times}" if times > 1 else ""
    peak = f"peak loss {rise.peak_loss:.3g}" if math.isfinite(rise.peak_loss) else "loss not finite"
    return f" ({peak}, up from about {rise.trough_loss:.3g}, {back}{which})"


def told_replay(found: Mapping[str, Any], *, most: int = 3) -> str:
    """Return in a sentence what the replay of the update says, with `most` of its examples."""
    where = f" Replayed from step {found['started']}, {'bit for bit' if found['exact'] else 'to rounding'}: "
    batch, before, after = (found[name] for name in ("batch_before", "others_before", "others_after"))
    said = {"data": "the batch itself is to blame", "both": "the batch stands out, and so do others right before it",
            "state": "the state is to blame, not the batch", None: "nothing stands out"}  # fmt: skip
    told = f"{where}{said[found['cause']]}. Under the weights {found['back']} updates before, the loss of its batch is {batch:.3g} and that of others {before:.3g}"
    if found["cause"] in ("data", "both"):
        shown = zip(found["examples"][:most], found["example_losses"][:most], strict=True)
        return f"{told}; examples {', '.join(f'{i} ({loss:.3g})' for i, loss in shown)} have the largest."
    ratio = found["second_moment_ratio"]
    stale = f", and its squared gradient was {ratio:.3g} times the second moment" if ratio and ratio > 10 else ""
    ratio = found["update_ratio"]
    length = f"{ratio:.3g} times as long as usual" if math.isfinite(ratio) else "made after updates of length 0"
    return f"{told}; after it others have {after:.3g}. The update was {length}{stale}."


def _second_moment_ratio(curve: TrialCurve, row: int, loop: Mapping[str, Any]) -> float | None:
    """Follow the sum of Adam's second moment, which is a moving average of the squared gradient norms that the optimizer was given."""
    if curve.config.get("optimizer") not in _WITH_SECOND_MOMENT or row < 1:
        return None
    beta = float(curve.config.get("beta2", 0.999))
    norm = curve.column("grad_norm")[: row + 1]
    limits = [
        float(text.split()[1]) for text in ((loop.get("order") or {}).get("limits") or {}) if text.startswith("clip ")
    ]
    clipped = curve.column("clipped")[: row + 1] > 0
    if clipped.any() and len(limits) != 1:
        return None
    squares = np.where(clipped, limits[0] if limits else 0.0, norm) ** 2
    begun = (loop.get("batches") or {}).get("second_moment") or {"sum": 0.0, "steps": 0.0}
    moment, count = float(begun["sum"]), float(begun["steps"])
    known = np.flatnonzero(np.isfinite(squares[:-1]))
    for at, gap in zip(known, np.diff(known, append=row), strict=True):  # each stands for the updates up to the next
        left = beta ** float(gap)
        moment, count = left * moment + (1.0 - left) * float(squares[at]), count + gap
    if moment <= 0 or count < 1 or not math.isfinite(squares[-1]):
        return None
    return float(squares[-1] / (moment / (1.0 - beta**count)))


def _median(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size >= 5 else math.nan
