"""`recommend`: the config to train with, adopted only where its selected checkpoint beats the baseline's (F3.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.config import TrainConfig, is_callable_name
from workbench.diagnostics.base import Diagnosis
from workbench.diagnostics.selection import compare_selected
from workbench.diagnostics.trials import RecordLike

__all__ = ["cost_of", "recommend"]

_CHANGEABLE = ("peak_lr", "warmup_steps", "total_steps", "max_grad_norm")


def cost_of(record: RecordLike) -> dict[str, Any]:
    """Return steps, seconds and trials of a study, and its seconds over those of one baseline run."""
    trials = record.trials
    if not len(trials):
        return {"steps": 0, "seconds": 0.0, "trials": 0, "baseline_runs": None}
    alone = trials["seconds"][trials["stage"] == "baseline"].to_list()
    seconds = float(trials["seconds"].sum())
    return {
        "steps": int(trials["steps_run"].sum()),
        "seconds": seconds,
        "trials": len(trials),
        "baseline_runs": seconds / alone[0] if alone and alone[0] > 0 else None,
    }


def recommend(record: RecordLike, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return config, changed, paste, baseline, recommended, candidate, adopted and reason.

    Candidates are lr* and, where the best lr sits at a harmful edge, the fix runs that did not stay unstable. The config
    has the length of the workload's own; a study of shorter trials says so, because short runs prefer larger learning
    rates.

    Args:
        record: a study; its facts may hold "own_config", the workload's config at its own length.
        diagnosis: with `lr.best` and `lr.at_edge`.
    """
    fields = record.config
    own: dict[str, Any] = dict(record.facts.get("own_config") or fields)
    candidates: dict[str, list[int]] = {}
    lr = diagnosis["lr.best"].value
    if lr is not None and not math.isclose(lr, fields["peak_lr"], rel_tol=1e-9):
        candidates[f"lr {lr:.4g}"] = _trials_with(record, fields | {"peak_lr": lr})
    edge = diagnosis["lr.at_edge"].evidence
    for fix in edge.get("fix_trials", ()) if edge.get("harmful") else ():
        if not fix["lasting"]:
            candidates[f"fix run {fix['trial']}, lr {fix['lr']:.4g}"] = [fix["trial"]]
    comparison = compare_selected(record, baseline=_trials_with(record, fields), candidates=candidates)
    changes: dict[str, Any] = {}
    if comparison["adopted"]:
        changes = _changes(record, comparison["recommended"]["trials"][0], fields, own)
    if fields["total_steps"] < own["total_steps"]:
        comparison["reason"] += (
            f" Measured in {fields['total_steps']:,} steps where the workload trains {own['total_steps']:,}: the best lr of the "
            "whole run is likely lower."
        )
    return {"config": own | changes, "changed": sorted(changes), "paste": _paste(own, changes), **comparison}


def _changes(record: RecordLike, trial: int, fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trial changed, its warmup stretched to the workload's own length."""
    row = record.trials[record.trials["trial"] == trial].iloc[0]
    stored = {name: _plain(row[name]) for name in _CHANGEABLE}
    stored |= {name: int(stored[name]) for name in ("warmup_steps", "total_steps")}  # pandas may hold them as floats
    changes = {n: v for n, v in stored.items() if n != "total_steps" and not _equal(v, fields[n])}
    if "warmup_steps" in changes:
        added = round((stored["warmup_steps"] - fields["warmup_steps"]) * own["total_steps"] / fields["total_steps"])
        changes |= {"warmup_steps": own["warmup_steps"] + added, "total_steps": own["total_steps"] + added}
    return changes


def _paste(own: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    if any(is_callable_name(own[name]) for name in ("optimizer", "schedule")):
        shown = "".join(f"    {name}={value!r},\n" for name, value in changes.items())
        return f"workload.config.replace(\n{shown})" if changes else "workload.config"
    return TrainConfig.from_dict(dict(own)).paste(**changes)


def _trials_with(record: RecordLike, fields: Mapping[str, Any]) -> list[int]:
    """Return the trials that were trained with these config fields, under any seed."""
    if not len(record.trials):
        return []
    wanted = {name: value for name, value in fields.items() if name not in ("shared_seed", "per_host_seed")}
    rows = record.trials.to_dict("records")
    return [int(row["trial"]) for row in rows if all(_equal(_plain(row[n]), v) for n, v in wanted.items())]


def _plain(value: Any) -> Any:
    """Return a cell of a frame as the config had it: pandas writes None as NaN."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
