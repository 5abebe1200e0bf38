"""`recommend`: the config to train with, adopted only where its selected checkpoints beat the baseline's (F3.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.config import TrainConfig, is_callable_name
from workbench.diagnostics.base import Diagnosis
from workbench.diagnostics.clip_ladder import masks
from workbench.diagnostics.clipped_runs import clipped_runs
from workbench.diagnostics.example_chance import MIN_EXAMPLES, example_chance
from workbench.diagnostics.judged_runs import judged_runs
from workbench.diagnostics.not_minimised import selects_by_loss, without_loss
from workbench.diagnostics.proof import prove
from workbench.diagnostics.same_config import equal, plain_cell, trials_with
from workbench.diagnostics.selection import compare_selected, selected
from workbench.diagnostics.trials import RecordLike

__all__ = [
    "CHANGEABLE",
    "REMEDIES",
    "REMEDY_FIELDS",
    "config_of",
    "cost_of",
    "recommend",
    "screen",
    "tried_remedies",
]

REMEDIES = ("fix", "warmup_full", "clipping")
"""Stages whose trials change something against instability, at full length."""

REMEDY_FIELDS = {"warmup": "warmup_steps", "clipping": "max_grad_norm"}
"""Advice that a study can try -> the config field that it changes."""

CHANGEABLE = ("peak_lr", "warmup_steps", "total_steps", "max_grad_norm")
"""What a candidate may change."""


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


def recommend(record: RecordLike, diagnosis: Diagnosis, *, false_adoption: float = 0.1) -> dict[str, Any]:
    """Return config, changed, paste, baseline, recommended, candidate, chosen, adopted, reason, proof and examples.

    The best candidate of `screen` is adopted where it wins over seeds (`prove`); where it was trained with a single seed, where
    it is better by more than its noise; in both cases only where other examples would hardly take the gain back
    (`example_chance`, as far as the two were compared example by example). What training with it gives, under the seed that
    chose it, is `chosen`. The config has the length of the workload's own; a study of shorter trials says so, because short
    runs prefer larger learning rates.

    Args:
        record: a study; its facts may hold "own_config", the workload's config at its own length.
        diagnosis: with `lr.best`.
        false_adoption: a gain that chance gives as often as this, by the seeds or by the examples, is none (rule of thumb).
    """
    fields = record.config
    own: dict[str, Any] = dict(record.facts.get("own_config") or fields)
    comparison = screen(record, diagnosis)
    changes: dict[str, Any] = {}
    if comparison["candidate"] is not None:
        chosen = comparison["recommended"]
        candidate = config_of(record, chosen["trials"][0])
        comparison["chosen"] = {"trial": chosen["trials"][0], str(fields["select"]): chosen[str(fields["select"])]}
        comparison["proof"] = proof = prove(
            record, baseline=fields, candidate=candidate, false_adoption=false_adoption, looks=2
        )
        if proof is not None:
            comparison |= {
                "baseline": selected(record, trials_with(record, fields, seeds=proof["seeds"])),
                "recommended": selected(record, trials_with(record, candidate, seeds=proof["seeds"])),
                "adopted": proof["wins"],
                "reason": f"Candidate: {comparison['candidate']}. {proof['reason']}",
            }
        comparison |= _held_by_examples(record, comparison, false_adoption)
        if comparison["adopted"]:
            changes = _changes(candidate, fields, own)
    elif without_loss(record) and selects_by_loss(record):
        comparison["reason"] = (
            "Not adopted: the loss is not to be minimised, and checkpoints are selected by it; name the metric that counts in select."
        )
    elif comparison["baseline"] and diagnosis["lr.best"].value is None and not without_loss(record):
        comparison["reason"] = (
            "Not adopted: no learning rate that was tried learned anything, so there is nothing to recommend."
        )
    if fields["total_steps"] < own["total_steps"]:
        comparison["reason"] += (
            f" Measured in {fields['total_steps']:,} steps where the workload trains {own['total_steps']:,}: the best lr of the "
            "whole run is likely lower."
        )
    return {"config": own | changes, "changed": sorted(changes), "paste": _paste(own, changes), **comparison}


def _held_by_examples(record: RecordLike, comparison: Mapping[str, Any], allowed: float) -> dict[str, Any]:
    """Return examples, and what follows: a gain that these examples may give by chance is refused."""
    proof = comparison["proof"]
    gain = comparison["gain"] if proof is None else min(arm["gain"] for arm in proof["arms"])
    found = example_chance(record, candidate=comparison["recommended"]["trials"], gain=gain)
    if found is None:
        return {"examples": None}
    if not comparison["adopted"] or (found["enough"] and found["chance"] < allowed):
        return {"examples": found | {"refused": False}}
    unadopted = comparison["reason"].split(" Adopted")[0]
    count = found["examples"]
    if found["enough"]:
        share = f"{found['chance']:.0%}, allowed are {allowed:.0%}"
        why = f"better on these {count} examples, and with others of the same kind that may be chance ({share})"
    else:
        why = f"{count} examples are too few to choose a config by; keep {MIN_EXAMPLES} or more for validation"
    return {
        "examples": found | {"refused": True},
        "adopted": False,
        "reason": f"{unadopted} Not adopted: {why}.",
    }


def screen(record: RecordLike, diagnosis: Diagnosis) -> dict[str, Any]:
    """Compare the baseline with everything that trained stably: lr*, and what was tried against instability.

    The baseline counts with all its seeds. A candidate's trials of a proof do not: they would pull the one that was chosen
    towards its mean, and another one, whose luck nobody tested, would take its place.

    Args:
        record: a study.
        diagnosis: with `lr.best`.

    Returns:
        What `compare_selected` does.
    """
    fields = record.config
    proved = set(record.trials["trial"][record.trials["stage"] == "proof"]) if len(record.trials) else set()

    def trained(config: Mapping[str, Any]) -> list[int]:
        return [number for number in trials_with(record, config) if number not in proved]

    candidates: dict[str, list[int]] = {}
    if without_loss(record):
        swept = record.trials["peak_lr"][record.trials["stage"] == "lr_sweep"].astype(float)
        lrs = {lr for lr in swept if not math.isclose(lr, fields["peak_lr"], rel_tol=1e-9)}
        if not selects_by_loss(record):
            candidates = {f"lr {lr:.4g}": trained(fields | {"peak_lr": lr}) for lr in sorted(lrs)}
        return compare_selected(record, baseline=trials_with(record, fields), candidates=candidates)
    lr = diagnosis["lr.best"].value
    if lr is not None and not math.isclose(lr, fields["peak_lr"], rel_tol=1e-9):
        candidates[f"lr {lr:.4g}"] = trained(fields | {"peak_lr": lr})
    own = plain_cell(fields["max_grad_norm"])
    disguised = _disguised(record, diagnosis)
    for run in judged_runs(record, REMEDIES):
        config = config_of(record, run["trial"])
        if run["trial"] in disguised and not equal(run["max_grad_norm"], own):
            continue
        if not run["lasting"] and all(equal(config[n], v) for n, v in fields.items() if n not in CHANGEABLE):
            candidates[_named(run)] = trained(config)
    return compare_selected(record, baseline=trials_with(record, fields), candidates=candidates)


def _disguised(record: RecordLike, diagnosis: Diagnosis, *, aggressive_frac: float = 0.5) -> set[int]:
    """Return the clipped runs that hide an lr which is too high, or are a smaller one in disguise (F4.11, F4.12)."""
    if "grad_norm" not in record.steps:
        return set()
    edge = diagnosis["lr.unstable"].value if "lr.unstable" in diagnosis else None
    return {
        row["trial"]
        for row in clipped_runs(record)
        if masks(row, edge) or (row["clip_frac"] is not None and row["clip_frac"] >= aggressive_frac)
    }


def tried_remedies(record: RecordLike) -> set[str]:
    """Return the names in `REMEDY_FIELDS` that some trial of a study changed at full length."""
    if not len(record.trials):
        return set()
    rows = record.trials[record.trials["stage"].isin(REMEDIES)]
    return {
        name
        for name, field in REMEDY_FIELDS.items()
        if field in rows and any(not equal(plain_cell(value), record.config[field]) for value in rows[field])
    }


def config_of(record: RecordLike, trial: int) -> dict[str, Any]:
    """Return the config that a trial was trained with, as plain values, its seeds those of the baseline."""
    row = record.trials[record.trials["trial"] == trial].iloc[0]
    config = {name: plain_cell(row[name]) for name in record.config}
    for name, value in record.config.items():
        if isinstance(value, int) and not isinstance(value, bool) and isinstance(config[name], float):
            config[name] = int(config[name])  # pandas may hold whole numbers as floats
    return config | {name: record.config[name] for name in ("shared_seed", "per_host_seed")}


def _named(run: Mapping[str, Any]) -> str:
    said = [f"lr {run['lr']:.4g}"]
    if run["warmup_steps"]:
        said.append(f"warmup {run['warmup_steps']}")
    if run["max_grad_norm"] is not None:
        said.append(f"clipping at {run['max_grad_norm']:.3g}")
    return ", ".join(said)


def _changes(candidate: Mapping[str, Any], fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a candidate changes, its warmup stretched to the workload's own length."""
    changes = {n: candidate[n] for n in CHANGEABLE if n != "total_steps" and not equal(candidate[n], fields[n])}
    if "warmup_steps" in changes:
        added = round((candidate["warmup_steps"] - fields["warmup_steps"]) * own["total_steps"] / fields["total_steps"])
        changes |= {"warmup_steps": own["warmup_steps"] + added, "total_steps": own["total_steps"] + added}
    return changes


def _paste(own: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    if any(is_callable_name(own[name]) for name in ("optimizer", "schedule")):
        shown = "".join(f"    {name}={value!r},\n" for name, value in changes.items())
        return f"workload.config.replace(\n{shown})" if changes else "workload.config"
    return TrainConfig.from_dict(dict(own)).paste(**changes)
