"""`diagnose_schedule`: jumps, restarts and an early end in a recorded lr trace (F3.5, F3.11).

The trace is held against itself and, where the config is known, against what was planned: a warm restart that was
asked for is no fault, and neither is the tail of a cosine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.diagnostics.base import Diagnosis, Finding
from workbench.diagnostics.trials import RecordLike, TrialCurve, read_curves

__all__ = ["diagnose_schedule", "read_trace"]

FloatArray = NDArray[np.float64]
FLAT = 1e-9  # change of a step, as a share of the peak, that is none
STEEPER = 3.0  # rule of thumb: how much steeper than the step beside it one of a curved decay may be


def diagnose_schedule(
    record: RecordLike,
    *,
    planned: FloatArray | None = None,
    restarts_planned: bool = False,
    jump_frac: float = 0.1,
    restart_frac: float = 0.25,
    collapse_frac: float = 1e-3,
    tail_frac: float = 0.2,
    min_steps: int = 10,
) -> Diagnosis:
    """Say whether the learning rate did what a schedule should, from the recorded trace of the baseline's longest trial.

    Args:
        record: a study or a single trial, with `lr` in its steps.
        planned: the lr of every step as it was meant, shape (steps,); jumps that it has too are no fault.
        restarts_planned: the restarts in it were asked for, wherever they are, as by a schedule of one's own.
        jump_frac: a change within one step that is larger than this share of the peak, beyond what the steps beside it
            change by in the same direction, is a jump (rule of thumb); the steps of a staircase downwards are none.
        restart_frac: a jump upwards by more than this share of the peak, after a decay, is a restart (rule of thumb).
        collapse_frac: at or below this share of the peak the lr counts as gone (rule of thumb).
        tail_frac: the lr may be gone in this last share of the steps, where decays end (rule of thumb).
        min_steps: below this nothing can be said (rule of thumb).

    Returns:
        `schedule.discontinuity`, `schedule.restarts` and `schedule.collapse`, once each.
    """
    curve = _longest(read_curves(record))
    trace = None if curve is None else read_trace(curve)
    if trace is None or trace.size < min_steps:
        reason = "no trial has a learning rate recorded" if trace is None else f"only {trace.size} steps are recorded"
        findings = tuple(_unmeasured(code, reason) for code in ("discontinuity", "restarts", "collapse"))
    else:
        assert curve is not None
        evidence = {"trial": curve.trial, "steps": int(trace.size), "peak": float(np.nanmax(trace))}
        jumps = _jumps(trace, jump_frac)
        meant = (
            set() if planned is None else {j["step"] for j in _jumps(np.asarray(planned, dtype=np.float64), jump_frac)}
        )
        restarts = [j for j in jumps if j["change_frac"] > restart_frac and _decayed(trace[: j["step"]])]
        others = [j for j in jumps if j not in restarts and j["step"] not in meant]
        findings = (
            _discontinuity(others, evidence),
            _restarts(restarts, {j["step"] for j in restarts} if restarts_planned else meant, evidence),
            _collapse(trace, curve.total_steps, collapse_frac, tail_frac, evidence),
        )
    return Diagnosis(
        findings=findings, workload=record.workload, command=record.command, path=getattr(record, "path", None)
    )


def read_trace(curve: TrialCurve) -> FloatArray | None:
    """Return the lr of every recorded step of a trial; None where there is none that is finite and above zero."""
    if "lr" not in curve.steps.columns:
        return None
    trace = curve.steps["lr"].to_numpy(dtype=np.float64)
    trace = trace[np.isfinite(trace)]
    return trace if trace.size and trace.max() > 0 else None


def _longest(curves: Sequence[TrialCurve]) -> TrialCurve | None:
    """Return the baseline's trial, else the longest."""
    baseline = [c for c in curves if c.stage in ("baseline", "trial")]
    return max(baseline or curves, key=lambda c: len(c.steps), default=None)


def _jumps(trace: FloatArray, jump_frac: float) -> list[dict[str, Any]]:
    """Return steps at which the lr changes by more than its neighbourhood does, as shares of the peak."""
    if trace.size < 2 or not trace.max() > 0:
        return []
    change = np.diff(trace) / trace.max()
    padded = np.concatenate([[0.0], change, [0.0]])
    sign = np.sign(change)
    ramp = np.maximum(np.maximum(padded[:-2] * sign, padded[2:] * sign), 0.0)  # a ramp goes on in its direction
    flat = (np.abs(padded[:-2]) < FLAT) & (np.abs(padded[2:]) < FLAT)
    staircase = flat & (change < 0)  # from one plateau down to the next: a step decay
    begins = (np.arange(change.size) == 0) & (trace[:-1] == 0)  # a ramp of a single step
    found = np.flatnonzero((np.abs(change) > jump_frac + STEEPER * ramp) & ~staircase & ~begins)
    return [{"step": int(k) + 1, "change_frac": float(change[k])} for k in found]


def _decayed(trace: FloatArray) -> bool:
    """Whether the lr was coming down at the end of a trace, from a peak that lies before."""
    return bool(trace.size > 1 and trace[-1] < trace.max() and trace[-1] <= trace[-2])


def _unmeasured(code: str, reason: str) -> Finding:
    return Finding(code=f"schedule.{code}", status="not_measured", summary=f"Not measured: {reason}.", clause="F3.5")


def _discontinuity(jumps: list[dict[str, Any]], evidence: dict[str, Any]) -> Finding:
    if not jumps:
        return Finding(
            code="schedule.discontinuity", status="ok", clause="F3.11", evidence=evidence | {"jumps": []},
            summary="The learning rate changes without a jump.",
        )  # fmt: skip
    first = jumps[0]
    return Finding(
        code="schedule.discontinuity",
        status="warn",
        summary=f"The learning rate jumps by {first['change_frac']:+.0%} of its peak at step {first['step']}"
        + (f", and {len(jumps) - 1} times more." if len(jumps) > 1 else "."),
        value=first["change_frac"],
        unit="share of the peak",
        step=first["step"],
        clause="F3.11",
        evidence=evidence | {"jumps": jumps},
        advice=(
            "Join the pieces of the schedule where they have the same value: warmup ends at the peak, decay begins there.",
        ),
    )


def _restarts(restarts: list[dict[str, Any]], meant: set[int], evidence: dict[str, Any]) -> Finding:
    surprising = [j for j in restarts if j["step"] not in meant]
    periods = sorted({b["step"] - a["step"] for a, b in itertools.pairwise(restarts)})
    evidence = evidence | {"restarts": restarts, "planned": sorted(meant), "periods": periods}
    if not surprising:
        planned = f"{len(restarts)} planned warm restart(s)." if restarts else "The learning rate does not start over."
        return Finding(code="schedule.restarts", status="ok", clause="F3.5", evidence=evidence, summary=planned)
    first = surprising[0]
    return Finding(
        code="schedule.restarts",
        status="warn",
        summary=f"The learning rate starts over at step {first['step']}, {len(surprising)} time(s) in all, and no plan says so.",
        value=float(len(surprising)),
        unit="restarts",
        step=first["step"],
        clause="F3.5",
        evidence=evidence,
        advice=(
            "If it is a warm restart that you want, say so (planned=...); else look for a scheduler that is made anew, or "
            "whose length is shorter than the run.",
        ),
    )


def _collapse(
    trace: FloatArray, total_steps: int, collapse_frac: float, tail_frac: float, evidence: dict[str, Any]
) -> Finding:
    gone = trace <= collapse_frac * trace.max()
    peak_at = int(np.argmax(trace))
    last = int(np.flatnonzero(~gone)[-1])  # the peak itself is never gone
    from_step, total = last + 1, max(total_steps, trace.size)
    early = peak_at < from_step < math.floor((1 - tail_frac) * total) and bool(gone[from_step:].size)
    evidence = evidence | {"gone_from": from_step if gone[from_step:].size else None, "total_steps": total}
    if not early:
        return Finding(
            code="schedule.collapse", status="ok", clause="F3.5", evidence=evidence,
            summary="The learning rate lasts until the end of training.",
        )  # fmt: skip
    return Finding(
        code="schedule.collapse",
        status="fail",
        summary=f"The learning rate is practically zero from step {from_step} of {total} on: nothing is learned after that.",
        value=from_step / total,
        unit="share of the steps",
        threshold=1 - tail_frac,
        step=from_step,
        clause="F3.5",
        evidence=evidence,
        advice=(
            "Let the decay run over the steps that are trained: check the scheduler's length and its unit, steps or epochs.",
        ),
    )
