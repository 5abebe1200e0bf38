"""`hosts.buffers`: are batch norm's running statistics the same on all hosts when somebody evaluates or saves (P7.3)?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.findings.diagnosis import Finding
from workbench.topics.hosts.diagnose_area import host_finding

__all__ = ["buffers"]

Ranks = Sequence[Mapping[str, Any]]
_MOMENTS = ("evaluation", "checkpoint")
_SAME = 1e-6
"""Standard deviations of a channel up to which statistics are the same: rounding in another order."""


def buffers(ranks: Ranks, *, large_shift: float) -> Finding:
    """Judge whether running statistics were merged before each evaluation and each checkpoint (P7.3)."""
    if not any(r["buffers"] for r in ranks):
        seen = any(r["calls"]["wrapped"] + r["calls"]["other"] + r["calls"]["raw"] for r in ranks)
        if seen:
            return host_finding("buffers", "ok", "The model keeps no running statistics.")
        return host_finding("buffers", "not_measured", "Not measured: no model was called in training.")
    events = sorted({(row["step"], row["moment"]) for r in ranks for row in r["buffers"] if row["moment"] in _MOMENTS})
    if not events:
        return host_finding("buffers", "not_measured", "Not measured: nobody evaluated or saved the model.")
    apart = [(moment, step, shift) for step, moment in events if (shift := _shift(ranks, step, moment)) is not None]
    worst = max((shift for _, _, shift in apart), default=0.0)
    area = "evaluation" if not apart or any(moment == "evaluation" for moment, _, _ in apart) else "checkpointing"
    evidence: dict[str, Any] = {
        "area": area, "moments": len(events), "apart": [{"moment": m, "step": s, "shift": x} for m, s, x in apart[:50]],
        "broadcast_buffers": sorted({bool(w.get("broadcast_buffers")) for r in ranks for w in r["wrappers"]}),
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "value": worst,
        "unit": "standard deviations",
        "threshold": large_shift,
        "evidence": evidence,
    }
    if not apart:
        return host_finding(
            "buffers",
            "ok",
            f"Batch norm's running statistics are the same on all hosts at all {len(events)} evaluations and checkpoints.",
            **numbers,
        )
    what = " and ".join(sorted({"evaluations" if m == "evaluation" else "checkpoints" for m, _, _ in apart}))
    wins = (
        " DistributedDataParallel copies those of rank 0 over all others."
        if True in evidence["broadcast_buffers"]
        else ""
    )
    return host_finding(
        "buffers", "fail" if worst > large_shift else "warn",
        f"Batch norm's running statistics differ between hosts at {len(apart)} of {len(events)} {what}, by up to {worst:.2g} standard deviations of a channel.{wins}",
        step=apart[0][1],
        advice=(
            "Merge the running statistics of all hosts before each evaluation and each checkpoint: wb.merge_running_statistics(model).",
            "Or train with synchronised batch norm, or with a norm that keeps no statistics.",
        ),
        **numbers,
    )  # fmt: skip


def _shift(ranks: Ranks, step: int, moment: str) -> float | None:
    """Return how far statistics of two hosts are apart, in standard deviations of the channel; None where they are the same."""
    rows = [row for r in ranks if (row := _at(r["buffers"], step, moment)) is not None]
    if len({row["hash"] for row in rows}) < 2:
        return None
    if any("means" not in row for row in rows):
        return float("nan")
    means = np.array([row["means"] for row in rows], dtype=np.float64)
    variances = np.array([row["variances"] for row in rows], dtype=np.float64)
    if not (np.isfinite(means).all() and np.isfinite(variances).all()):
        return float("nan")
    deviation = np.sqrt(np.maximum(variances.mean(axis=0), 1e-30))
    of_means = np.ptp(means, axis=0) / deviation
    of_deviations = np.ptp(np.sqrt(np.maximum(variances, 0)), axis=0) / deviation
    found = float(max(of_means.max(initial=0.0), of_deviations.max(initial=0.0)))
    return found if found > _SAME else None


def _at(rows: Sequence[Mapping[str, Any]], step: int, moment: str) -> Mapping[str, Any] | None:
    """Return the statistics at a moment, or, of a host that did nothing then, those with which it went on."""
    own = [row for row in rows if row["step"] == step and row["moment"] == moment]
    later = [row for row in rows if row["step"] == step and row["moment"] in ("training", "end")]
    return next(iter(own + later), None)
