"""`nonfinite_norms`: how many gradient norms are NaN or infinite, and in which runs (F4.6)."""

from __future__ import annotations

import numpy as np

from workbench.curves.judged import judged, own_trials
from workbench.curves.trials import RecordLike, TrialCurve
from workbench.findings.diagnosis import Finding, Status
from workbench.record.roles import Role

__all__ = ["nonfinite_norms"]


def nonfinite_norms(record: RecordLike) -> Finding:
    """Return the finding `clipping.nonfinite`: a failure where the loss of a run of the baseline's config stays finite and its gradients do not.

    Where the loss ends non-finite, too, it is what a run that diverges looks like. Without such a run a warning in any that stays finite.

    Args:
        record: a study, or a single trial.
    """
    code = "clipping.nonfinite"
    curves = [c for c in judged(record).curves if "grad_norm" in c.steps]
    if not curves:
        return Finding(
            code=code, status="not_measured", clause="F4.6", summary="Not measured: no gradient norm was recorded."
        )
    counts = [(c, _count(c)) for c in curves]
    hits = [(c, n) for c, n in counts if n]
    mine = own_trials(record)
    own = [c for c, _ in hits if c.stage == Role.BASELINE or c.trial in mine]
    whole = [c for c, _ in hits if not c.diverged and (c in own or not mine)]
    status: Status = "ok" if not whole else "fail" if own else "warn"
    rows = [{"trial": c.trial, "stage": c.stage, "lr": c.lr, "nonfinite": n, "diverged": c.diverged} for c, n in hits]
    total = sum(n for _, n in counts)
    if not hits:
        summary = f"All gradient norms of {len(curves)} trial(s) are finite."
    else:
        finite = "in runs whose loss stays finite" if whole else "where runs ended non-finite"
        where = f"{'with the baseline config, ' if own else ''}{finite}"
        counted = f"{total} gradient norm(s) in {len(hits)} of {len(curves)} trial(s) are not finite"
        summary = f"{counted}, {where}; they are counted, not averaged."
    advice = [
        "Clipping leaves a non-finite gradient as it is: look for overflow (precision), a division or logarithm of zero, or "
        "non-finite data."
    ]
    return Finding(
        code=code, status=status, summary=summary, value=float(total), unit="steps", clause="F4.6",
        evidence={"trials": rows}, advice=advice if status != "ok" else (),
    )  # fmt: skip


def _count(curve: TrialCurve) -> int:
    norms = curve.steps["grad_norm"].to_numpy(dtype=np.float64, na_value=np.nan)
    return int((~np.isfinite(norms)).sum())
