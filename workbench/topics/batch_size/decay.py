"""`regularisation_finding`: does a large batch overfit more, and does more regularisation help it (F6.5, F6.6)?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from workbench.curves.judged import trials_with
from workbench.curves.selection import selected_by_seed
from workbench.curves.trials import RecordLike, memory_field
from workbench.findings.diagnosis import Finding
from workbench.record.read import periodic_rows
from workbench.topics.batch_size.arms import BatchArm, choosing_seeds

__all__ = ["regularisation_finding"]

CODE = "batch_size.regularisation"


def regularisation_finding(record: RecordLike, arms: Sequence[BatchArm], *, false_adoption: float = 0.1) -> Finding:
    """Return `batch_size.regularisation`: the gap between training and validation loss by batch size, and what a weight decay does.

    Args:
        record: a study of batch sizes; its facts hold "train_losses" of selected checkpoints.
        arms: of the study.
        false_adoption: a weight decay helps where its mean gain over fresh seeds, seed by seed, would come by chance less often
            than this (rule of thumb). Which one is tested was chosen under other seeds.
    """
    tuned = [arm for arm in arms if arm.best is not None]
    gaps = [row for arm in tuned if (row := _gap(record, arm)) is not None]
    tried: list[dict[str, Any]] = [
        {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "levels": levels}
        | _best(levels, arm.sign, false_adoption)
        for arm in tuned
        if (levels := _levels(record, arm))
    ]
    evidence: dict[str, Any] = {"gaps": gaps, "tried": tried, "false_adoption": false_adoption}
    sizes = [row["batch_size"] for row in gaps]
    if len(set(sizes)) < 2 or not tried or tried[-1]["batch_size"] != max(sizes):
        reason = "no weight decay was tried with the largest batch" if len(set(sizes)) > 1 else (
            "fewer than two batch sizes have a selected checkpoint whose training loss is known"
        )  # fmt: skip
        return Finding(
            code=CODE, status="not_measured", clause="F6.6", summary=f"Not measured: {reason}.", evidence=evidence
        )
    ends = [min(gaps, key=lambda r: r["batch_size"]), max(gaps, key=lambda r: r["batch_size"])]
    shown = " and ".join(f"{row['gap']:.3g} at batch size {row['batch_size']}" for row in ends)
    told = ". ".join(_told(row) for row in tried)
    large: Mapping[str, Any] = tried[-1]
    return Finding(
        code=CODE, status="warn" if large["helps"] else "ok", clause="F6.6", value=large["gain"], evidence=evidence,
        summary=f"Validation minus training loss is {shown}. {told}.",
        advice=[f"Regularise at batch size {large['batch_size']}: weight_decay={large['weight_decay']:g}."] if large["helps"] else [],
    )  # fmt: skip


def _best(levels: Sequence[Mapping[str, Any]], sign: float, false_adoption: float) -> dict[str, Any]:
    """Return the weight decay that the choosing seeds prefer, and whether it helps under the fresh ones."""
    best = min(levels, key=lambda row: sign * row["chosen_by"])
    return {
        "weight_decay": best["weight_decay"],
        "gain": best["gain"],
        "chance": best["chance"],
        "helps": best["gain"] > 0 and best["chance"] < false_adoption,
    }


def _told(row: Mapping[str, Any]) -> str:
    helps = "helps" if row["helps"] else "gains nothing that is not chance"
    by_chance = "below 0.1%" if row["chance"] < 1e-3 else f"{row['chance']:.1%}"
    return f"At {row['batch_size']}, a weight decay of {row['weight_decay']:g} {helps}: {row['gain']:+.3g} ({by_chance} by chance)"


def _chosen(record: RecordLike, arm: BatchArm) -> dict[str, Any]:
    memory = memory_field(record.config["optimizer"])
    assert arm.best is not None
    fields = {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "peak_lr": arm.best.lr}
    return fields | ({memory: arm.best.memory} if memory else {})


def _gap(record: RecordLike, arm: BatchArm) -> dict[str, Any] | None:
    """Return the mean gap of an arm's fresh seeds at their selected checkpoints, None where it is not known."""
    known: Mapping[str, float] = record.facts.get("train_losses") or {}
    fields = _chosen(record, arm) | {"weight_decay": record.config["weight_decay"]}
    numbers = [n for n in trials_with(record, fields) if str(n) in known]
    rows = record.trials.set_index("trial")
    evals = periodic_rows(record.evals)
    evals = evals[(evals["split"] == "validation") & (evals["metric"] == "loss")]
    gaps = []
    for number in numbers:
        at = evals[(evals["trial"] == number) & (evals["step"] == rows.loc[number, "best_step"])]["value"]
        if len(at):
            gaps.append(float(at.iloc[0]) - float(known[str(number)]))
    finite = [gap for gap in gaps if math.isfinite(gap)]
    if not finite:
        return None
    return {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "gap": float(np.mean(finite)), "gaps": finite}


def _levels(record: RecordLike, arm: BatchArm) -> list[dict[str, Any]]:
    """Return each weight decay that was tried with an arm as tuned: gain over none, seed by seed, and how likely it is chance."""
    own = float(record.config["weight_decay"])
    fields, choosing = _chosen(record, arm), set(choosing_seeds(record))
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
        found.append(
            {
                "weight_decay": decay,
                "chosen_by": float(np.mean(chose)),
                "gain": gain,
                "chance": chance,
                "seeds": len(fresh),
            }
        )
    return found
