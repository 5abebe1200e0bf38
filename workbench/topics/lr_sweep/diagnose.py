"""`diagnose_lr_sweep`: lr*, where instability starts, and what that says about the baseline (F1.6, F1.12, O1)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.curves.clipping import fixed_step
from workbench.curves.judged import JudgedStudy, is_harmful, judged, judged_runs, trials_with
from workbench.curves.losses import nothing_clear, nothing_finite, nothing_learns
from workbench.curves.lr_search import BestLR, UnstableBracket, edge_round, lr_best, refine_round, unstable_bracket
from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trial_curves import RecordLike
from workbench.findings.advice import advise
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.findings.first_look import length_of_runs
from workbench.record.roles import Role
from workbench.topics.lr_sweep.own_lr import OWN_LR_CODES, differ_by_metric, own_lr_findings

CODES = Codes({
    "lr.best": "F1.6", "lr.grid_edge": "F1.6", "lr.unstable": "F1.4", **OWN_LR_CODES, "lr.at_edge": "F1.12",
    "lr.probabilistic": "F1.4", "lr.nothing_learns": "F1.1",
})  # fmt: skip


def diagnose_lr_sweep(
    record: RecordLike,
    *,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    edge_ratio: float = 2.0,
    other_ratio: float = 2.0,
    material_frac: float = 0.1,
    little_frac: float = 0.5,
    fix_frac: float = 0.01,
    far_ratio: float = 30.0,
    bracket_tolerance: float = 0.05,
    tail_frac: float = 0.1,
) -> Diagnosis:
    """Find lr* and the lr at which training becomes unstable, and hold the baseline's lr against them.

    Only full-length trials of one config count (equal but for lr and seeds); trials of the role "fix" answer whether a
    best lr at the edge of the unstable region costs anything.

    Args:
        record: a study, or a single trial (which can show no lr*).
        noise_sds: standard errors of a paired difference that count as equal.
        loss_tolerance: relative difference of the loss that counts as equal (O1).
        edge_ratio: lr* is at the edge when instability starts at or below this many times lr* (rule of thumb).
        other_ratio: lrs closer to the baseline's than this factor are no other lrs (rule of thumb).
        material_frac: the baseline's lr is too high or too low when it loses at least this share of what another lr learns, by
            the metric that selects checkpoints (rule of thumb: tuned by hand lose up to 6 %, ten times too low mostly 15 % and
            more).
        little_frac: the share from which on that is a failure (rule of thumb).
        fix_frac: a fix that gains less than this share of what lr* learned gains nothing (rule of thumb).
        far_ratio: where every lr up to this many times lr* and the baseline is stable, no unstable one is missing (rule of thumb).
        bracket_tolerance: width of the bracket around `lr.unstable` that is asked for.
        tail_frac: share of the steps that the objective averages (O1).
    """
    study = judged(record)
    table = study.sweep(tail_frac=tail_frac)
    own = study.config.get("peak_lr")
    baseline = float(own) if isinstance(own, (int, float)) else math.nan
    best = lr_best(table, own=baseline, noise_sds=noise_sds, loss_tolerance=loss_tolerance)
    fixed = fixed_step(study)
    if best is None or len(table.points) < 2 or fixed:
        return Diagnosis.of(study, [*_not_measured(study, table, fixed=fixed), nothing_learns(study, table)])
    bracket, short = unstable_bracket(table), study.role(Role.LR_RANGE).sweep(tail_frac=tail_frac)
    far = far_ratio * max(best.lr, baseline if math.isfinite(baseline) else 0.0)
    limits = {"noise_sds": noise_sds, "loss_tolerance": loss_tolerance, "material_frac": fix_frac}
    held = own_lr_findings(
        study, table, best, bracket, ratio=other_ratio, material_frac=material_frac, little_frac=little_frac
    )
    return Diagnosis.of(study, [
        _best(study, table, short, best, baseline),
        _grid_edge(study, table, best),
        _unstable(table, short, best, bracket, tolerance=bracket_tolerance, far=far, apart=other_ratio, length=length_of_runs(study.facts)),
        *held,
        _at_edge(study, table, best, bracket, edge_ratio=edge_ratio, limits=limits),
        _probabilistic(_with_proof(study, table), best, baseline, edge_ratio),
        nothing_learns(study, table, own=all(finding.status == "ok" for finding in held)),
    ])  # fmt: skip


_COLUMNS = (
    "lr", "loss", "loss_se", "above_best", "above_best_se", "seeds", "losses", "outcomes", "lasting", "unstable", "trials",
)  # fmt: skip


def _rows(table: SweepTable) -> list[dict[str, Any]]:
    """Return what a figure of the sweep needs, one row an lr."""
    state = {True: "diverged", False: "complete"}
    return [{n: getattr(p, n) for n in _COLUMNS} | {"state": state[math.isinf(p.loss)]} for p in table.points]


def _not_measured(study: JudgedStudy, table: SweepTable, *, fixed: bool) -> list[Finding]:
    reason = (
        "nearly every step is clipped, so the learning rate sets the length of every step; raise max_grad_norm first"
    )
    if fixed:
        pass
    elif len(table.points) < 2:
        some = "one learning rate was" if table.points else "no learning rate was"
        reason = f"{some} trained {length_of_runs(study.facts)}; a sweep needs at least two"
    elif all(math.isinf(p.loss) for p in table.points):
        reason = nothing_finite(study)
    else:
        reason = nothing_clear(table)
    evidence = {"points": _rows(table), "reason": reason, "loss_ref": table.loss_ref}
    return [CODES.not_measured(code, reason, evidence=evidence) for code in CODES if code != "lr.nothing_learns"]


def _cut_short(study: JudgedStudy, best: BestLR) -> bool:
    """Whether a budget ended the search while the best lr was the last one tried in its direction."""
    return best.border is not None and bool(study.facts.get("budget"))


def _best(study: JudgedStudy, table: SweepTable, short: SweepTable, best: BestLR, baseline: float) -> Finding:
    among = [p for p in table.points if best.low <= p.lr <= best.high]
    alike = [p.lr for p in among]
    mine = any(math.isclose(lr, baseline, rel_tol=1e-9) for lr in alike)
    if len(alike) > 1:
        apart = f"(within {max(0.01, 100 * max(p.above_best for p in among) / table.progress):.2g} % of what training gains)"
        how = (
            ("By training loss, ", f" train equally well {apart}; yours ({baseline:.4g}) is one of them")
            if mine
            else ("Lowest training loss: ", f", equally low {apart}; the safest of them is {best.lr:.4g}")
        )
        summary = f"{how[0]}{alike[0]:.4g} to {alike[-1]:.4g}{how[1]}"
        summary += differ_by_metric(study, table, among, baseline)
    else:
        summary = f"Lowest training loss: {f'yours ({baseline:.4g})' if mine else f'{best.lr:.4g}'}, within {best.low:.4g} to {best.high:.4g}"
    if _cut_short(study, best) and not (mine and len(alike) > 1):
        yours = ", yours" if math.isclose(best.lr, baseline, rel_tol=1e-9) else ""
        alone = sum(not p.unstable for p in table.points) == 1
        why = "the only stable one" if alone else "the lowest training loss"
        if best.lr != best.measured_lr:
            why = (
                f"the safest of those that train as well as {best.measured_lr:.4g}, which has the lowest training loss"
            )
        summary = f"Best known is {best.lr:.4g}{yours}: {why} of {_tried(table)} {length_of_runs(study.facts)}, after which the budget was spent"
        if short.best is not None:
            first = short.points[short.best].lr
            told = "it is also the best" if first == best.lr else f"{first:.4g} is the best"
            summary += f"; in runs of {short.total_steps:,} steps {told} of {_tried(short)}"
    note = " (coarse grid: more learning rates would narrow it)" if best.needs_refinement else ""
    return CODES.finding(
        "lr.best", "ok", f"{summary}{note}.", value=best.lr, unit="lr",
        evidence={
            "low": best.low, "high": best.high, "measured_lr": best.measured_lr, "tied": list(best.tied),
            "loss": best.point.loss, "loss_se": best.point.loss_se, "baseline_lr": baseline,
            "needs_refinement": best.needs_refinement, "next_lr": next(iter(refine_round(table, lanes=1)), None), "reason": best.reason,
            "noise_free": table.noise_free, "loss_ref": table.loss_ref, "total_steps": table.total_steps,
            "objective": "mean training loss of the last tenth of the steps", "points": _rows(table),
        },
    )  # fmt: skip


_NAMED = 5  # learning rates that a sentence names one by one (rule of thumb)


def _tried(table: SweepTable) -> str:
    lrs = [f"{point.lr:.4g}" for point in table.points]
    named = ", ".join(lrs) if len(lrs) <= _NAMED else f"{lrs[0]} to {lrs[-1]}"
    return " and ".join(lrs) if len(lrs) < 3 else f"the {len(lrs)} tried ({named})"


def _grid_edge(study: JudgedStudy, table: SweepTable, best: BestLR) -> Finding:
    low, high = table.points[0].lr, table.points[-1].lr
    open_end = "low" if best.low <= low * (1 + 1e-9) else None
    evidence = {"border": best.border or open_end, "lowest_lr": low, "highest_lr": high}
    found = partial(CODES.finding, "lr.grid_edge", evidence=evidence)
    if best.border is None and open_end:
        return found("ok", f"{low:.4g}, the lowest lr tried, trains as well as the best: smaller ones may, too.")
    if best.border is None:
        inside = f"lies inside the lrs tried ({low:.4g} to {high:.4g})"
        return found("ok", f"The lowest loss, at lr {best.measured_lr:.4g}, {inside}.")
    word, edge = ("smaller", "lowest") if best.border == "low" else ("larger", "highest")
    summary = f"The lowest loss is at the {edge} lr tried, {best.measured_lr:.4g}"
    found = partial(found, value=best.measured_lr, unit="lr")
    if _cut_short(study, best):
        return found("not_measured", f"{summary}, where the budget was spent: the best one may lie beyond it.")
    if study.facts.get("initial_critical_lr") is not None:
        where = f"as far as the sweep goes from the scale of the model ({low:.4g} to {high:.4g})"
        return found("ok", f"{summary}, {where}.")
    advice = [f"Extend the sweep to {word} learning rates."]
    return found("warn", f"{summary}: the best one may lie beyond it.", advice=advice)


def _unstable(
    table: SweepTable, short: SweepTable, best: BestLR, bracket: UnstableBracket | None, *, tolerance: float, far: float, apart: float, length: str
) -> Finding:  # fmt: skip
    calm = ("none", "not_measured")
    rising = [p.lr for p in table.points if p.lr > best.measured_lr and any(o not in calm for o in p.outcomes)]
    evidence: dict[str, Any] = {
        "first_rise_lr": min(rising, default=None), "total_steps": table.total_steps,
        "unseen_below": 2.0 / max(table.total_steps, 1),
    }  # fmt: skip
    found = partial(CODES.finding, "lr.unstable", unit="lr")
    if bracket is None:
        top = table.points[-1].lr
        summary = f"Stable at every learning rate up to {top:.4g}, over {table.total_steps:,} steps."
        if top >= far * (1 - 1e-9):
            return found("ok", summary, evidence=evidence)
        advice = [f"Try learning rates above {top:.4g}, with a larger budget, to find where training becomes unstable."]
        hint = unstable_bracket(short)
        if hint is not None and hint.middle > top:
            stable = "" if hint.lower is None else f"stable at {hint.lower:.4g} and "
            shorter = f"in runs of {short.total_steps:,} steps it is {stable}unstable at {hint.upper:.4g}"
            summary = f"{summary[:-1]}; {shorter}."
            evidence |= {"short_lower": hint.lower, "short_upper": hint.upper}
            advice = [f"Give a larger budget: no learning rate above {top:.4g} was tried {length}; {shorter}."]
        return found("not_measured", summary, evidence=evidence, advice=advice)
    evidence |= {
        "lower": bracket.lower, "upper": bracket.upper, "ratio": bracket.ratio,
        "stable_above": list(bracket.stable_above), "next_lr": next(iter(edge_round(table, lanes=1, tolerance=tolerance)), None),
        "seeds": {f"{p.lr:.6g}": f"{p.lasting} of {len(p.seeds)} lasting" for p in table.points if p.lasting},
    }  # fmt: skip
    above = ", ".join(f"{lr:.4g}" for lr in bracket.stable_above[:3])
    odd = f"; stable by chance at {above}{', ...' * (len(bracket.stable_above) > 3)}" if above else ""
    where = f"at {bracket.upper:.4g}, the smallest lr above the best one that was tried"
    if bracket.lower is not None:
        between = f"between {bracket.lower:.4g} and {bracket.upper:.4g}"
        where = f"from {bracket.middle:.4g} on ({between})"
        if bracket.ratio > apart * (1 + 1e-9):
            where = f"from somewhere {between} on; none between them was tried"
    summary = f"Unstable, without recovery, {where}{odd}."
    return found("ok", summary, value=bracket.middle, evidence=evidence)


def _at_edge(
    study: JudgedStudy,
    table: SweepTable,
    best: BestLR,
    bracket: UnstableBracket | None,
    *,
    edge_ratio: float,
    limits: Mapping[str, float],
) -> Finding:
    if bracket is None:
        top = table.points[-1].lr
        times = top / best.lr
        if times >= edge_ratio:
            said = f"No instability up to {top:.4g}, {times:.3g} times the best lr."
            return CODES.finding("lr.at_edge", "ok", said)
        said = f"no lr well above the best one, {best.lr:.4g}, was tried: {top:.4g} is the largest, and stable"
        return CODES.not_measured("lr.at_edge", said)
    ratio = bracket.middle / best.lr
    lowest = min(best.lr, *best.tied)  # who can train as well far below the edge need not go near it
    at_edge = bracket.middle / lowest <= edge_ratio
    fixes = judged_runs(study, ["fix"], above=bracket.middle)
    harmful = is_harmful(table, fixes, **limits)
    evidence = {
        "at_edge": at_edge, "lr_star": best.lr, "unstable_lr": bracket.middle, "harmful": harmful, "fix_trials": fixes,
        "points": _rows(table),
    }  # fmt: skip
    code, unit = "lr.at_edge", "lr.unstable / lr*"
    found = partial(CODES.finding, code, value=ratio, unit=unit, threshold=edge_ratio, evidence=evidence)
    if not at_edge:
        near = max(best.lr, *best.tied)
        start = f"Instability without recovery starts at lr {bracket.middle:.4g}, {bracket.middle / lowest:.3g} times {lowest:.4g}"
        beside = (
            f", and next to {near:.4g}, which has as low a training loss" if bracket.middle / near <= edge_ratio else ""
        )
        return found("ok", f"{start}{beside}.")
    words = [f"warmup over {f['warmup_steps']} steps" for f in fixes if f["warmup_steps"]]
    words += [f"clipping at {f['max_grad_norm']:.3g}" for f in fixes if f["max_grad_norm"] is not None]
    tried = " or ".join(dict.fromkeys(words)) or "a fix"
    where = (
        f"below {bracket.upper:.4g}"
        if bracket.lower is None
        else f"between {bracket.lower:.4g} and {bracket.upper:.4g}"
    )
    start = f"The best lr by training loss, {best.lr:.4g}, lies next to the unstable ones, which begin {where}"
    if harmful is False:
        return found("ok", f"{start}, but {tried} beyond it gains nothing that matters: harmless.")
    if harmful is None and "program" in study.facts:  # no run of it can be lengthened by a warmup
        return found("not_measured", f"{start}; whether a warmup makes larger ones worth it was not tried.")
    if harmful is None and study.facts.get("budget") and study.facts.get("fixes_planned"):
        return found(
            "not_measured",
            f"{start}; the budget was spent before a warmup or clipping could show whether that costs anything.",
        )
    end = (
        f", and {tried} lets a larger lr train better"
        if harmful
        else "; no fix run has shown whether that costs anything"
    )
    return found("warn", f"{start}{end}.", advice=advise("early"))


def _with_proof(study: JudgedStudy, table: SweepTable) -> list[LRPoint]:
    """Return the points of a sweep, each with the seeds of its proof, which are no part of the sweep."""
    proved = {v.curve.trial: v for v in study.verdicts(lambda c: c.stage == Role.PROOF and c.finished)}
    points = []
    for point in table.points:
        more = [proved[n] for n in trials_with(study, study.config | {"peak_lr": point.lr}) if n in proved]
        points.append(replace(
            point, seeds=(*point.seeds, *(v.curve.seed for v in more)), lasting=point.lasting + sum(v.is_lasting() for v in more),
            outcomes=(*point.outcomes, *(v.verdict.outcome for v in more)),
        ))  # fmt: skip
    return points


def _probabilistic(points: Sequence[LRPoint], best: BestLR, baseline: float, edge_ratio: float) -> Finding:
    found = partial(CODES.finding, "lr.probabilistic")
    repeated = [p for p in points if len(p.seeds) > 1]
    if not repeated:
        return found("ok", "Does not apply: every lr was run with one seed, so seeds cannot disagree.")
    disputed = [p for p in repeated if p.disputed]
    rows = [{"lr": p.lr, "lasting": p.lasting, "seeds": len(p.seeds), "outcomes": list(p.outcomes)} for p in disputed]
    found = partial(found, evidence={"disputed": rows, "repeated_lrs": [p.lr for p in repeated]})
    if not disputed:
        where = "the one lr that was" if len(repeated) == 1 else f"all {len(repeated)} lrs that were"
        return found("ok", f"All seeds agree on which learning rates are unstable, at {where} run more than once.")
    first = disputed[0]
    near = first.lr <= max(edge_ratio * best.lr, baseline * (1 + 1e-9))
    end = ": stability there is a matter of chance." if near else f", well above the best lr, {best.lr:.4g}."
    return found(
        "warn" if near else "ok",
        f"At lr {first.lr:.4g} {first.lasting} of {len(first.seeds)} seeds are unstable without recovery{end}",
        value=first.lr, unit="lr", advice=[f"Stay below {first.lr:.4g}, or run more seeds there."] if near else [],
    )  # fmt: skip
