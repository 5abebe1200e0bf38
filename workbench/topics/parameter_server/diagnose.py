"""`diagnose_parameter_server`: is the load even, is anything asked for too often, how old are gradients, and who keeps whom waiting (T13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from workbench.errors import UsageError
from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.parameter_server.server_bound import bound
from workbench.topics.parameter_server.server_load import hotspot, imbalance
from workbench.topics.parameter_server.server_throughput import saturation, server_throughput
from workbench.topics.parameter_server.staleness import staleness

__all__ = ["CODES", "diagnose_parameter_server"]

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
        reason = "Not measured: nothing was trained on parameter servers here; ParameterServerTrainer does."
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
    return Diagnosis(findings=findings, workload=record.workload, command=record.command, path=record.path)


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
