"""`diagnose_parameter_server`: is the load even, is anything asked for too often, how old are gradients, and who keeps whom waiting (T13)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import UsageError
from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.parameter_server.trials.closure_size import closure_size
from workbench.record.json_values import number
from workbench.topics.parameter_server.server_load import (
    hotspot,
    imbalance,
    load_ratios,
    saturation,
    server_load,
    server_throughput,
    staleness,
)


def server_remedies(record: Audited) -> pd.DataFrame:
    """Return clause, remedy, measure, before and after of each remedy that was tried.

    Args:
        record: of `ParameterServerStudy`. Ratios are those of the busiest server over the mean.

    Source: T11.3, T13.2 to T13.8, T14.3.
    """
    runs, tried = record.facts.get("parameter_server_runs") or (), record.facts.get("parameter_server_remedies") or {}
    by_name = {row["name"]: row for row in runs}
    most = max((row["workers"] for row in runs), default=0)
    base = by_name.get(f"{most} workers")
    rows: list[tuple[str, str, str, float, float]] = []
    if base and "sharded" in by_name:
        rows.append(
            (
                "T13.2",
                "split variables over the servers",
                "bytes, busiest server over mean",
                _ratio(base),
                _ratio(by_name["sharded"]),
            )
        )
    lr, words, values = tried.get("lr"), tried.get("vocabulary"), tried.get("return_values")
    if lr:
        rows.append(
            (
                "T13.3",
                "lr from its schedule, no variable",
                "requests to ps 0 a step",
                _asked(lr["before"]),
                _asked(lr["after"]),
            )
        )
        rows.append(
            (
                "T13.3",
                "lr from its schedule, no variable",
                "requests, busiest server over mean",
                _ratio(lr["before"], "requests"),
                _ratio(lr["after"], "requests"),
            )
        )
    if words:
        after = max(_ratio(each) for each in words["after"])
        rows.append(
            (
                "T13.4",
                "shuffle the vocabulary (worst of the seeds)",
                "bytes, busiest server over mean",
                _ratio(words["before"]),
                after,
            )
        )
    sizes = [(name, row) for name, row in by_name.items() if name.endswith("a closure")]
    if base:
        rows += [
            (
                "T14.3" if name.startswith("auto") else "T13.7",
                f"{name.removesuffix(' a closure')} updates a closure",
                "updates per second",
                _rate(runs, base["name"]),
                _rate(runs, name),
            )
            for name, _ in sizes
        ]
    if values:
        rows.append(
            (
                "T11.3",
                "functions without a return value",
                "closures per second",
                1 / values["with_s"],
                1 / values["without_s"],
            )
        )
    return pd.DataFrame(rows, columns=["clause", "remedy", "measure", "before", "after"])


def _ratio(facts: Mapping[str, Any], measure: str = "bytes") -> float:
    return load_ratios(server_load(facts), len(facts["servers"]))[measure]


def _asked(facts: Mapping[str, Any]) -> float:
    return float(facts["servers"][0]["requests"]) / float(facts["steps"] or math.nan)


def _rate(runs: Any, name: str) -> float:
    return float(np.median([row["updates"] / row["training_s"] for row in runs if row["name"] == name]))


_CLAUSES = {"coordinator": "T13.5", "worker": "T13.1", "server": "T13.1"}


def time_shares(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return what workers do with their time, as shares that add up to 1.

    Returns:
        compute, data_wait, pull, push, and idle: they have nothing to do, because the coordinator has not asked yet or they wait
        for the last of a stretch. NaN where it was not taken.
    """
    work, training_s, workers = (
        facts.get("work") or (),
        number(facts.get("training_s")),
        int(facts.get("workers") or 0),
    )
    whole = workers * training_s
    sums = {
        name: sum(number(mine.get(f"{name}_s")) for mine in work) if work else math.nan
        for name in ("compute", "data_wait", "pull", "push")
    }
    if not whole > 0 or not all(math.isfinite(value) for value in sums.values()):
        return dict.fromkeys((*sums, "idle"), math.nan)
    whole = max(whole, sum(sums.values()))  # clocks of several processes
    return {name: value / whole for name, value in sums.items()} | {"idle": 1 - sum(sums.values()) / whole}


def bound(facts: Mapping[str, Any], *, least_work: float, balanced: float, min_updates: int) -> Finding:
    """Return `ps.bound`.

    Args:
        least_work: share of the workers' time below which they compute too little.
        balanced: load of the busiest server over the mean up to which sharding would not help.
        min_updates: below which nothing is said.
    """
    code, unit = "ps.bound", "of the workers' time"
    shares, updates = time_shares(facts), int(facts.get("updates") or 0)
    if updates < min_updates or not math.isfinite(shares["idle"]):
        why = (
            f"{updates:,} updates are too few"
            if updates and math.isfinite(shares["idle"])
            else facts.get("time_missing") or "nobody took the workers' time"
        )
        return Finding(code=code, status="not_measured", clause="T13.1", summary=f"Not measured: {why}.")
    work, served = shares["compute"] + shares["data_wait"], shares["pull"] + shares["push"]
    cause = "worker" if work >= least_work else "coordinator" if shares["idle"] >= served else "server"
    whole = int(facts["workers"]) * float(facts["training_s"])
    step_s = (1 - shares["idle"]) * whole / updates
    dispatch_s = shares["idle"] * whole / max(1, int(facts.get("closures_timed") or updates))
    stretch = updates / max(1, int(facts.get("stretches") or 1))
    size = closure_size(dispatch_s, _steps(facts), round(stretch))
    apply_s = sum(number(load.get("apply_s")) for load in facts.get("servers") or ())
    applied = apply_s / (served * whole) if served * whole > 0 else math.nan
    ratios = load_ratios(server_load(facts), len(facts.get("servers") or ())) if facts.get("servers") else {}
    evidence = {
        "cause": cause, "shares": shares, "updates_per_s": updates / float(facts["training_s"]), "step_s": step_s,
        "dispatch_s": dispatch_s, "suggested_steps_per_closure": size, "apply_share_of_serving": applied, "imbalance": ratios,
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": work, "unit": unit, "threshold": least_work, "evidence": evidence}
    head = f"Workers compute {shares['compute']:.0%} of their time, wait {shares['data_wait']:.0%} for data, {served:.0%} for servers, and {shares['idle']:.0%} for work"
    if cause == "worker":
        return Finding(
            code=code, status="ok", clause=_CLAUSES[cause], summary=f"{head}: what they do themselves takes the time.",
            advice=_for_workers(shares), **numbers,
        )  # fmt: skip
    if cause == "coordinator":
        return Finding(
            code=code, status="warn", clause=_CLAUSES[cause],
            summary=f"{head}: the coordinator keeps them waiting, {dispatch_s * 1e3:.2g} ms a closure, where an update takes {step_s * 1e3:.2g} ms.",
            advice=(
                f'Make several updates in one closure: steps_per_closure={size}, or "auto" (T13.6, T13.7).',
                "Schedule functions without a return value (T13.8), and evaluate less often: at each evaluation everybody waits.",
            ),
            **numbers,
        )  # fmt: skip
    return Finding(
        code=code, status="warn", clause=_CLAUSES[cause], advice=_for_servers(ratios, applied, balanced),
        summary=f"{head}: the servers keep them waiting" + (f", {min(1.0, applied):.0%} of it applying gradients." if math.isfinite(applied) else "."),
        **numbers,
    )  # fmt: skip


def _steps(facts: Mapping[str, Any]) -> list[float]:
    """Return the mean time of an update on each worker that made one."""
    spent = [
        (
            sum(number(mine[f"{name}_s"]) for name in ("compute", "data_wait", "pull", "push")),
            number(mine.get("updates")),
        )
        for mine in facts["work"]
    ]
    return [seconds / updates for seconds, updates in spent if updates > 0]


def _for_workers(shares: Mapping[str, float]) -> tuple[str, ...]:
    if shares["data_wait"] > shares["compute"]:
        return ("They wait for their data: see input.bound (`workbench input`).",)
    return ("More workers, on processors of their own, make more updates a second.",)


def _for_servers(ratios: Mapping[str, float], applied: float, balanced: float) -> tuple[str, ...]:
    uneven = max((r for r in ratios.values() if math.isfinite(r)), default=1.0) > balanced
    first = (
        "Split large variables over the servers there are: variable_partitioner=FixedShardsPartitioner(number of servers); see "
        "ps.imbalance (T13.2)."
        if uneven
        else "Use more servers: the load lies evenly on those there are."
    )
    if applied < 0.5:  # moving, not applying
        return (
            first,
            "Move less: rows of an embedding alone (gather), a faster data plane, larger batches with fewer updates.",
        )
    return first, "Take an optimizer that does less for each gradient, or larger batches with fewer updates."


CODES = {"ps.imbalance": "T13.1", "ps.hotspot": "T13.3", "ps.staleness": "T1.2", "ps.bound": "T13.5"}
"""Each code with its clause, in the order in which they are emitted."""


def diagnose_parameter_server(
    record: Audited,
    *,
    trial: int | None = None,
    imbalance_limit: float = 1.2,
    least_apply: float = 0.05,
    hot_requests: float = 0.5,
    hot_ratio: float = 1.1,
    late: float = 2.0,
    least_work: float = 0.5,
    alpha: float = 0.01,
    gain: float = 1.1,
    min_updates: int = 30,
) -> Diagnosis:
    """Judge one trial on parameter servers.

    Args:
        record: of `ParameterServerTrainer`, of a study that had it as its trainer, or of `audit_parameter_server`; its facts hold
            "parameter_server".
        trial: which one; None is the first that has such facts.
        imbalance_limit: load of the busiest server over the mean of all (rule of thumb).
        least_apply: share of the training's time that servers must spend on applying gradients, for that time to be compared
            between servers (rule of thumb: below it is noise).
        hot_requests: requests a step from which a variable on one server is asked for all the time (rule of thumb: every second
            step).
        hot_ratio: requests to its server over the mean of all servers, for that to matter (rule of thumb).
        late: 95th percentile of the staleness over the number of other workers. Workers of one speed that never rest have a mean
            of 1 (rule of thumb).
        least_work: share of their time that workers should compute or wait for their own data (rule of thumb: half).
        alpha: chance of calling noise a relation between staleness and loss.
        gain: times as fast, for more workers to count as a help, where numbers of workers were timed (rule of thumb).
        min_updates: below which neither staleness nor time is judged (rule of thumb).

    Returns:
        `ps.imbalance`, `ps.hotspot`, `ps.staleness` and `ps.bound`, once each. The evidence of `ps.bound` has its "cause":
        coordinator, worker or server; of `ParameterServerStudy` also where more workers stop helping (T1.3).

    Raises:
        UsageError: there is no such trial.

    Source: T1.2, T13.1 to T13.8.
    """
    found = record.facts.get("parameter_server") or {}
    facts = _facts(found, trial)
    if facts is None:
        reason = "Not measured: nothing was trained on parameter servers here; wb.ps.Trainer does."
        findings: tuple[Finding, ...] = tuple(
            Finding(code=code, status="not_measured", summary=reason, clause=clause) for code, clause in CODES.items()
        )
    else:
        number, values = facts
        findings = (
            imbalance(values, limit=imbalance_limit, least_apply=least_apply),
            hotspot(values, per_step=hot_requests, ratio_limit=hot_ratio),
            staleness(values, _rows(record, number), late=late, min_updates=min_updates, alpha=alpha),
            _with_saturation(
                bound(values, least_work=least_work, balanced=imbalance_limit, min_updates=min_updates), record, gain
            ),
        )
    return Diagnosis.of(record, findings)


def _facts(found: Mapping[str, Any], trial: int | None) -> tuple[int, Mapping[str, Any]] | None:
    """Return number and facts of the trial to judge; None where there are none at all."""
    if trial is not None and str(trial) not in found:
        there = ", ".join(sorted(found, key=int)) or "none"
        raise UsageError(f"trial={trial!r} has no facts about parameter servers. Trials that have: {there}.")
    if not found:
        return None
    number = min(map(int, found)) if trial is None else trial
    return number, found[str(number)]


def _with_saturation(finding: Finding, record: Audited, gain: float) -> Finding:
    """Add where more workers stop helping, of the runs that were timed with one update a closure."""
    if finding.status == "not_measured" or not record.facts.get("parameter_server_runs"):
        return finding
    table = server_throughput(record)
    table = table[(table["steps_per_closure"] == "1") & (table["name"] != "sharded")]
    if table["workers"].nunique() < 2:
        return finding
    flat = saturation(table["workers"], table["updates_per_s"], gain=gain)
    rates = table.groupby("workers")["updates_per_s"].median()
    said = f" Timed with 1 to {table['workers'].max()} workers, "
    said += f"{rates.idxmax()} were the fastest." if flat is None else f"more than {flat} were not faster."
    evidence = {
        **finding.evidence,
        "saturated_at_workers": flat,
        "updates_per_s_by_workers": {str(workers): float(rate) for workers, rate in rates.items()},
    }
    return replace(finding, summary=finding.summary + said, evidence=evidence)


def _rows(record: Audited, trial: int) -> pd.DataFrame | None:
    """Return the trial's rows of `.steps`, None where the record has no frames."""
    steps = getattr(record, "steps", None)
    if not isinstance(steps, pd.DataFrame) or "trial" not in steps:
        return None
    return steps[steps["trial"] == trial]
