"""`diagnose_modification`: what a modification does to the learning rates that train, and whether a warmup undoes it (F1.3).

Three sweeps over the same learning rates, each under several seeds: the baseline, the modified workload, and the modified
one with a warmup. The playbook's three statements about them come out as three booleans.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from workbench.curves.judged import judged, judged_runs
from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trial_curves import RecordLike
from workbench.findings.advice import advise
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status

CODES = Codes({
    "comparison.low_lr_same": "F1.3", "comparison.high_lr_lost": "F1.3", "comparison.warmup_cures": "F1.3, F3.16",
})  # fmt: skip
_SAME, _LOST, _CURES = CODES
RISING = frozenset({"recovered", "settling", "lasting", "divergent"})


class Arms(NamedTuple):
    """Three studies of the same learning rates; `diagnose_modification(*arms)` reads them."""

    baseline: RecordLike
    modified: RecordLike
    warmed: RecordLike | None = None


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """The three sweeps, and what they are held against: the thresholds of `diagnose_modification`."""

    baseline: SweepTable
    modified: SweepTable
    warmed: SweepTable | None
    noise_sds: float
    material_frac: float
    low_ratio: float
    min_low_lrs: int
    min_seeds: int
    min_ratio: float
    collapse_frac: float
    cure_frac: float
    up_to_lr: float | None
    fixes: Mapping[str, float] | None

    @cached_property
    def shared(self) -> list[tuple[LRPoint, LRPoint]]:
        """The baseline's and the modified point of every lr that both were trained at under enough seeds."""
        modified = {_key(p.lr): p for p in self.modified.points}
        pairs = [(p, modified[_key(p.lr)]) for p in self.baseline.points if _key(p.lr) in modified]
        return [(a, b) for a, b in pairs if min(len(a.seeds), len(b.seeds)) >= self.min_seeds]

    @cached_property
    def lost(self) -> list[tuple[LRPoint, LRPoint]]:
        """Those at which the baseline trains under every seed, and the modified one ends worse with a sign of instability."""
        return [(a, b) for a, b in self.shared if not a.lasting and self.worse(b, a) and self.sign(b)]

    @cached_property
    def edge(self) -> float | None:
        """The smallest lr at which instability is seen in either arm."""
        unstable = [a.lr for a, b in self.shared if a.unstable or b.unstable]
        return min([b.lr for _, b in self.lost] + unstable, default=None)

    @property
    def unreadable(self) -> str | None:
        """Why nothing can be said at all, None where something can."""
        if not self.shared:
            trained = self.baseline.points or self.modified.points
            few = f"no lr was trained under {self.min_seeds} seeds in both arms"
            return few if trained else "no sweep was trained to its end"
        if not self.baseline.learned:
            return "no lr brought the baseline's loss clearly below that of its initial model"
        return None

    def sign(self, point: LRPoint) -> Literal["rise", "collapse"] | None:
        """What of the modified runs at an lr looks unstable, and not merely slow."""
        if 2 * sum(outcome in RISING for outcome in point.outcomes) >= len(point.outcomes):
            return "rise"
        smaller = [p for p in self.modified.points if p.lr < point.lr and not p.unstable]
        best = min(smaller, key=lambda p: p.loss, default=None)
        if best is None or not self.worse(point, best):
            return None
        return "collapse" if point.loss - best.loss > self.collapse_frac * self.modified.progress else None

    def cured(self, before: LRPoint, without: LRPoint) -> bool | None:
        """Whether the warmup makes an lr train that the modification lost; None where that was not tried often enough."""
        points = () if self.warmed is None else self.warmed.points
        tried = [p for p in points if _key(p.lr) == _key(without.lr) and len(p.seeds) >= self.min_seeds]
        if not tried:
            return None
        lost = min(without.loss, self.baseline.loss_ref) if math.isinf(without.loss) else without.loss
        enough = lost - tried[0].loss >= self.cure_frac * (lost - before.loss)
        return not tried[0].unstable and enough and self.worse(without, tried[0])

    def advice(self, modified: RecordLike, *, mid: bool) -> list[str]:
        """Return what to try, by what was measured where the modification first loses an lr; a warmup that cures no lr is left out."""
        (before, without), ends = self.lost[0], dict(self.fixes or {})
        if any(self.cured(*pair) is not None for pair in self.lost):
            opens = any(self.cured(*pair) for pair in self.lost)
            ends["warmup"] = ends.get("warmup", before.loss) if opens else math.inf
        optimizer = str(modified.config.get("optimizer"))
        better = without.loss - self.material_frac * self.baseline.progress  # than no fix
        return advise("mid" if mid else "early", optimizer=optimizer, fixes=ends, loss=better)

    def margin(self, one: LRPoint, other: LRPoint) -> float:
        """How far two mean losses lie apart by the seeds alone, and at least what is not worth a word."""
        finite = [[loss for loss in p.losses if math.isfinite(loss)] for p in (one, other)]
        variances = [float(np.var(losses, ddof=1)) for losses in finite if len(losses) > 1]
        spread = math.sqrt(float(np.mean(variances))) if variances else 0.0
        return max(self.noise_sds * spread, self.material_frac * self.baseline.progress)

    def worse(self, one: LRPoint, other: LRPoint) -> bool:
        """Whether `one` ends clearly above `other`."""
        return math.isfinite(other.loss) and one.loss - other.loss > self.margin(one, other)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the points of every arm that was trained, as JSON values for a figure."""
        known = {"baseline": self.baseline, "modified": self.modified, "warmed": self.warmed}
        names = ("lr", "loss", "losses", "seeds", "unstable")
        return {
            arm: [{name: getattr(p, name) for name in names} for p in table.points]
            for arm, table in known.items()
            if table is not None
        }


def _key(lr: float) -> str:
    """Return a learning rate to ten digits: two that agree to them are one."""
    return f"{lr:.9e}"


def diagnose_modification(
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
    fixes: Mapping[str, float] | None = None,
) -> Diagnosis:
    """Tell whether a modification makes high learning rates unstable, those alone, and whether a warmup cures it.

    Only learning rates that two arms share are compared, each by the mean training loss of its last steps (O1) over the
    seeds. The evidence of every code says whether its statement `holds`: True, False, or None where the records cannot
    tell, with the `reason`.

    Args:
        baseline: a sweep of the workload as it was.
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
        fixes: the losses that fixes of the modified arm ended at, at the smallest lr that it lost, as
            {"clipping": 2.3, "warmup": 0.8}, or of "optimizer" and "architecture": the advice follows them, and leaves out what was no better.
    """
    tables = _Tables(
        baseline=judged(baseline).sweep(tail_frac), modified=judged(modified).sweep(tail_frac),
        warmed=None if warmed is None else judged(warmed).sweep(tail_frac),
        noise_sds=noise_sds, material_frac=material_frac, low_ratio=low_ratio, min_low_lrs=min_low_lrs,
        min_seeds=min_seeds, min_ratio=min_ratio, collapse_frac=collapse_frac, cure_frac=cure_frac, up_to_lr=up_to_lr, fixes=fixes,
    )  # fmt: skip
    unstable = _high_lr_lost(tables, modified)
    steps = None if warmed is None else warmed.config.get("warmup_steps")
    findings = (_low_lr_same(tables), unstable, _warmup_cures(tables, unstable, steps))
    return Diagnosis.of(modified, findings)


def _statement(code: str, holds: bool | None, summary: str, *, evidence: dict[str, Any], **more: Any) -> Finding:
    """Return the finding of a statement; it warns where the answer is bad news, be that its yes or its no."""
    evidence = {"holds": holds} | evidence
    if holds is None:
        return CODES.not_measured(code, summary, evidence=evidence | {"reason": summary}, **more)
    status: Status = "warn" if holds is (code == _LOST) else "ok"
    return CODES.finding(code, status, summary, evidence=evidence, **more)


def _low_lr_same(tables: _Tables) -> Finding:
    edge = tables.edge  # without one no lr is known to be low
    low = [pair for pair in tables.shared if edge is not None and pair[0].lr * tables.low_ratio <= edge * (1 + 1e-9)]
    rows: list[dict[str, Any]] = [
        {"lr": a.lr, "baseline": a.loss, "modified": b.loss, "difference": b.loss - a.loss, "margin": tables.margin(a, b),
         "differs": not abs(b.loss - a.loss) <= tables.margin(a, b)}
        for a, b in low
    ]  # fmt: skip
    evidence = {"edge": edge, "low_ratio": tables.low_ratio, "lrs": rows}
    reason = tables.unreadable
    if reason is None and tables.edge is None:
        reason = f"{_no_edge(tables)}, so none is known to be low; extend the sweep upwards"
    elif reason is None and len(low) < tables.min_low_lrs:
        reason = (
            f"{len(low)} of the shared lrs lie a factor of {tables.low_ratio:g} below the smallest unstable one, "
            f"{tables.min_low_lrs} are needed: extend the sweep downwards"
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


def _high_lr_lost(tables: _Tables, modified: RecordLike) -> Finding:
    lost = [b for _, b in tables.lost]
    shown = [b for a, b in tables.lost if tables.sign(b) == "rise" or tables.cured(a, b)]
    first = (shown or lost)[0].lr if lost else 0.0
    limit = min((a.lr for a, _ in tables.shared if a.unstable and a.lr > first), default=None)
    top = max((a.lr for a, _ in tables.shared), default=0.0)
    ratio = (limit or top) / first if lost else 0.0
    far = ratio >= tables.min_ratio * (1 - 1e-9)
    trials = {trial for point in lost for trial in point.trials}
    runs = judged_runs(modified, set(modified.trials["stage"])) if trials else []
    when = dict(Counter(str(run["when"]) for run in runs if run["trial"] in trials and run["when"] != "none"))
    rows = [
        {"lr": b.lr, "loss": b.loss, "sign": tables.sign(b), "outcomes": list(b.outcomes), "trials": list(b.trials)}
        for b in lost
    ]
    known: dict[str, Any] = {
        "value": ratio if lost else None, "unit": "baseline's unstable lr / modified one's", "threshold": tables.min_ratio,
        "evidence": {"arms": tables.rows(), "baseline_unstable_lr": limit, "highest_lr": top, "when": when, "lrs": rows},
    }  # fmt: skip
    reason = tables.unreadable
    if reason is None and tables.edge is None:
        reason = f"{_no_edge(tables)}; extend the sweep upwards"
    elif reason is None and lost and not far and limit is None:
        reason = (
            f"the modified training fails at lr {first:.4g}, too near the end of the sweep to tell; extend it upwards"
        )
    elif reason is None and lost and not far:
        reason = f"the modified training fails at lr {first:.4g}, but the baseline is unstable at {limit:.4g}: too near to tell apart"
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
    advice = tables.advice(modified, mid=when.get("mid", 0) > when.get("early", 0)) if far else ()
    return _statement(_LOST, far, summary, advice=advice, **known)


def _no_edge(tables: _Tables) -> str:
    return f"no lr up to {max(a.lr for a, _ in tables.shared):.4g} is unstable in either arm"


def _warmup_cures(tables: _Tables, unstable: Finding, steps: int | None) -> Finding:
    up_to = tables.up_to_lr or max((b.lr for _, b in tables.lost), default=None)
    warmed = {} if tables.warmed is None else {_key(p.lr): p.loss for p in reversed(tables.warmed.points)}
    rows: list[dict[str, Any]] = [
        {"lr": b.lr, "baseline": a.loss, "modified": b.loss, "warmed": warmed.get(_key(b.lr)), "cured": tables.cured(a, b)}
        for a, b in tables.lost
        if up_to is not None and b.lr <= up_to * (1 + 1e-9)
    ]  # fmt: skip
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
    elif unstable.evidence["holds"] is not True or not rows:
        reason = "the modification shows no instability that a warmup could cure"
    elif any(row["cured"] is None for row in rows):
        reason = "the sweep with a warmup lacks lrs or seeds at which the modification is unstable"
    if reason is not None:
        return _statement(_CURES, None, reason, **known)
    opened = [row["lr"] for row in rows if row["cured"]]
    holds = len(opened) == len(rows) and stable is not None and up_to is not None and stable >= up_to * (1 - 1e-9)
    reach = "at no lr" if stable is None else f"up to lr {stable:.4g}"
    ramp = (
        f"A warmup over {steps:,} steps cures {len(opened)} of the {len(rows)} lrs at which the modified training fails"
    )
    summary = f"{ramp}; with it training is stable {reach}."
    return _statement(_CURES, holds, summary, advice=() if holds else unstable.advice, **known)


def _trains_up_to(tables: _Tables) -> float | None:
    """Return the largest lr up to which, with the warmup, nothing is unstable and nothing lost stays so."""
    left = {_key(b.lr) for a, b in tables.lost if not tables.cured(a, b)}
    largest = None
    for point in () if tables.warmed is None else tables.warmed.points:
        if point.unstable or _key(point.lr) in left:
            break
        largest = point.lr
    return largest
