"""`batch_size.noise_scale` and `batch_size.regularisation`: how large a batch should be, and whether a large one overfits (F6.5, F6.6)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from workbench.curves.judged import trials_with
from workbench.curves.selection import selected_by_seed
from workbench.curves.trial_curves import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.record.read import periodic_rows
from workbench.topics.batch_size.arms import BatchArm, choosing_seeds
from workbench.topics.optimizers.replaced import replaced

SIZE_CODES = CODES = Codes({"batch_size.noise_scale": "F6.5", "batch_size.regularisation": "F6.6"})


def diagnose_noise_scale(record: RecordLike) -> Diagnosis:
    """Return the one code `batch_size.noise_scale` of any study that has measured it."""
    return Diagnosis.of(record, [noise_scale_finding(record)])


def noise_scale_finding(record: RecordLike) -> Finding:
    """Return `batch_size.noise_scale`: the predicted critical batch size, in examples.

    At a batch of the noise scale, a run needs about twice as many examples as with small batches and twice as many steps as with
    large ones. The value is the median over the moments of training that were measured.

    Source: McCandlish et al. 2018 (arXiv:1812.06162).
    """
    code, facts = "batch_size.noise_scale", record.facts
    rows, found = list(facts.get("noise_scale") or ()), partial(CODES.finding, code)
    if (facts.get("evaluation") or {}).get("coupled"):
        return found(
            "ok",
            "Does not apply: the loss couples the examples of a batch, so that batches of another size have another loss.",
        )
    if not rows:
        return found("not_measured", why_missing(facts, "noise_scale", "the noise scale was not measured"))
    own = int(record.config["batch_size"])
    # JSON holds infinities as words
    moments = [(int(r["step"]), *(math.nan if r[k] is None else float(r[k]) for k in ("value", "low"))) for r in rows]
    known = any(math.isfinite(value) for _, value, _ in moments)
    value = float(np.median([value if math.isfinite(value) else low for _, value, low in moments]))
    shown = f"{'about' if known else 'at least'} {value:,.3g} examples"
    span = ", ".join(
        f"{f'{value:,.3g}' if math.isfinite(value) else f'at least {low:,.3g}'} at step {step:,}"
        for step, value, low in ([moments[0], moments[-1]] if len(moments) > 1 else moments)
    )
    evidence = {"rows": rows, "batch_size": own} | ({} if known else {"at_least": value})
    found = partial(found, value=value if known else None, unit="examples")
    cost = next(iter(replaced(record).get(code, ())), None)
    if cost is not None and cost.costs:
        larger = f"Train with larger batches, {cost.usual:g} for a start"
        advice = [f"{larger}; where memory is short, accumulate_steps splits them."]
        summary = f"Gradients of {own} examples drown in their noise, whose scale is {shown} ({span}): {cost.words}."
        return found("warn", summary, advice=advice, evidence=evidence | {"replaced": cost.to_dict()})
    means = f"{own} is near where steps and examples cost alike"
    if not known:
        means = "the mean gradient drowns in its noise"
    elif value > 2 * own:
        means = f"batches larger than {own} should save steps"
    elif value < own / 2:
        means = f"batches smaller than {own} should need fewer examples and hardly more steps"
    return found("ok", f"The gradient noise scale is {shown} ({span}): {means}.", evidence=evidence)


def regularisation_finding(record: RecordLike, arms: Sequence[BatchArm], *, false_adoption: float = 0.1) -> Finding:
    """Return `batch_size.regularisation`: the gap between training and validation loss by batch size, and what a weight decay does.

    A weight decay helps where its mean gain over fresh seeds, seed by seed, would come by chance less often than
    `false_adoption` (rule of thumb). Which one is tested was chosen under other seeds.
    """
    code, tuned = "batch_size.regularisation", [arm for arm in arms if arm.best is not None]
    gaps = [row for arm in tuned if (row := _gap(record, arm)) is not None]
    tried: list[dict[str, Any]] = []
    for arm in tuned:
        if levels := _levels(record, arm):
            best = min(levels, key=lambda row: arm.sign * row["chosen_by"])
            helps = best["gain"] > 0 and best["chance"] < false_adoption
            arm_of = {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "levels": levels}
            tried.append(arm_of | {name: best[name] for name in ("weight_decay", "gain", "chance")} | {"helps": helps})
    evidence: dict[str, Any] = {"gaps": gaps, "tried": tried, "false_adoption": false_adoption}
    sizes = [row["batch_size"] for row in gaps]
    if len(set(sizes)) < 2:
        reason = "fewer than two batch sizes have a selected checkpoint whose training loss is known"
        return CODES.not_measured(code, reason, evidence=evidence)
    if not tried or tried[-1]["batch_size"] != max(sizes):
        return CODES.not_measured(code, "no weight decay was tried with the largest batch", evidence=evidence)
    ends = [min(gaps, key=lambda r: r["batch_size"]), max(gaps, key=lambda r: r["batch_size"])]
    shown = " and ".join(f"{row['gap']:.3g} at batch size {row['batch_size']}" for row in ends)
    large, summary = tried[-1], f"Validation minus training loss is {shown}. {'. '.join(map(_told, tried))}."
    advice = [f"Regularise at batch size {large['batch_size']}: weight_decay={large['weight_decay']:g}."] if large["helps"] else []
    status: Status = "warn" if large["helps"] else "ok"
    return CODES.finding(code, status, summary, value=large["gain"], evidence=evidence, advice=advice)


def _told(row: Mapping[str, Any]) -> str:
    helps = "helps" if row["helps"] else "gains nothing that is not chance"
    by_chance = "below 0.1%" if row["chance"] < 1e-3 else f"{row['chance']:.1%}"
    return f"At {row['batch_size']}, a weight decay of {row['weight_decay']:g} {helps}: {row['gain']:+.3g} ({by_chance} by chance)"


def _gap(record: RecordLike, arm: BatchArm) -> dict[str, Any] | None:
    """Return the mean gap of an arm's fresh seeds at their selected checkpoints, None where it is not known."""
    known: Mapping[str, float] = record.facts.get("train_losses") or {}
    fields = arm.settings(record.config) | {"weight_decay": record.config["weight_decay"]}
    best, evals = record.trials.set_index("trial")["best_step"], periodic_rows(record.evals)
    evals = evals[(evals["split"] == "validation") & (evals["metric"] == "loss")]
    gaps = []
    for number in trials_with(record, fields):
        at = evals[(evals["trial"] == number) & (evals["step"] == best[number])]["value"]
        if str(number) in known and len(at):
            gaps.append(float(at.iloc[0]) - float(known[str(number)]))
    finite = [gap for gap in gaps if math.isfinite(gap)]
    if not finite:
        return None
    return {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "gap": float(np.mean(finite)), "gaps": finite}


def _levels(record: RecordLike, arm: BatchArm) -> list[dict[str, Any]]:
    """Return each weight decay that was tried with an arm as tuned: gain over none, seed by seed, and how likely it is chance."""
    own = float(record.config["weight_decay"])
    fields, choosing = arm.settings(record.config), set(choosing_seeds(record))
    before = selected_by_seed(record, trials_with(record, fields | {"weight_decay": own}))
    found = []
    for decay in sorted({float(v) for v in record.trials["weight_decay"]} - {own}):
        after = selected_by_seed(record, trials_with(record, fields | {"weight_decay": decay}))
        fresh = sorted((set(before) & set(after)) - choosing)
        chose = [after[seed] for seed in choosing if seed in after]
        if not chose or len(fresh) < 2:
            continue
        gains = np.array([arm.sign * (before[s] - after[s]) for s in fresh])
        gain, se = float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))
        chance = float(stats.t.sf(gain / se, len(gains) - 1)) if se > 0 else float(gain <= 0)
        numbers = {"chosen_by": float(np.mean(chose)), "gain": gain, "chance": chance, "seeds": len(fresh)}
        found.append({"weight_decay": decay} | numbers)
    return found
