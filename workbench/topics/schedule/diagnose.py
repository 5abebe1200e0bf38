"""`diagnose_schedule`: jumps, restarts and an early end in a recorded lr trace, held against itself and what was planned (F3.5, F3.11)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.judged import judged
from workbench.curves.trial_curves import RecordLike, TrialCurve
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding

CODES = Codes({"schedule.discontinuity": "F3.11", "schedule.restarts": "F3.5", "schedule.collapse": "F3.5"})
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
FLAT = 1e-9  # change of a step, as a share of the peak, that is none
STEEPER = 3.0  # rule of thumb: how much steeper than the step beside it one of a curved decay may be


def diagnose_schedule(
    record: RecordLike,
    *,
    planned: FloatArray | None = None,
    restarts_planned: bool = False,
    jump_frac: float = 0.1,
    warmup_frac: float = 0.5,
    restart_frac: float = 0.25,
    decay_frac: float = 0.01,
    collapse_frac: float = 1e-3,
    tail_frac: float = 0.2,
    low_frac: float = 0.01,
    low_share: float = 0.5,
    min_steps: int = 10,
) -> Diagnosis:
    """Say whether the learning rate did what a schedule should, from the recorded trace of the baseline's longest trial.

    Args:
        record: a study or a single trial, with `lr` in its steps; steps without a finite lr are gaps.
        planned: the lr of every step as it was meant, shape (steps,); jumps that it has too are no
            fault, nor are restarts whose climb overlaps with one of its own.
        restarts_planned: the restarts in it were asked for, wherever they are, as by a schedule of one's own; but for one that
            training ends high on, before the lr came down again.
        jump_frac: a change from one recorded step to the next that is larger than this share of the peak, beyond what the
            steps beside it change by in the same direction, is a jump (rule of thumb); the steps of a staircase downwards
            are none, nor are those of a warmup that rises once an epoch. Over a gap the share grows with its length.
        warmup_frac: a rise by the epoch is a warmup where it ends within this share of the steps (rule of thumb: one-cycle policies
            rise for 30 to 45 % of them).
        restart_frac: a climb of more than this share of the peak above the trough of a decay is a restart (rule of thumb).
        decay_frac: a fall by more than this share of the peak is a decay (rule of thumb).
        collapse_frac: at or below this share of the peak the lr counts as gone (rule of thumb).
        tail_frac: the lr may be gone in this last share of the steps, where decays end (rule of thumb).
        low_frac: at or below this share of the peak next to nothing is learned (rule of thumb),
        low_share: which may take this share of the steps (rule of thumb: a staircase by tenths spends a third there).
        min_steps: below this many recorded steps nothing can be said (rule of thumb).
    """
    study = judged(record)
    own = [c for c in study.curves if c.stage in ("baseline", "trial")]
    curve = max(own or study.curves, key=lambda c: len(c.steps), default=None)
    trace = None if curve is None else read_trace(curve)
    if curve is None or trace is None or trace[0].size < min_steps:
        few = "no trial has a learning rate recorded" if trace is None else f"only {trace[0].size} steps are recorded"
        return Diagnosis.of(study, [CODES.not_measured(code, few) for code in CODES])
    steps, lr = trace
    evidence = {"trial": curve.trial, "steps": int(lr.size), "peak": float(lr.max())}
    plan = (steps[:0], lr[:0]) if planned is None else _at_steps(planned, steps)
    climbs = _climbs(steps, lr, restart_frac, decay_frac)
    surprising, matched = _unmatched(climbs, _climbs(*plan, restart_frac, decay_frac))
    warm = warmup_frac * max(curve.total_steps, int(steps[-1]) + 1)
    meant = {j["step"] for j in _jumps(*plan, jump_frac, warm)}
    others = [j for j in _jumps(steps, lr, jump_frac, warm) if j["step"] not in meant]
    jumps = [j for j in others if not any(_is_part(j, climb, restart_frac) for climb in surprising)]
    restarts = _restarts(climbs, climbs if restarts_planned else matched, evidence)
    if restarts_planned:
        restarts = _unended(restarts, trace, climbs, restart_frac)
    gone, low = (collapse_frac, tail_frac), (low_frac, low_share)
    collapse = _collapse(read_trace(curve, groups=True) or trace, curve.total_steps, gone, low, evidence)
    return Diagnosis.of(study, [_discontinuity(jumps, evidence), restarts, collapse])


def read_trace(curve: TrialCurve, *, groups: bool = False) -> tuple[IntArray, FloatArray] | None:
    """Return the steps of a trial at which a finite lr is recorded, ascending, and their lr, each of shape (rows,); None for none.

    It is the lr of the first parameter group or, with `groups`, the largest of all of them.
    """
    if "lr" not in curve.steps.columns:
        return None
    rows = curve.steps.drop_duplicates("step", keep="last")
    columns = [name for name in rows.columns if name == "lr" or (groups and name.startswith("lr/"))]
    steps, lr = rows["step"].to_numpy(dtype=np.int64), rows[columns].max(axis=1).to_numpy(dtype=np.float64)
    known = np.isfinite(lr)
    return (steps[known], lr[known]) if known.any() else None


def _at_steps(planned: FloatArray, steps: IntArray) -> tuple[IntArray, FloatArray]:
    """Return the plan at the recorded steps, so that both are seen through the same gaps."""
    plan = np.asarray(planned, dtype=np.float64)
    steps = steps[(steps >= 0) & (steps < plan.size)]
    known = np.isfinite(plan[steps])
    return steps[known], plan[steps][known]


def _jumps(steps: IntArray, lr: FloatArray, jump_frac: float, warm: float) -> list[dict[str, Any]]:
    """Return steps at which the lr changes by more than its neighbourhood does, as shares of the peak; a warmup ends by step `warm`."""
    if lr.size < 2 or not lr.max() > 0:
        return []
    change, gap = np.diff(lr) / lr.max(), np.diff(steps)
    padded, slope = (np.concatenate([[0.0], x, [0.0]]) for x in (change, change / gap))
    sign = np.sign(change)
    ramp = np.maximum(np.maximum(slope[:-2] * sign, slope[2:] * sign), 0.0) * gap  # a ramp goes on in its direction
    flat = (np.abs(padded[:-2]) < FLAT) & (np.abs(padded[2:]) < FLAT)
    rises = np.minimum(change, 0.0).cumsum() > -FLAT
    rises &= _in_epochs(steps[1:][np.abs(change) > FLAT]) and steps[1:][rises & (change > FLAT)].max(initial=0) <= warm
    staircase = flat & ((change < 0) | rises)  # from one plateau to the next: a step decay, or a warmup in epochs
    begins = (np.arange(change.size) == 0) & ((lr[:-1] == 0) | (gap > 1))  # a ramp of one step, or not seen
    allowed = jump_frac * np.maximum(gap / np.median(gap), 1.0)  # what happened within a gap is not known
    found = np.flatnonzero((np.abs(change) > allowed + STEEPER * ramp) & ~staircase & ~begins)
    return [{"step": int(steps[k + 1]), "change_frac": float(change[k])} for k in found]


def _in_epochs(changes: IntArray, least: int = 3) -> bool:
    """Tell whether the lr changes at multiples of one interval alone, `least` times or more (rule of thumb): a scheduler is stepped once an epoch."""
    every = int(np.diff(changes).min()) if changes.size >= least else 1
    return every > 1 and not (changes % every).any()


def _climbs(steps: IntArray, lr: FloatArray, restart_frac: float, decay_frac: float) -> list[dict[str, Any]]:
    """Return where the lr regains what a decay took: the step of the trough, the first above it, and the top's."""
    if not lr.size or not lr.max() > 0:
        return []
    found: list[dict[str, Any]] = []
    shares = (lr / lr.max()).tolist()
    falling, high, low, trough = False, shares[0], shares[0], 0
    for k, share in enumerate(shares):
        if falling and share <= low + FLAT:
            low, trough = min(low, share), k
        elif falling and share - low > restart_frac:
            falling, high = False, share
            found.append({"step": int(steps[trough + 1]), "trough": int(steps[trough])})
            found[-1] |= {"top": int(steps[k]), "change_frac": share - low}
        elif not falling and share > high:
            if found:
                found[-1] |= {"top": int(steps[k]), "change_frac": share - low}
            high = share
        elif not falling and share < high - decay_frac:
            falling, low, trough = True, share, k
    return found


def _unmatched(
    climbs: list[dict[str, Any]], planned: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split climbs into those without and those with a planned one that they overlap with; each plan serves once."""
    left, missing, matched = list(planned), list[dict[str, Any]](), list[dict[str, Any]]()
    for climb in climbs:
        plan = next((p for p in left if p["trough"] < climb["top"] and climb["trough"] < p["top"]), None)
        (missing if plan is None else matched).append(climb)
        left = [p for p in left if p is not plan]
    return missing, matched


def _is_part(jump: dict[str, Any], climb: dict[str, Any], restart_frac: float) -> bool:
    """Whether a jump is the restart itself: upwards within its climb, and large or its first step."""
    within = climb["trough"] < jump["step"] <= climb["top"] and jump["change_frac"] > 0
    return bool(within and (jump["change_frac"] > restart_frac or jump["step"] == climb["step"]))


def _discontinuity(jumps: list[dict[str, Any]], evidence: dict[str, Any]) -> Finding:
    code, evidence = "schedule.discontinuity", evidence | {"jumps": jumps}
    if not jumps:
        return CODES.finding(code, "ok", "The learning rate changes without a jump.", evidence=evidence)
    first, more = jumps[0], f", and {len(jumps) - 1} times more." if len(jumps) > 1 else "."
    return CODES.finding(
        code, "warn",
        f"The learning rate jumps by {first['change_frac']:+.0%} of its peak at step {first['step']}{more}",
        value=first["change_frac"], unit="share of the peak", step=first["step"], evidence=evidence,
        advice=("Join the pieces of the schedule where they have the same value: warmup ends at the peak, decay begins there.",),
    )  # fmt: skip


def _restarts(restarts: list[dict[str, Any]], meant: list[dict[str, Any]], evidence: dict[str, Any]) -> Finding:
    surprising = [r for r in restarts if r not in meant]
    periods = sorted({b["step"] - a["step"] for a, b in itertools.pairwise(restarts)})
    evidence = evidence | {"restarts": restarts, "planned": [r["step"] for r in meant], "periods": periods}
    code = "schedule.restarts"
    if not surprising:
        said = f"{len(restarts)} planned warm restart(s)." if restarts else "The learning rate does not start over."
        return CODES.finding(code, "ok", said, evidence=evidence)
    first = surprising[0]
    return CODES.finding(
        code, "warn",
        f"The learning rate starts over at step {first['step']}, {len(surprising)} time(s) in all, and no plan says so.",
        value=float(len(surprising)), unit="restarts", step=first["step"], evidence=evidence,
        advice=("If it is a warm restart that you want, say so (planned=...); else look for a scheduler that is created again, or "
                "whose length is shorter than the run.",),
    )  # fmt: skip


def _unended(
    meant: Finding, trace: tuple[IntArray, FloatArray], climbs: list[dict[str, Any]], restart_frac: float
) -> Finding:
    """Judge restarts that were asked for: the last one has to come down again before training ends."""
    steps, lr = trace
    if not climbs or climbs[-1]["step"] >= steps[-1]:  # the last step alone begins a cycle
        return meant
    last, end = climbs[-1], float(lr[-1] / lr.max())
    if end - float(lr[steps == last["trough"]][0] / lr.max()) <= restart_frac:
        return meant
    return replace(
        meant, status="warn", value=end, unit="share of the peak", step=last["step"],
        summary=f"The learning rate climbs again from step {last['step']} on, and training ends at {end:.0%} of its peak.",
        advice=("Give the schedule the length of the run, in its own unit, steps or epochs, so that a decay ends with it.",),
    )  # fmt: skip


def _collapse(
    trace: tuple[IntArray, FloatArray],
    total_steps: int,
    gone_at: tuple[float, float],
    low: tuple[float, float],
    evidence: dict[str, Any],
) -> Finding:
    (steps, lr), (collapse_frac, tail_frac) = trace, gone_at
    peak = lr.max()
    every = float(np.median(np.diff(steps))) if steps.size > 1 else 1.0  # what a gap hides is not known
    idle = min(float(np.sum(lr <= low[0] * peak)) * every / max(total_steps, 1), 1.0)
    alive = np.flatnonzero((lr > collapse_frac * peak) & (lr > 0))
    gone = steps[alive[-1] + 1 :] if alive.size else steps
    from_step, total = int(gone[0]) if gone.size else None, max(total_steps, int(steps[-1]) + 1)
    evidence = evidence | {"gone_from": from_step, "total_steps": total, "low_share": idle}
    found, unit = partial(CODES.finding, "schedule.collapse", evidence=evidence), "share of the steps"
    below = steps[lr < -FLAT * np.abs(lr).max()]
    if below.size:
        return found(
            "fail", f"The learning rate is negative from step {below[0]} of {total} on, in {below.size} of {steps.size} steps: updates climb the loss.",
            unit=unit, value=int(below[0]) / total, threshold=1.0, step=int(below[0]),
            advice=("Give the schedule the number of updates that are made (batches an epoch times epochs), and hold its factor at 0 or above.",),
        )  # fmt: skip
    if not alive.size:
        return found(
            "fail", "The learning rate is above zero at no recorded step: nothing is ever learned.", unit=unit,
            value=0.0, threshold=1 - tail_frac, step=from_step,
            advice=("Check peak_lr and the factor that the schedule gives: one of them is zero, or the scheduler is never stepped.",),
        )  # fmt: skip
    if from_step is not None and from_step < math.floor((1 - tail_frac) * total):
        return found(
            "fail", f"The learning rate is practically zero from step {from_step} of {total} on: nothing is learned after that.",
            unit=unit, value=from_step / total, threshold=1 - tail_frac, step=from_step,
            advice=("Let the decay run over the steps that are trained: check the scheduler's length and its unit, steps or epochs.",),
        )  # fmt: skip
    if idle < low[1]:
        return found("ok", "The learning rate stays above zero until the end of training.")
    nothing = f"at or below {low[0]:.0%} of its peak in {idle:.0%} of the steps: next to nothing is learned there"
    advice = ("Let the schedule run over the steps that are trained: check its length and its unit, steps or epochs.",)
    return found("warn", f"The learning rate is {nothing}.", unit=unit, value=idle, threshold=low[1], advice=advice)
