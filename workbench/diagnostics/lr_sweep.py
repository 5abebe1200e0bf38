"""`diagnose_lr_sweep`: lr*, where instability starts, and what that says about the baseline (F1.6, F1.12, O1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.diagnostics.advice import advise
from workbench.diagnostics.base import Diagnosis, Finding
from workbench.diagnostics.fix_runs import is_harmful
from workbench.diagnostics.judged_runs import judged_runs
from workbench.diagnostics.lr_points import LRPoint, SweepTable, objective, sweep_table
from workbench.diagnostics.lr_rounds import bisect_next
from workbench.diagnostics.lr_search import BestLR, UnstableBracket, lr_best, refine_next, unstable_bracket
from workbench.diagnostics.trials import RecordLike

__all__ = ["bisect_next", "diagnose_lr_sweep", "lr_best", "objective", "refine_next", "sweep_table", "unstable_bracket"]

CODES = ("lr.best", "lr.grid_edge", "lr.unstable", "lr.too_low", "lr.at_edge", "lr.probabilistic")
_CLAUSE = {
    "lr.best": "F1.6", "lr.grid_edge": "F1.6", "lr.unstable": "F1.4", "lr.too_low": "F1.6", "lr.at_edge": "F1.12",
    "lr.probabilistic": "F1.4",
}  # fmt: skip


def diagnose_lr_sweep(
    record: RecordLike,
    *,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    edge_ratio: float = 2.0,
    too_low_ratio: float = 2.0,
    material_frac: float = 0.01,
    bracket_tolerance: float = 0.05,
    tail_frac: float = 0.1,
) -> Diagnosis:
    """Find lr* and the lr at which training becomes unstable, and hold the baseline's lr against them.

    Only full-length trials of one config count (equal but for lr and seeds); trials of stage "fix" answer whether a
    best lr at the edge of the unstable region costs anything.

    Args:
        record: a study, or a single trial (which can show no lr*).
        noise_sds: standard errors of a paired difference that count as equal.
        loss_tolerance: relative difference of the loss that counts as equal (O1).
        edge_ratio: lr* is at the edge when instability starts at or below this many times lr* (rule of thumb).
        too_low_ratio: the baseline is too low when lr* is more than this many times its lr (rule of thumb).
        material_frac: a baseline whose loss is within this share of what lr* learned loses nothing (rule of thumb).
        bracket_tolerance: width of the bracket around `lr.unstable` that is asked for.
        tail_frac: share of the steps that the objective averages (O1).

    Returns:
        The codes `lr.best`, `lr.grid_edge`, `lr.unstable`, `lr.too_low`, `lr.at_edge`, `lr.probabilistic`, once each.
    """
    table = sweep_table(record, tail_frac=tail_frac)
    best = lr_best(table, noise_sds=noise_sds, loss_tolerance=loss_tolerance)
    if best is None or len(table.points) < 2:
        findings = _not_measured(table)
    else:
        bracket = unstable_bracket(table)
        baseline = _number(record.config.get("peak_lr"))
        findings = [
            _best(table, best, baseline),
            _grid_edge(table, best),
            _unstable(table, best, bracket, bracket_tolerance),
            _too_low(table, best, baseline, ratio=too_low_ratio, material_frac=material_frac),
            _at_edge(
                record,
                table,
                best,
                bracket,
                edge_ratio=edge_ratio,
                noise_sds=noise_sds,
                loss_tolerance=loss_tolerance,
                material_frac=material_frac,
            ),
            _probabilistic(table, best, baseline, edge_ratio),
        ]
    return Diagnosis(
        findings=tuple(findings), workload=record.workload, command=record.command, path=getattr(record, "path", None)
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _rows(table: SweepTable) -> list[dict[str, Any]]:
    """Return what a figure of the sweep needs, one row an lr."""
    return [
        {
            "lr": p.lr, "loss": p.loss, "loss_se": p.loss_se, "above_best": p.above_best,
            "above_best_se": p.above_best_se, "seeds": list(p.seeds), "losses": list(p.losses),
            "outcomes": list(p.outcomes), "lasting": p.lasting, "unstable": p.unstable, "trials": list(p.trials),
            "state": "diverged" if math.isinf(p.loss) else "complete",
        }
        for p in table.points
    ]  # fmt: skip


def _not_measured(table: SweepTable) -> list[Finding]:
    if len(table.points) < 2:
        reason = f"{len(table.points)} learning rate(s) were trained at full length; a sweep needs at least two"
    elif all(math.isinf(p.loss) for p in table.points):
        reason = "every learning rate tried became non-finite: try smaller ones"
    else:
        reason = "no learning rate brought the loss clearly below that of the initial model"
    return [
        Finding(
            code=code, status="not_measured", summary=f"Not measured: {reason}.", clause=_CLAUSE[code],
            evidence={"points": _rows(table), "reason": reason, "loss_ref": table.loss_ref},
        )
        for code in CODES
    ]  # fmt: skip


def _best(table: SweepTable, best: BestLR, baseline: float) -> Finding:
    note = "; the grid around it is coarse, more lrs would sharpen it" if best.needs_refinement else ""
    return Finding(
        code="lr.best", status="ok", value=best.lr, unit="lr", clause=_CLAUSE["lr.best"],
        summary=f"The best learning rate by training loss is {best.lr:.4g}{_interval(best)}{note}.",
        evidence={
            "low": best.low, "high": best.high, "measured_lr": best.measured_lr, "tied": list(best.tied),
            "loss": best.point.loss, "loss_se": best.point.loss_se, "baseline_lr": baseline,
            "needs_refinement": best.needs_refinement, "next_lr": refine_next(table), "reason": best.reason,
            "noise_free": table.noise_free, "loss_ref": table.loss_ref, "total_steps": table.total_steps,
            "objective": "mean training loss of the last tenth of the steps", "points": _rows(table),
        },
    )  # fmt: skip


def _interval(best: BestLR) -> str:
    if best.high > 100 * best.low:  # a plain that spans two decades is no bowl (rule of thumb)
        return f", but the bowl is nearly flat: everything from {best.low:.4g} to {best.high:.4g} trains as well"
    return f" ({best.low:.4g} to {best.high:.4g} are as good)"


def _grid_edge(table: SweepTable, best: BestLR) -> Finding:
    lrs = [p.lr for p in table.points]
    evidence = {"border": best.border, "lowest_lr": lrs[0], "highest_lr": lrs[-1]}
    if best.border is None:
        summary = f"The lowest loss lies inside the lrs tried ({lrs[0]:.4g} to {lrs[-1]:.4g})."
        return Finding(code="lr.grid_edge", status="ok", summary=summary, clause="F1.6", evidence=evidence)
    word = "smaller" if best.border == "low" else "larger"
    return Finding(
        code="lr.grid_edge", status="warn", clause="F1.6", value=best.measured_lr, unit="lr", evidence=evidence,
        summary=f"The lowest loss is at the {'lowest' if best.border == 'low' else 'highest'} lr tried, "
        f"{best.measured_lr:.4g}: the true lr* may lie beyond it.",
        advice=[f"Extend the sweep to {word} learning rates."],
    )  # fmt: skip


def _unstable(table: SweepTable, best: BestLR, bracket: UnstableBracket | None, tolerance: float) -> Finding:
    rising = [p.lr for p in table.points if p.lr > best.measured_lr and any(o not in ("none", "not_measured") for o in p.outcomes)]  # fmt: skip
    evidence: dict[str, Any] = {
        "first_rise_lr": min(rising, default=None), "total_steps": table.total_steps,
        "unseen_below": 2.0 / max(table.total_steps, 1),
    }  # fmt: skip
    if bracket is None:
        top = table.points[-1].lr
        return Finding(
            code="lr.unstable", status="not_measured", clause="F1.4", unit="lr", evidence=evidence,
            summary=f"No learning rate up to {top:.4g} is lastingly unstable in {table.total_steps} steps.",
            advice=["Extend the sweep to larger learning rates: every workload has an unstable one."],
        )  # fmt: skip
    evidence |= {
        "lower": bracket.lower, "upper": bracket.upper, "ratio": bracket.ratio,
        "stable_above": list(bracket.stable_above), "next_lr": bisect_next(table, tolerance=tolerance),
        "seeds": {f"{p.lr:.6g}": f"{p.lasting} of {len(p.seeds)} lasting" for p in table.points if p.lasting},
    }  # fmt: skip
    wide = "" if bracket.ratio <= (1 + tolerance) * (1 + 1e-9) else f"; the bracket is wider than {tolerance:.0%}"
    low = "below" if bracket.lower is None else f"between {bracket.lower:.4g} and"
    odd = f"; {len(bracket.stable_above)} larger lr(s) are stable all the same" if bracket.stable_above else ""
    return Finding(
        code="lr.unstable", status="ok", value=bracket.middle, unit="lr", clause="F1.4", evidence=evidence,
        summary=f"Training becomes lastingly unstable {low} {bracket.upper:.4g}{wide}{odd}.",
    )  # fmt: skip


def _too_low(table: SweepTable, best: BestLR, baseline: float, *, ratio: float, material_frac: float) -> Finding:
    if not math.isfinite(baseline):
        return Finding(
            code="lr.too_low", status="not_measured", clause="F1.6", summary="Not measured: the baseline has no lr."
        )
    value = best.lr / baseline
    own = next((p for p in table.points if math.isclose(p.lr, baseline, rel_tol=1e-9)), None)
    lost = None if own is None else (own.loss - best.point.loss) / table.progress
    evidence = {"baseline_lr": baseline, "lr_star": best.lr, "low": best.low, "lost_frac": lost}
    known: dict[str, Any] = {
        "code": "lr.too_low", "value": value, "unit": "lr* / baseline lr", "threshold": ratio, "clause": "F1.6",
        "evidence": evidence,
    }  # fmt: skip
    if value <= ratio * (1 + 1e-9) or baseline >= best.low:
        where = "is not far below"
        if value < 1 / ratio:
            where = f"is not too low: it lies {1 / value:.3g} times above"
        elif value > ratio:
            where = f"is {value:.3g} times below, and as good as,"
        summary = f"The baseline's lr {baseline:.4g} {where} lr* = {best.lr:.4g}."
        return Finding(status="ok", summary=summary, **known)
    times = f"{value:.3g}" if value < 1000 else "more than 1,000"
    shown = f"The baseline's lr {baseline:.4g} is {times} times below lr* = {best.lr:.4g}"
    if lost is not None and lost <= material_frac:
        summary = f"{shown}, but learns all but {100 * max(lost, 0.0):.2g} % of what lr* does: harmless."
        return Finding(status="ok", summary=summary, **known)
    return Finding(status="warn", summary=f"{shown}.", advice=[f"Raise peak_lr to {best.lr:.4g}."], **known)


def _at_edge(
    record: RecordLike,
    table: SweepTable,
    best: BestLR,
    bracket: UnstableBracket | None,
    *,
    edge_ratio: float,
    noise_sds: float,
    loss_tolerance: float,
    material_frac: float,
) -> Finding:
    code, clause = "lr.at_edge", _CLAUSE["lr.at_edge"]
    if bracket is None:
        return Finding(
            code=code, status="not_measured", clause=clause, summary="Not measured: no unstable lr was found."
        )
    ratio = bracket.middle / best.lr
    at_edge = ratio <= edge_ratio
    trials = judged_runs(record, ["fix"], above=bracket.middle)
    harmful = is_harmful(table, trials, noise_sds=noise_sds, loss_tolerance=loss_tolerance, material_frac=material_frac)
    evidence = {
        "at_edge": at_edge, "lr_star": best.lr, "unstable_lr": bracket.middle, "harmful": harmful, "fix_trials": trials,
        "points": _rows(table),
    }  # fmt: skip
    common: dict[str, Any] = {
        "code": code, "clause": clause, "value": ratio, "unit": "lr.unstable / lr*", "threshold": edge_ratio,
        "evidence": evidence,
    }  # fmt: skip
    if not at_edge:
        return Finding(status="ok", summary=f"Instability starts at {ratio:.3g} times lr*: harmless.", **common)
    start = f"The best lr sits at the edge of the unstable region ({ratio:.3g} times lr* is unstable)"
    if harmful is False:
        return Finding(
            status="ok",
            summary=f"{start}, but {_tried(trials)} beyond it gains nothing that matters: harmless.",
            **common,
        )
    end = (
        f", and {_tried(trials)} lets a larger lr train better"
        if harmful
        else "; no fix run has shown whether that costs anything"
    )
    return Finding(
        status="warn", summary=f"{start}{end}.", **common,
        advice=advise("early"),
    )  # fmt: skip


def _tried(fixes: Sequence[Mapping[str, Any]]) -> str:
    words = [f"warmup over {f['warmup_steps']} steps" for f in fixes if f["warmup_steps"]]
    words += [f"clipping at {f['max_grad_norm']:.3g}" for f in fixes if f["max_grad_norm"] is not None]
    return " or ".join(dict.fromkeys(words)) or "a fix"


def _probabilistic(table: SweepTable, best: BestLR, baseline: float, edge_ratio: float) -> Finding:
    code, clause = "lr.probabilistic", _CLAUSE["lr.probabilistic"]
    repeated = [p for p in table.points if len(p.seeds) > 1]
    if not repeated:
        return Finding(
            code=code, status="not_measured", clause=clause,
            summary="Not measured: every lr was run with one seed, so seeds cannot disagree.",
        )  # fmt: skip
    disputed = [p for p in repeated if p.disputed]
    evidence = {"disputed": [_dispute(p) for p in disputed], "repeated_lrs": [p.lr for p in repeated]}
    if not disputed:
        where = "the one lr that was" if len(repeated) == 1 else f"all {len(repeated)} lrs that were"
        summary = f"The seeds agree on what is lastingly unstable, at {where} run more than once."
        return Finding(code=code, status="ok", clause=clause, summary=summary, evidence=evidence)
    first = disputed[0]
    near = first.lr <= max(edge_ratio * best.lr, baseline * (1 + 1e-9))
    return Finding(
        code=code, status="warn" if near else "ok", clause=clause, value=first.lr, unit="lr", evidence=evidence,
        summary=f"At lr {first.lr:.4g} {first.lasting} of {len(first.seeds)} seeds are lastingly unstable"
        + (": stability there is a matter of chance." if near else f", well above lr* = {best.lr:.4g}."),
        advice=[f"Stay below {first.lr:.4g}, or run more seeds there."] if near else [],
    )  # fmt: skip


def _dispute(point: LRPoint) -> dict[str, Any]:
    return {"lr": point.lr, "lasting": point.lasting, "seeds": len(point.seeds), "outcomes": list(point.outcomes)}
