"""`diagnose_parameter_server`: is the load even, is anything asked for too often, how old are gradients, and who keeps whom waiting (T13)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from workbench.errors import UsageError
from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, Status
from workbench.parameter_server.context import PARTS
from workbench.parameter_server.training.work_time import closure_size
from workbench.record.json_values import number
from workbench.topics.parameter_server.server_load import (
    CODES,
    SPLIT,
    hotspot,
    imbalance,
    load_ratios,
    saturation,
    server_throughput,
)

WINDOW = 31  # updates over which the course of a curve is taken out before it is held against staleness (rule of thumb)


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
    found: Mapping[str, Any] = record.facts.get("parameter_server") or {}
    if trial is not None and str(trial) not in found:
        there = ", ".join(sorted(found, key=int)) or "none"
        raise UsageError(f"trial={trial!r} has no facts about parameter servers. Trials that have: {there}.")
    if not found:
        why = "nothing was trained on parameter servers here; wb.ps.Trainer does"
        return Diagnosis.of(record, [CODES.not_measured(code, why) for code in CODES])
    judged = min(map(int, found)) if trial is None else trial
    facts, rows = found[str(judged)], getattr(record, "steps", pd.DataFrame())
    if "trial" in rows:
        rows = rows[rows["trial"] == judged]
    bounded = bound(facts, least_work=least_work, balanced=imbalance_limit, min_updates=min_updates)
    findings = [
        imbalance(facts, limit=imbalance_limit, least_apply=least_apply),
        hotspot(facts, per_step=hot_requests, ratio_limit=hot_ratio),
        staleness(facts, rows, late=late, min_updates=min_updates, alpha=alpha),
        _with_saturation(bounded, record, gain),
    ]
    return Diagnosis.of(record, findings)


def histogram(facts: Mapping[str, Any]) -> dict[int, int]:
    """Return how many gradients were how many updates old when they were applied, over all servers, youngest first."""
    found: dict[int, int] = {}
    for server in facts.get("staleness_steps") or ():
        for lag, count in server.items():
            if math.isfinite(number(lag)) and math.isfinite(number(count)):
                found[int(float(lag))] = found.get(int(float(lag)), 0) + int(count)
    return dict(sorted(found.items()))


def staleness(facts: Mapping[str, Any], rows: pd.DataFrame, *, late: float, min_updates: int, alpha: float) -> Finding:
    """Return `ps.staleness`; `rows` are those of `.steps`, empty where there are none."""
    counts = histogram(facts)
    servers = max(1, sum(bool(server) for server in facts.get("staleness_steps") or ()))
    updates, workers = sum(counts.values()) // servers, int(facts.get("workers") or 0)
    if updates < min_updates or workers < 1:
        few = "no gradient was pushed" if not counts else f"{updates:,} updates are too few"
        return CODES.not_measured("ps.staleness", few)
    lags, weights = np.array(list(counts)), np.array(list(counts.values()))
    mean = float((lags * weights).sum() / weights.sum())
    p95 = float(lags[np.searchsorted(np.cumsum(weights), 0.95 * weights.sum())])
    others, limit = workers - 1, late * (workers - 1)
    by_worker, relations = _by_worker(rows), _relations(rows)
    evidence = {
        "histogram": {str(lag): count for lag, count in counts.items()}, "mean": mean, "p95": p95, "largest": int(lags.max()),
        "other_workers": others, "by_worker": by_worker, "mean_by_tenth": _by_tenth(rows), "relations": relations,
    }  # fmt: skip
    unit = "updates (95th percentile)"
    numbers: dict[str, Any] = {"value": p95, "unit": unit, "threshold": limit, "evidence": evidence}
    said = f"Gradients are {mean:.2g} updates old on average, {p95:.0f} at the 95th percentile, with {others} other worker{'s' * (others != 1)}"
    loss, seen = relations.get("loss"), ""
    if loss and math.isfinite(loss["p"]):
        seen = " No relation to the next loss is seen."
        if loss["p"] < alpha:
            side = "higher" if loss["rho"] > 0 else "lower"
            seen = f" The loss is {side} after staler updates (rank correlation {loss['rho']:.2f})."
    if p95 <= limit:
        return CODES.finding("ps.staleness", "ok", f"{said}.{seen}", **numbers)
    slow = max(by_worker, key=lambda row: row["mean"], default=None)
    who, first = "", "Make fewer updates per closure, or use fewer workers."
    if slow and slow["mean"] > limit:
        who = f" Worker {slow['worker']} makes {slow['share']:.0%} of the updates, {slow['mean']:.2g} updates late."
        first = "Find out why that worker is slow, or leave it out: its gradients belong to parameters of long ago."
    gentler = "Lower the learning rate or the momentum: a stale gradient acts like momentum, and both bring the edge of stability down."
    told = f"{said}: more than {late:g} times as many.{who}{seen}"
    return CODES.finding("ps.staleness", "warn", told, advice=(first, gentler), **numbers)


def _finite_rows(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Return the rows in which all of these columns are finite, by step; none where a column is missing."""
    kept = rows.reindex(columns=["step", *names]).astype(np.float64)
    return kept.replace([np.inf, -np.inf], np.nan).dropna().sort_values("step")


def _by_worker(rows: pd.DataFrame) -> list[dict[str, Any]]:
    late = _finite_rows(rows, "staleness_steps", "worker").groupby("worker")["staleness_steps"]
    means, counts = late.mean(), late.count()
    return [
        {"worker": int(k), "mean": float(mean), "share": float(count / counts.sum())}
        for k, mean, count in zip(means.index, means, counts, strict=True)
    ]


def _by_tenth(rows: pd.DataFrame) -> list[float]:
    """Return the mean over each tenth of the run: whether staleness falls into the warmup or behind it."""
    late = _finite_rows(rows, "staleness_steps")["staleness_steps"].to_numpy()
    return [float(part.mean()) for part in np.array_split(late, 10)] if len(late) >= 10 else []


def _relations(rows: pd.DataFrame, *, least: int = 100) -> dict[str, dict[str, float]]:
    """Return Spearman's rank correlation of an update's staleness with loss and gradient norm of the next update, course taken out."""
    found: dict[str, dict[str, float]] = {}
    for name in ("loss", "grad_norm"):
        kept = _finite_rows(rows, "staleness_steps", name)
        if len(kept) < least:
            continue
        kept = kept[kept[name] > 0]
        values = np.log(kept[name])
        left = (values - values.rolling(WINDOW, center=True, min_periods=1).median()).shift(-1)
        both = pd.DataFrame({"lag": kept["staleness_steps"], "left": left}).dropna()
        if len(both) >= least and (both.max() > both.min()).all():
            rho, p = stats.spearmanr(both["lag"], both["left"])
            found[name] = {"rho": float(rho), "p": float(p), "updates": len(both)}
    return found


def time_shares(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return what workers do with their time, as shares that add up to 1.

    Returns:
        compute, data_wait, pull, push, and idle: they have nothing to do, because the coordinator has not asked yet or they wait
        for the last of a stretch. NaN where it was not taken.
    """
    work, names = facts.get("work") or (), ("compute", "data_wait", "pull", "push")
    sums = {name: sum(number(mine.get(f"{name}_s")) for mine in work) if work else math.nan for name in names}
    whole = int(facts.get("workers") or 0) * number(facts.get("training_s"))
    if not whole > 0 or not all(math.isfinite(value) for value in sums.values()):
        return dict.fromkeys((*sums, "idle"), math.nan)
    whole = max(whole, sum(sums.values()))  # clocks of several processes
    return {name: value / whole for name, value in sums.items()} | {"idle": 1 - sum(sums.values()) / whole}


def bound(facts: Mapping[str, Any], *, least_work: float, balanced: float, min_updates: int) -> Finding:
    """Return `ps.bound`; up to a load of `balanced` times the mean, sharding would not help."""
    shares, updates = time_shares(facts), int(facts.get("updates") or 0)
    timed = math.isfinite(shares["idle"])
    if updates < min_updates or not timed:
        few = f"{updates:,} updates are too few"
        why = few if updates and timed else facts.get("time_missing") or "the workers' time was not measured"
        return replace(CODES.not_measured("ps.bound", why), clause="T13.1")
    work, served = shares["compute"] + shares["data_wait"], shares["pull"] + shares["push"]
    whole = int(facts["workers"]) * float(facts["training_s"])
    step_s = (1 - shares["idle"]) * whole / updates
    dispatch_s = shares["idle"] * whole / max(1, int(facts.get("closures_timed") or updates))
    spent = [(sum(number(mine[part]) for part in PARTS), number(mine.get("updates"))) for mine in facts["work"]]
    steps = [seconds / made for seconds, made in spent if made > 0]
    size = closure_size(dispatch_s, steps, round(updates / max(1, int(facts.get("stretches") or 1))))
    servers = facts.get("servers") or ()
    apply_s = sum(number(load.get("apply_s")) for load in servers)
    applied = apply_s / (served * whole) if served * whole > 0 else math.nan
    ratios = load_ratios(facts) if servers else {}
    head = f"Workers compute {shares['compute']:.0%} of their time, wait {shares['data_wait']:.0%} for data, {served:.0%} for servers, and {shares['idle']:.0%} for work"
    if work >= least_work:
        cause, said = "worker", f"{head}: computing takes most of the time."
        advice = ["More workers, on processors of their own, make more updates a second."]
        if shares["data_wait"] > shares["compute"]:
            advice = ["They wait for their data: see input.bound (`workbench input`)."]
    elif shares["idle"] >= served:
        cause = "coordinator"
        said = f"{head}: the coordinator keeps them waiting, {dispatch_s * 1e3:.2g} ms a closure, where an update takes {step_s * 1e3:.2g} ms."
        advice = [
            f'Make several updates in one closure: steps_per_closure={size}, or "auto" (T13.6, T13.7).',
            "Schedule functions without a return value (T13.8), and evaluate less often: at each evaluation everybody waits.",
        ]
    else:
        applying = f", {min(1.0, applied):.0%} of it applying gradients" if math.isfinite(applied) else ""
        cause, said = "server", f"{head}: the servers keep them waiting{applying}."
        advice = server_advice(ratios, applied, balanced)
    evidence = {
        "cause": cause, "shares": shares, "updates_per_s": updates / float(facts["training_s"]), "step_s": step_s,
        "dispatch_s": dispatch_s, "suggested_steps_per_closure": size, "apply_share_of_serving": applied, "imbalance": ratios,
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": work, "unit": "of the workers' time", "threshold": least_work}
    status: Status = "ok" if cause == "worker" else "warn"
    made = CODES.finding("ps.bound", status, said, advice=tuple(advice), evidence=evidence, **numbers)
    return made if cause == "coordinator" else replace(made, clause="T13.1")


def server_advice(ratios: Mapping[str, float], applied: float, balanced: float) -> list[str]:
    """Return what to try where servers keep workers waiting.

    Args:
        ratios: of `load_ratios`.
        applied: share of the serving in which gradients are applied; moving them takes the rest.
    """
    uneven = max((r for r in ratios.values() if math.isfinite(r)), default=1.0) > balanced
    return [
        f"Split large variables over the servers there are: {SPLIT}; see ps.imbalance (T13.2)."
        if uneven
        else "Use more servers: the load lies evenly on those there are.",
        "Move less: rows of an embedding alone (gather), a faster data plane, larger batches with fewer updates."
        if applied < 0.5
        else "Take an optimizer that does less for each gradient, or larger batches with fewer updates.",
    ]


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
    best = f"{rates.idxmax()} were the fastest" if flat is None else f"more than {flat} were not faster"
    said = f"{finding.summary} Timed with 1 to {table['workers'].max()} workers, {best}."
    seen = {
        "saturated_at_workers": flat,
        "updates_per_s_by_workers": {str(k): float(rate) for k, rate in rates.items()},
    }
    return replace(finding, summary=said, evidence={**finding.evidence, **seen})


def server_remedies(record: Audited) -> pd.DataFrame:
    """Return clause, remedy, measure, before and after of each remedy that was tried.

    Args:
        record: of `ParameterServerStudy`. Ratios are those of the busiest server over the mean.

    Source: T11.3, T13.2 to T13.8, T14.3.
    """
    runs, tried = record.facts.get("parameter_server_runs") or (), record.facts.get("parameter_server_remedies") or {}
    by_name = {row["name"]: row for row in runs}
    base = by_name.get(f"{max((row['workers'] for row in runs), default=0)} workers")
    rows: list[tuple[str, str, str, float, float]] = []

    def ratios(clause: str, remedy: str, measure: str, before: Any, *after: Any) -> None:
        worst = max(load_ratios(each)[measure] for each in after)
        rows.append((clause, remedy, f"{measure}, busiest server over mean", load_ratios(before)[measure], worst))

    def rate(name: str) -> float:
        return float(np.median([row["updates"] / row["training_s"] for row in runs if row["name"] == name]))

    if base and "sharded" in by_name:
        ratios("T13.2", "split variables over the servers", "bytes", base, by_name["sharded"])
    if lr := tried.get("lr"):
        planned = "lr from its schedule, no variable"
        facts = lr["before"], lr["after"]
        before, after = (float(at["servers"][0]["requests"]) / float(at["steps"] or math.nan) for at in facts)
        rows.append(("T13.3", planned, "requests to ps 0 a step", before, after))
        ratios("T13.3", planned, "requests", *facts)
    if words := tried.get("vocabulary"):
        ratios("T13.4", "shuffle the vocabulary (worst of the seeds)", "bytes", words["before"], *words["after"])
    for name in by_name:
        if base and name.endswith(" a closure"):
            clause, remedy = "T14.3" if name.startswith("auto") else "T13.7", name.replace(" a ", " updates a ")
            rows.append((clause, remedy, "updates per second", rate(base["name"]), rate(name)))
    if values := tried.get("return_values"):
        slow, fast = 1 / values["with_s"], 1 / values["without_s"]
        rows.append(("T11.3", "functions without a return value", "closures per second", slow, fast))
    return pd.DataFrame(rows, columns=["clause", "remedy", "measure", "before", "after"])
