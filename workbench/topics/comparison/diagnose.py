"""`diagnose_comparison`: what a modification does to the learning rates that train, and whether a warmup undoes it (F1.3).

Three sweeps over the same learning rates, each under several seeds: the baseline, the modified workload, and the modified
one with a warmup. The playbook's three statements about them come out as three booleans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from workbench.curves.judged import judged, judged_runs
from workbench.curves.sweep import LRPoint
from workbench.curves.trials import RecordLike
from workbench.findings.advice import advise
from workbench.findings.diagnosis import Diagnosis, Finding, Status
from workbench.topics.comparison.arms import ArmLimits, Arms, ArmTables, lr_key

__all__ = ["CODES", "Arms", "diagnose_comparison"]

CODES = ("comparison.low_lr_same", "comparison.high_lr_lost", "comparison.warmup_cures")
_SAME, _LOST, _CURES = CODES
_CLAUSE = {_SAME: "F1.3", _LOST: "F1.3", _CURES: "F1.3, F3.16"}
_BAD_NEWS = {_SAME: False, _LOST: True, _CURES: False}


def diagnose_comparison(
    baseline: RecordLike,
    modified: RecordLike,
    warmed: RecordLike | None = None,
    *,
    noise_sds: float = 2.0,
    material_frac: float = 0.01,
    low_ratio: float = 4.0,
    min_low_lrs: int = 2,
    min_seeds: int = 2,
    min_ratio: float = 2.0,
    collapse_frac: float = 0.1,
    cure_frac: float = 0.5,
    up_to_lr: float | None = None,
    tail_frac: float = 0.1,
) -> Diagnosis:
    """Tell whether a modification makes high learning rates unstable, those alone, and whether a warmup cures it.

    Only learning rates that two arms share are compared, each by the mean training loss of its last steps (O1) over the
    seeds. The evidence of every code says whether its statement `holds`: True, False, or None where the records cannot
    tell, with the `reason`.

    Args:
        baseline: a sweep of the workload as it was.
        modified: a sweep of the modified workload.
        warmed: a sweep of the modified workload with a warmup; None leaves the third statement open.
        noise_sds: two means are equal within this many standard deviations from seed to seed (rule of thumb).
        material_frac: or within this share of what the baseline's best lr learned (rule of thumb).
        low_ratio: an lr is low where the smallest unstable one of either arm is at least this many times as large: near
            its edge even a stable run swings (rule of thumb).
        min_low_lrs: low lrs that the first statement needs (rule of thumb).
        min_seeds: trials that an lr needs in each arm; a single one does not know its spread.
        min_ratio: the baseline has to train up to this many times the smallest lr that the modification lost: a step
            of the usual grid, less may be chance, and leaves the second statement open (rule of thumb).
        collapse_frac: runs that end this share of what the modified arm learned above those of a smaller lr got stuck, though
            their loss never rose (rule of thumb). That instability is why counts as shown where a warmup cures one of them.
        cure_frac: share of the gap between the modified arm and the baseline that a warmup has to close (rule of thumb).
        up_to_lr: the lr up to which the warmup has to open; None is every lr that the modification lost.
        tail_frac: share of the steps that the objective averages (O1).

    Returns:
        The codes `comparison.low_lr_same`, `.high_lr_lost` and `.warmup_cures`, once each.
    """
    tables = ArmTables(
        judged(baseline).sweep(tail_frac=tail_frac),
        judged(modified).sweep(tail_frac=tail_frac),
        None if warmed is None else judged(warmed).sweep(tail_frac=tail_frac),
        ArmLimits(
            noise_sds=noise_sds, material_frac=material_frac, low_ratio=low_ratio, min_low_lrs=min_low_lrs,
            min_seeds=min_seeds, min_ratio=min_ratio, collapse_frac=collapse_frac, cure_frac=cure_frac, up_to_lr=up_to_lr,
        ),
    )  # fmt: skip
    unstable = _high_lr_lost(tables, modified)
    steps = None if warmed is None else warmed.config.get("warmup_steps")
    findings = (_low_lr_same(tables), unstable, _warmup_cures(tables, unstable.evidence["holds"], steps))
    return Diagnosis.of(modified, findings)


def _statement(code: str, holds: bool | None, summary: str, *, evidence: dict[str, Any], **more: Any) -> Finding:
    """Return the finding of a statement; it warns where the answer is bad news, be that its yes or its no."""
    evidence = {"holds": holds} | evidence
    status: Status = "warn" if holds is _BAD_NEWS[code] else "ok"
    if holds is None:
        status, evidence["reason"], summary = "not_measured", summary, f"Not measured: {summary}."
    return Finding(code=code, status=status, clause=_CLAUSE[code], summary=summary, evidence=evidence, **more)


def _low_lr_same(tables: ArmTables) -> Finding:
    low, limits = tables.low, tables.limits
    rows = [_difference(tables, a, b) for a, b in low]
    evidence = {"edge": tables.edge, "low_ratio": limits.low_ratio, "lrs": rows}
    reason = tables.unreadable
    if reason is None and tables.edge is None:
        reason = f"{_no_edge(tables)}, so none is known to be low; extend the sweep upwards"
    elif reason is None and len(low) < limits.min_low_lrs:
        reason = (
            f"{len(low)} of the shared lrs lie a factor of {limits.low_ratio:g} below the smallest unstable one, "
            f"{limits.min_low_lrs} are needed: extend the sweep downwards"
        )
    if reason is not None:
        return _statement(_SAME, None, reason, evidence=evidence)
    furthest = max(rows, key=lambda row: abs(row["difference"]) / max(row["margin"], 1e-300))
    touched = [row["lr"] for row in rows if row["differs"]]
    summary = (
        f"At {len(touched)} of {len(rows)} low lrs the modification changes the loss by more than the seeds do: by "
        f"{furthest['difference']:+.3g} at lr {furthest['lr']:.4g}."
    )
    if not touched:
        span = f"from {rows[0]['lr']:.4g} to {rows[-1]['lr']:.4g}"
        summary = f"At low lrs, {span}, the modification changes the loss by no more than another seed does."
    return _statement(
        _SAME, not touched, summary, value=furthest["difference"], threshold=furthest["margin"], unit="training loss",
        evidence=evidence,
    )  # fmt: skip


def _difference(tables: ArmTables, one: LRPoint, other: LRPoint) -> dict[str, Any]:
    difference, margin = other.loss - one.loss, tables.margin(one, other)
    return {
        "lr": one.lr, "baseline": one.loss, "modified": other.loss, "difference": difference, "margin": margin,
        "differs": not abs(difference) <= margin,
    }  # fmt: skip


def _high_lr_lost(tables: ArmTables, modified: RecordLike) -> Finding:
    lost = [b for _, b in tables.lost]
    shown = [b for a, b in tables.lost if tables.sign(b) == "rise" or tables.cured(a, b)]
    first = (shown or lost)[0].lr if lost else 0.0
    limit = min((a.lr for a, _ in tables.shared if a.unstable and a.lr > first), default=None)
    top = max((a.lr for a, _ in tables.shared), default=0.0)
    ratio = (limit or top) / first if lost else 0.0
    far = ratio >= tables.limits.min_ratio * (1 - 1e-9)
    when = _when(modified, lost)
    rows = [
        {"lr": b.lr, "loss": b.loss, "sign": tables.sign(b), "outcomes": list(b.outcomes), "trials": list(b.trials)}
        for b in lost
    ]
    known: dict[str, Any] = {
        "value": ratio if lost else None, "unit": "baseline's unstable lr / modified one's", "threshold": tables.limits.min_ratio,
        "evidence": {"arms": tables.rows(), "baseline_unstable_lr": limit, "highest_lr": top, "when": when, "lrs": rows},
    }  # fmt: skip
    reason = tables.unreadable
    if reason is None and tables.edge is None:
        reason = f"{_no_edge(tables)}; extend the sweep upwards"
    elif reason is None and lost and not far and limit is None:
        reason = f"the modification lost lr {first:.4g}, too near the end of the sweep to tell; extend it upwards"
    elif reason is None and lost and not far:
        reason = f"the modification loses lr {first:.4g}, but the baseline is unstable at {limit:.4g}: too near to tell apart"
    elif reason is None and far and not shown:
        text = f"from lr {first:.4g} the modified runs get stuck without a rise of their loss"
        reason = f"{text}, and no warmup that trains there has shown that instability is why"
    if reason is not None:
        return _statement(_LOST, None, reason, **known)
    reach = max(a.lr for a, _ in tables.shared if limit is None or a.lr < limit)
    summary = "The modification makes no lr unstable at which the baseline trains."
    if far:
        stuck = sum(row["sign"] == "collapse" for row in rows)
        how = f" ({stuck} of {len(lost)} lrs get stuck without a rise of the loss)" if stuck else ""
        summary = (
            f"From lr {first:.4g} the modification makes training unstable{how}; the baseline trains up to {reach:.4g}."
        )
    return _statement(_LOST, far, summary, advice=_advice(when) if far else (), **known)


def _no_edge(tables: ArmTables) -> str:
    return f"no lr up to {max(a.lr for a, _ in tables.shared):.4g} is unstable in either arm"


def _when(record: RecordLike, points: Sequence[LRPoint]) -> dict[str, int]:
    """Return how many of the trials at these points rise early, and how many in the middle."""
    trials = {trial for point in points for trial in point.trials}
    rows = judged_runs(record, set(record.trials["stage"])) if trials else []
    return dict(Counter(str(row["when"]) for row in rows if row["trial"] in trials and row["when"] != "none"))


def _advice(when: dict[str, int]) -> list[str]:
    return advise("mid" if when.get("mid", 0) > when.get("early", 0) else "early")


def _warmup_cures(tables: ArmTables, unstable: bool | None, steps: int | None) -> Finding:
    lost = [b for _, b in tables.lost]
    up_to = tables.limits.up_to_lr or max((b.lr for b in lost), default=None)
    rows = [_cure(tables, a, b) for a, b in tables.lost if up_to is not None and b.lr <= up_to * (1 + 1e-9)]
    stable = _trains_up_to(tables)
    known: dict[str, Any] = {
        "value": stable, "unit": "lr", "threshold": up_to,
        "evidence": {"warmup_steps": steps, "trains_up_to": stable, "up_to_lr": up_to, "lrs": rows},
    }  # fmt: skip
    reason = None
    if tables.warmed is None:
        reason = "no sweep with a warmup was trained"
    elif not steps:
        reason = "the third sweep has no warmup"
    elif unstable is not True or not rows:
        reason = "the modification shows no instability that a warmup could cure"
    elif any(row["cured"] is None for row in rows):
        reason = "the sweep with a warmup lacks lrs or seeds at which the modification is unstable"
    if reason is not None:
        return _statement(_CURES, None, reason, **known)
    opened = [row["lr"] for row in rows if row["cured"]]
    holds = len(opened) == len(rows) and stable is not None and up_to is not None and stable >= up_to * (1 - 1e-9)
    reach = "at no lr" if stable is None else f"up to lr {stable:.4g}"
    ramp = f"A warmup over {steps:,} steps cures {len(opened)} of the {len(rows)} lrs that the modification lost"
    summary = f"{ramp}; with it training is stable {reach}."
    return _statement(_CURES, holds, summary, advice=() if holds else advise("early")[1:], **known)


def _cure(tables: ArmTables, before: LRPoint, without: LRPoint) -> dict[str, Any]:
    points = () if tables.warmed is None else tables.warmed.points
    loss = next((p.loss for p in points if lr_key(p.lr) == lr_key(without.lr)), None)
    known = {"lr": without.lr, "baseline": before.loss, "modified": without.loss, "warmed": loss}
    return known | {"cured": tables.cured(before, without)}


def _trains_up_to(tables: ArmTables) -> float | None:
    """Return the largest lr up to which, with the warmup, nothing is unstable and nothing lost stays so."""
    left = {lr_key(b.lr) for a, b in tables.lost if not tables.cured(a, b)}
    largest = None
    for point in () if tables.warmed is None else tables.warmed.points:
        if point.unstable or lr_key(point.lr) in left:
            break
        largest = point.lr
    return largest
