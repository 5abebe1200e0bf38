"""What a training loss allows to say: that it never leaves chance (F1.1), or has no minimum."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workbench.curves.judged import JudgedStudy, judged
from workbench.curves.sweep import FEWEST_STEPS, LRPoint, SweepTable, mean_and_error
from workbench.curves.trial_curves import RecordLike, TrialCurve
from workbench.findings.finding import Codes, Finding

DEEP = 100.0
"""A loss so many times as far below zero as it began above or below, and at least 1, is too low to be one (rule of thumb)."""
_APART = 3.9
"""Factor between learning rates whose depths are held against each other, a little under the four of a sweep's grid."""


def is_deep(lowest: float, first: float, *, deep: float = DEEP) -> bool:
    """Tell whether the lowest loss lies `deep` times as far below zero as that of the untrained model from zero."""
    return lowest < -deep * max(abs(first), 1.0)


def bottomless(record: RecordLike, *, deep: float = DEEP, below: float = 10.0, abyss: float = 1e6) -> tuple[float, float, float] | None:  # fmt: skip
    """Return (lowest training loss, its lr, its first loss) where that run falls without end; None where none does.

    A loss that has a minimum, however low, is reached at learning rates a factor of four apart, and is not twice as far from zero at
    the end of the best run as after a quarter of it. A run that rises further above zero than it falls below diverges: what is negative
    there is rounding, such as that of a cross-entropy of logits beyond 1e15. A loss `abyss` times as far below zero as the first one from
    zero has no minimum, however it got there (rule of thumb); nor has one that lies `below` times as far and
    falls at the same pace to the end (rule of thumb: a density of which each deviation is a millionth of what it was comes there).
    """
    by_lr: dict[float, tuple[float, float, float]] = {}
    paced, others = [], "others" in ((record.facts.get("loop") or {}).get("strangers") or {})  # as a critic's optimizer
    for curve in judged(record).curves:
        known = curve.loss[np.isfinite(curve.loss)]
        if known.size >= 4 and not (is_deep(known.min(), known[0], deep=deep) and known.max() > -known.min()):
            row = (float(known.min()), float(known[: known.size // 4].min()), float(known[0]))
            by_lr[curve.lr] = min(row, by_lr.get(curve.lr, row))
            if is_deep(known[-1], known[0], deep=below) and _keeps_pace(curve) and not others:
                paced.append((row[0], curve.lr, row[2]))
    ranked = sorted((row, lr) for lr, row in by_lr.items())
    if not ranked:
        return None
    (lowest, quarter, first), lr = ranked[0]
    falls_on = is_deep(lowest, first, deep=abyss)
    if len(ranked) > 1:
        second = next((row[0] for row, other in ranked if other <= lr / _APART), ranked[1][0][0])
        falls_on = falls_on or (lowest < 2 * min(second, 0.0) and lowest < 2 * min(quarter, 0.0))
    return (lowest, lr, first) if falls_on and is_deep(lowest, first, deep=deep) else min(paced, default=None)


def _keeps_pace(curve: TrialCurve, *, parts: int = 8, pace: float = 0.8, min_rows: int = 50) -> bool:
    """Tell whether a loss falls from each part of a run to the next, and as fast at the end as in the first half: none does that nears a minimum.

    Parts have equal sums of the learning rate, so that a schedule slows nothing down.

    Args:
        pace: fall from the sixth to the last part over that from the second to the fourth, at least (rule of thumb: of a logarithm of the updates it is 0.4, of a root 0.6).
        min_rows: fewer losses than this tell nothing (rule of thumb).
    """
    rows = np.isfinite(curve.loss)
    lr = np.nan_to_num(curve.column("lr")[rows]).clip(min=0)
    passed = np.cumsum(lr if lr.any() else rows[rows])
    cuts = np.searchsorted(passed, passed[-1] * np.arange(1, parts) / parts)
    blocks = np.split(curve.loss[rows], cuts)
    if rows.sum() < min_rows or not all(map(len, blocks)):
        return False
    levels = np.array([np.median(block) for block in blocks])
    return bool((np.diff(levels) < 0).all() and levels[-3] - levels[-1] >= pace * (levels[1] - levels[3]))


CODES = Codes({"lr.nothing_learns": "F1.1"})
(CODE,) = CODES


def nothing_learns(
    record: RecordLike,
    table: SweepTable,
    *,
    noise_sds: float = 4.0,
    near_frac: float = 0.1,
    max_error_frac: float = 0.05,
    least_frac: float = 0.005,
    own: bool = True,
) -> Finding:
    """Return `lr.nothing_learns`: fail where every lr ends at the loss of the best constant output, or above it; warn where only small ones were tried.

    Args:
        noise_sds: standard errors that what was learned has to stand out by (rule of thumb).
        near_frac: share of the way from the initial loss to chance that may be left where the run has arrived (rule of thumb).
        max_error_frac: standard error of the second half, as a share of chance, beyond which nothing is said (rule of thumb).
        least_frac: share of chance by which the best lr has to end below it to have learned something (rule of thumb).
        own: whether the person's own lr has to learn something, too; one that is called too low or too high is told once.
    """
    evidence: dict[str, Any] = {"chance": table.chance, "loss_ref": table.loss_ref, "lrs": [p.lr for p in table.points]}
    learned = table.points[table.best] if table.learned and table.best is not None else None
    worth = 0.0 if table.chance is None else least_frac * abs(table.chance)
    if learned is not None and learned.loss < (table.chance or table.level) - worth:
        alarm = _own_at_chance(record, table, learned, worth, evidence) if own else None
        return alarm or _falls(table, learned, evidence)
    finite = [p for p in table.points if math.isfinite(p.loss)]
    if not finite or table.too_short:
        reason = nothing_clear(table) if finite else nothing_finite(judged(record))
        return CODES.not_measured(CODE, reason, evidence=evidence)
    if len(table.points) == 1:
        return _one_lr(judged(record).curves, finite[0], evidence, noise_sds)
    point = min(finite, key=lambda p: p.loss)
    curves = [curve for curve in judged(record).curves if curve.trial in point.trials]
    half, error, falls = _end(curves, table, noise_sds=noise_sds, near_frac=near_frac)
    evidence |= {"lr": point.lr, "end_loss": point.loss, "second_half": half, "second_half_se": error}
    unknown = partial(CODES.not_measured, CODE, evidence=evidence)
    shown = f"the lowest training loss at the end is {point.loss:.4g}, at lr {point.lr:.4g}"
    above = table.chance is not None and table.loss_ref >= table.chance - noise_sds * max(error, table.noise)
    if table.chance is None or not above or half + noise_sds * error < table.chance - worth:
        known = (
            "the loss of a constant output is unknown" if table.chance is None else "the model may begin below chance"
        )
        alone = _one_lr(curves, point, evidence, noise_sds)
        told = unknown(f"{known}, and no lr ends clearly below the first loss, {table.loss_ref:.4g}; {shown}")
        if table.chance is None and alone.status == "warn" and _wide(record, table):
            held = f"at lr {point.lr:.4g}, the best of {len(table.points)}, {alone.summary.partition(': ')[2]}"
            told = replace(alone, summary=f"The training loss falls at no learning rate: {held}")
        return told
    held = f"{shown}; the best constant output costs {table.chance:.4g}, the untrained model {table.loss_ref:.4g}"
    if learned is not None and (falls or error > worth):
        return _falls(table, learned, evidence)
    if falls:
        return unknown(f"{table.total_steps} steps are too few to tell: {held}", advice=["Train longer (--steps): the loss is still falling, and not yet below chance."])  # fmt: skip
    if error > max_error_frac * max(abs(table.chance), table.loss_ref - table.chance):
        return unknown(f"the loss is too noisy to tell: {held}")
    lrs = f"from {table.points[0].lr:.4g} to {table.points[-1].lr:.4g}"
    summary = f"At no learning rate {lrs} is more learned in {table.total_steps} steps than a constant output: {held}."
    predicts = _predicts(record)
    advice = [
        _LOOK
        if predicts else "Check that inputs and targets belong together, that the inputs reach the model and differ, and that outputs stand in the order of the targets: "
        "a view of (batch, classes, height, width) as (batch, places, classes) mixes them, permute does not.",
        "Fit a handful of examples first: a model that cannot is broken, whatever the learning rate.",
    ]  # fmt: skip
    if not (wide := _wide(record, table)):
        summary += " Larger learning rates were not tried."
        advice.insert(0, f"Try learning rates above {table.points[-1].lr:.4g}, with a larger budget.")
    return CODES.finding(CODE, "fail" if wide else "warn", summary + predicts, evidence=evidence, advice=advice)


_LOOK = "Look at the outputs of one batch: where they hardly differ, find the layer that loses the inputs, such as a saturated sigmoid."


def _falls(table: SweepTable, best: LRPoint, evidence: dict[str, Any]) -> Finding:
    level = "chance" if table.level < table.loss_ref else "the initial loss"
    at = f"At lr {best.lr:.4g} the" if math.isfinite(best.lr) else "The"
    summary = f"{at} training loss falls to {best.loss:.4g}; {level} is {table.level:.4g}."
    return CODES.finding(CODE, "ok", summary, evidence=evidence | {"end_loss": best.loss})


def _own_at_chance(
    record: RecordLike,
    table: SweepTable,
    best: LRPoint,
    worth: float,
    evidence: dict[str, Any],
    *,
    noise_sds: float = 4.0,
) -> Finding | None:
    """Return an alarm where the person's own lr ends at chance, though another one learns; None where it does not, or cannot be told."""
    own = next((p for p in table.points if p.lr == record.config.get("peak_lr") and math.isfinite(p.loss)), None)
    if own is None or table.chance is None or own.loss < table.chance - worth:
        return None
    _, error, falls = _end(
        [c for c in judged(record).curves if c.trial in own.trials], table, noise_sds=noise_sds, near_frac=0.1
    )
    if falls or noise_sds * error > worth:
        return None
    summary = (
        f"At the baseline's lr {own.lr:.4g} no more is learned in {table.total_steps} steps than a constant output: the training loss ends at "
        f"{own.loss:.4g}; the best constant output costs {table.chance:.4g}. lr {best.lr:.4g} ends at {best.loss:.4g}."
    )
    advice = [_LOOK]
    return CODES.finding(
        CODE, "warn", summary + _predicts(record), evidence=evidence | {"end_loss": own.loss}, advice=advice
    )


def _predicts(record: RecordLike, *, clear_z: float = 8.0) -> str:
    """Say how well a linear model predicts the targets from the inputs, where it does by `clear_z` deviations of chance (rule of thumb)."""
    found = ((record.facts.get("loop") or {}).get("data") or record.facts.get("data") or {}).get("yardsticks") or {}
    if max((found.get("z") or {"": 0.0}).values()) < clear_z:
        return ""
    what, score = "accuracy" if found["classes"] else "correlation", found["score"]["linear"]
    return f" The inputs tell more: a linear model reaches {what} {score:.2g} on rows left out ({found['chance']:.2g} by chance)."


def _one_lr(
    curves: Sequence[TrialCurve],
    point: LRPoint,
    evidence: dict[str, Any],
    noise_sds: float,
    *,
    min_rows: int = 50,
    short_frac: float = 0.1,
    near_frac: float = 0.1,
    fine_frac: float = 0.02,
) -> Finding:
    """Tell whether the runs at the one lr that was tried fall at all, and below chance: the second half of their losses against the first tenth.

    Args:
        near_frac: share of the way from the first tenth to chance that may be left where a run has arrived (rule of thumb).
        min_rows: fewer losses than this tell nothing (rule of thumb).
        short_frac: standard errors that are a larger share of the loss leave room for a fall that is not seen (rule of thumb),
        fine_frac: and than this one for what a loss slightly below chance has learned (rule of thumb: O1 calls differences of 2 % equal).
    """
    mine = [curve for curve in curves if curve.trial in point.trials]
    unknown = partial(CODES.not_measured, CODE, evidence=evidence)
    if min(curve.loss.size for curve in mine) < min_rows:
        return unknown("one learning rate was trained")
    if any(curve.at_steps[0] > 2 * (curve.at_steps[-1] - curve.at_steps[0]) / (curve.loss.size - 1) for curve in mine):
        return unknown(f"the losses begin at step {mine[0].at_steps[0]:,}, and what was learned before is not known")
    (head, head_se), (half, half_se), (third, third_se), (last, last_se) = (
        mean_and_error([c.loss[part] for c in mine for part in [slice(round(a * c.loss.size), round(b * c.loss.size))]])
        for a, b in ((0.0, 0.1), (0.5, 1.0), (0.5, 0.75), (0.75, 1.0))
    )
    error = noise_sds * math.hypot(head_se, half_se)
    at = f" at lr {point.lr:.4g}" if math.isfinite(point.lr) else ""
    shown = f"{head:.4g} in the first tenth of the losses, {half:.4g} in their second half"
    evidence = evidence | {"first_tenth": head, "second_half": half, "error": error}
    chance, said, other = mine[0].chance, "does not fall", ", or nothing was left to learn"
    if chance is not None and head > chance and half + noise_sds * half_se > chance:
        evidence, shown = evidence | {"chance": chance}, f"{shown}; the best constant output costs {chance:.4g}"
        if third - last > noise_sds * math.hypot(third_se, last_se):
            return unknown(f"the loss is still falling, and not yet below that of a constant output: {shown}")
        unclear = half < chance and noise_sds * half_se > fine_frac * abs(chance)
        if unclear or half < chance - half_se or (half > chance + near_frac * (head - chance) and head - half > error):
            return unknown(f"the loss ends near that of a constant output, or above it: {shown}")
        other = " of the targets from the inputs"
        error, said = noise_sds * half_se, "falls no further than a constant output's"
    elif head - half > error:
        return CODES.finding(CODE, "ok", f"The training loss falls{at}: {shown}.", evidence=evidence)
    if not error <= short_frac * abs(half):
        return CODES.not_measured(CODE, f"the loss is too noisy to tell: {shown}", evidence=evidence)
    advice = [
        "Check that inputs and targets belong together, and that the optimizer has the model's parameters.",
        "Try learning rates ten times smaller and larger; fit a handful of examples first.",
    ]
    classes = [k for k in _CLASSES if abs(half - math.log(k)) < 0.02][:1]
    known = "".join(f"; guessing among {k} classes costs {math.log(k):.4g}" for k in classes)
    summary = f"The training loss {said}{at}: {shown}{known}. Nothing is learned{other}."
    return CODES.finding(CODE, "warn", summary, evidence=evidence, advice=advice)


_CLASSES = (2, 3, 4, 5, 10, 20, 100, 1000)  # numbers of classes that are common, whose loss of guessing is worth naming


def nothing_finite(study: JudgedStudy) -> str:
    """Say why no lr has a finite loss at the end."""
    tried = [curve.finished for curve in study.curves if curve.point]
    if tried and all(tried):
        return "the loss became non-finite at every learning rate tried: try smaller ones"
    return "no run whose loss stays finite was trained to its end"


def all_rose(table: SweepTable, *, share: float = 0.5) -> bool:
    """Tell whether every lr ends above the initial loss by this share of it, more than the noise of one batch makes (rule of thumb)."""
    return all(p.loss - table.loss_ref > share * abs(table.loss_ref) for p in table.points)


def nothing_clear(table: SweepTable) -> str:
    """Say that no lr came below the loss of knowing nothing, or that the noise of the one that did is too large to tell."""
    level = "that of the best constant output" if table.level < table.loss_ref else "that of the initial model"
    point = min((p for p in table.points if math.isfinite(p.loss)), key=lambda p: p.loss, default=None)
    if point is None or table.level - point.loss <= 1e-6 * abs(table.level):
        return f"no learning rate brought the loss below {level}{': try smaller ones' if all_rose(table) else ''}"
    if table.too_short:
        return f"runs of {table.total_steps} updates are too short to tell learning from noise; {FEWEST_STEPS} will do"
    return f"the lowest loss, {point.loss:.4g} at lr {point.lr:.4g}, lies below {level}, {table.level:.4g}, by less than four standard errors ({4 * table.noise:.2g})"


def _end(
    curves: Sequence[TrialCurve], table: SweepTable, *, noise_sds: float, near_frac: float, most_runs: float = 4.0
) -> tuple[float, float, bool]:
    """Return mean and standard error of the second half of the best run, and whether it still falls, or is too short to tell.

    Not if it would take more than `most_runs` of that length to chance at the pace since its second quarter (rule of thumb).
    """
    if table.total_steps < 8:
        return (*mean_and_error([curve.loss for curve in curves]), True)
    parts = [np.array_split(curve.loss, 4) for curve in curves]
    (second, _), (third, third_error), (last, last_error) = (mean_and_error([q[k] for q in parts]) for k in (1, 2, 3))
    falls = third - last > noise_sds * math.hypot(third_error, last_error)
    left = last - table.level
    soon = left <= most_runs * 2 * (second - last)
    far = left > near_frac * (table.loss_ref - table.level)
    return (*mean_and_error([np.concatenate(quarters[2:]) for quarters in parts]), bool(falls and far and soon))


def _wide(record: RecordLike, table: SweepTable, *, span: float = 64.0, above: float = 16.0) -> bool:
    """Tell whether the lrs reach up to where the loss stops falling: beyond the scale of the model, or to an unstable run.

    Args:
        span: between the smallest and the largest lr, where that scale was not found (rule of thumb: three steps of a sweep's grid),
        above: and between the training's own lr, which the fact holds then, and the largest (rule of thumb: two steps).
    """
    top, scale = table.points[-1].lr, record.facts.get("initial_critical_lr")
    far, own = top >= span * table.points[0].lr, 0.0
    if isinstance(scale, (int, float)):
        if record.facts.get("initial_critical_lr_found"):
            far |= top >= 0.25 * scale
        else:
            own = scale
    blown = any(outcome in ("lasting", "divergent") for p in table.points for outcome in p.outcomes)  # not: untrained
    return blown or (far and top >= above * own)
