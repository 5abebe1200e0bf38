"""Load, staleness and throughput of parameter servers: who does how much, and which variable carries it (T1.3, T13.1 to T13.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from workbench.findings.audited import Audited
from workbench.findings.finding import Finding
from workbench.record.json_values import number

WINDOW = 31
"""Updates over which the course of a curve is taken out before it is held against staleness (rule of thumb)."""


def histogram(facts: Mapping[str, Any]) -> dict[int, int]:
    """Return how many gradients were how many updates old when they were applied, over all servers, youngest first."""
    found: dict[int, int] = {}
    for server in facts.get("staleness_steps") or ():
        for lag, count in server.items():
            if count is not None and np.isfinite(float(lag)) and np.isfinite(count):
                found[int(float(lag))] = found.get(int(float(lag)), 0) + int(count)
    return dict(sorted(found.items()))


def staleness(
    facts: Mapping[str, Any], rows: pd.DataFrame | None, *, late: float, min_updates: int, alpha: float
) -> Finding:
    """Return `ps.staleness`.

    Args:
        rows: its rows of `.steps`; None where there are none.
        late: 95th percentile of the staleness over the number of the other workers.
        min_updates: below which nothing is said.
        alpha: chance that a relation between staleness and loss is called one where there is none.
    """
    code, clause, unit = "ps.staleness", "T1.2", "updates (95th percentile)"
    counts = histogram(facts)
    servers = max(1, sum(bool(server) for server in facts.get("staleness_steps") or ()))
    updates, workers = sum(counts.values()) // servers, int(facts.get("workers") or 0)
    if updates < min_updates or workers < 1:
        why = "no gradient was pushed" if not counts else f"{updates:,} updates are too few"
        return Finding(code=code, status="not_measured", clause=clause, summary=f"Not measured: {why}.")
    lags, weights = np.array(list(counts)), np.array(list(counts.values()))
    mean = float((lags * weights).sum() / weights.sum())
    p95 = float(lags[np.searchsorted(np.cumsum(weights), 0.95 * weights.sum())])
    others, limit = workers - 1, late * (workers - 1)
    by_worker = _by_worker(rows)
    relations = _relations(rows)
    evidence = {
        "histogram": {str(lag): count for lag, count in counts.items()}, "mean": mean, "p95": p95, "largest": int(lags.max()),
        "other_workers": others, "by_worker": by_worker, "mean_by_tenth": _by_tenth(rows), "relations": relations,
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": p95, "unit": unit, "threshold": limit, "evidence": evidence}
    said = f"Gradients are {mean:.2g} updates old on average, {p95:.0f} at the 95th percentile, with {others} other worker{'s' * (others != 1)}"
    seen = _told(relations, alpha)
    if p95 <= limit:
        return Finding(code=code, status="ok", clause=clause, summary=f"{said}.{seen}", **numbers)
    slow = max(by_worker, key=lambda row: row["mean"], default=None)
    who = ""
    if slow and slow["mean"] > limit:
        who = f" Worker {slow['worker']} makes {slow['share']:.0%} of the updates, {slow['mean']:.2g} updates late."
    return Finding(
        code=code, status="warn", clause=clause, summary=f"{said}: more than {late:g} times as many.{who}{seen}",
        advice=(
            "Find out why that worker is slow, or leave it out: its gradients belong to parameters of long ago."
            if who else "Ask for fewer updates a closure, or use fewer workers.",
            "Lower the learning rate or the momentum: a stale gradient acts like momentum, and both bring the edge of stability down.",
        ),
        **numbers,
    )  # fmt: skip


def _by_worker(rows: pd.DataFrame | None) -> list[dict[str, Any]]:
    kept = _kept(rows, "staleness_steps", "worker")
    if kept is None:
        return []
    workers, late = kept["worker"].to_numpy(dtype=np.int64), kept["staleness_steps"].to_numpy(dtype=np.float64)
    return [
        {"worker": int(k), "mean": float(late[workers == k].mean()), "share": float((workers == k).mean())}
        for k in np.unique(workers)
    ]


def _by_tenth(rows: pd.DataFrame | None) -> list[float]:
    """Return the mean over each tenth of the run: whether staleness falls into the warmup or behind it."""
    kept = _kept(rows, "staleness_steps")
    if kept is None or len(kept) < 10:
        return []
    values = kept.sort_values("step")["staleness_steps"].to_numpy()
    return [float(part.mean()) for part in np.array_split(values, 10)]


def _relations(rows: pd.DataFrame | None, *, least: int = 100) -> dict[str, dict[str, float]]:
    """Return Spearman's rank correlation of an update's staleness with loss and gradient norm of the next update, course taken out."""
    found: dict[str, dict[str, float]] = {}
    for name in ("loss", "grad_norm"):
        kept = _kept(rows, "staleness_steps", name)
        if kept is None or len(kept) < least:
            continue
        kept = kept[kept[name] > 0].sort_values("step")
        values = np.log(kept[name])
        left = (values - values.rolling(WINDOW, center=True, min_periods=1).median()).shift(-1)
        both = pd.DataFrame({"lag": kept["staleness_steps"], "left": left}).dropna()
        if len(both) < least or both["lag"].nunique() < 2 or both["left"].nunique() < 2:
            continue
        rho, p = stats.spearmanr(both["lag"], both["left"])
        found[name] = {"rho": float(rho), "p": float(p), "updates": len(both)}
    return found


def _told(relations: Mapping[str, Mapping[str, float]], alpha: float) -> str:
    """Return a sentence about staleness and loss; nothing where it could not be looked for."""
    found = relations.get("loss")
    if not found or not math.isfinite(found["p"]):
        return ""
    if found["p"] >= alpha:
        return " No relation to the next loss is seen."
    return f" The loss is {'higher' if found['rho'] > 0 else 'lower'} behind staler updates (rank correlation {found['rho']:.2f})."


def _kept(rows: pd.DataFrame | None, *names: str) -> pd.DataFrame | None:
    if rows is None or not {"step", *names} <= set(rows.columns):
        return None
    kept = rows[["step", *names]].replace([np.inf, -np.inf], np.nan).dropna()
    return kept if len(kept) else None


MEASURES = {"bytes": "bytes", "requests": "requests", "apply_s": "apply time"}
_SHARED = re.compile(r"(@|/shard_)\d+$")
_SMALL = 1024
"""Bytes a request up to which moving a value costs nothing beside asking for it (rule of thumb)."""


def server_load(facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return the load of every block: columns server, block, group, carrier, trained, sharded, bytes, requests, apply_s.

    Args:
        facts: of one trial. Blocks of one variable or module on several servers have a group in common; the carrier is the
            largest parameter in a block, with the number of those beside it, or the variable.
    """
    rows = []
    for server, load in enumerate(facts.get("servers") or ()):
        for name, block in load["blocks"].items():
            parameters = block.get("parameters") or {}
            rows.append(
                {
                    "server": server, "block": name, "group": _SHARED.sub("", name),
                    "carrier": _carrier(name, parameters), "trained": bool(parameters), "sharded": "/shard_" in name,
                    "bytes": number(block.get("bytes_in")) + number(block.get("bytes_out")),
                    "requests": number(block.get("requests")), "apply_s": number(block.get("apply_s")),
                }
            )  # fmt: skip
    columns = ["server", "block", "group", "carrier", "trained", "sharded", *MEASURES]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(MEASURES, np.float64))


def load_ratios(table: pd.DataFrame, servers: int) -> dict[str, float]:
    """Return for each of `MEASURES` the load of the busiest server over the mean of all; NaN where nobody did anything.

    Args:
        servers: how many there are, idle ones included.
    """
    found = {}
    for name in MEASURES:
        by_server = table.groupby("server")[name].sum(min_count=1).reindex(range(servers), fill_value=0.0)
        mean = by_server.mean(skipna=False)
        found[name] = float(by_server.max() / mean) if mean > 0 else math.nan
    return found


def imbalance(facts: Mapping[str, Any], *, limit: float, least_apply: float) -> Finding:
    """Return `ps.imbalance`.

    Args:
        limit: of the busiest server's load over the mean.
        least_apply: share of the training's time that servers must spend on applying, for that time to be compared.
    """
    code, clause, unit = "ps.imbalance", "T13.1", "times the mean"
    servers = len(facts.get("servers") or ())
    table = server_load(facts)
    ratios = load_ratios(table, servers) if servers else {}
    if not math.isfinite(ratios.get("bytes", math.nan)) or not math.isfinite(ratios.get("requests", math.nan)):
        why = "the servers were never asked" if servers and not table["requests"].sum() else "the loads are not known"
        return Finding(code=code, status="not_measured", clause=clause, summary=f"Not measured: {why}.")
    by_server = {name: _sums(table, name, servers) for name in MEASURES}
    evidence: dict[str, Any] = {"ratios": ratios, "by_server": by_server, "servers": servers}
    if servers == 1:
        return Finding(
            code=code, status="ok", clause=clause, value=1.0, unit=unit, threshold=limit, evidence=evidence,
            summary="One server carries everything: there is nothing to balance.",
        )  # fmt: skip
    seconds = number(facts.get("training_s", facts.get("seconds")))
    compared = ["bytes", "requests"]
    if math.isfinite(ratios["apply_s"]) and seconds > 0 and sum(by_server["apply_s"]) >= least_apply * seconds:
        compared.append("apply_s")
    measure = max(compared, key=lambda name: ratios[name])
    worst, server = ratios[measure], int(np.argmax(by_server[measure]))
    heavy = table[table["server"] == server].sort_values(measure, ascending=False).iloc[0]
    evidence |= {"measure": measure, "server": server, "block": heavy["block"], "carrier": heavy["carrier"]}
    numbers: dict[str, Any] = {"value": worst, "unit": unit, "threshold": limit, "evidence": evidence}
    if worst <= limit:
        return Finding(
            code=code, status="ok", clause=clause,
            summary=f"The busiest of {servers} servers has {worst:.2f} times the mean load in {MEASURES[measure]}.", **numbers,
        )  # fmt: skip
    advice, clause = _remedies(heavy, measure)
    return Finding(
        code=code, status="warn", clause=clause, advice=advice,
        summary=f"ps {server} has {worst:.2f} times the mean load of {servers} servers in {MEASURES[measure]}, most of it {heavy['carrier']}.",
        **numbers,
    )  # fmt: skip


def hotspot(facts: Mapping[str, Any], *, per_step: float, ratio_limit: float) -> Finding:
    """Return `ps.hotspot`: a variable on one server that is asked for in every step, while the other servers are not.

    Args:
        per_step: requests a step from which a variable is asked for by everybody all the time.
        ratio_limit: of that server's requests over the mean of all servers.
    """
    code, clause, unit = "ps.hotspot", "T13.3", "requests a step"
    servers, steps = len(facts.get("servers") or ()), number(facts.get("steps"))
    table = server_load(facts)
    if not servers or not steps > 0 or not np.isfinite(table["requests"]).all() or not table["requests"].sum() > 0:
        why = "no step was counted" if servers and not steps > 0 else "the requests to the servers are not known"
        return Finding(code=code, status="not_measured", clause=clause, summary=f"Not measured: {why}.")
    asked = _sums(table, "requests", servers)
    spread = table.groupby("group")["server"].nunique()
    single = table[~table["trained"] & (table["group"].map(spread) < max(2, servers))].copy()
    single["per_step"] = single["requests"] / steps
    evidence: dict[str, Any] = {"requests": asked, "steps": steps, "servers": servers}
    common: dict[str, Any] = {"code": code, "clause": clause, "unit": unit, "threshold": per_step}
    if servers == 1 or single.empty:
        why = (
            "there is one server" if servers == 1 else "every variable lies on all servers, or is trained where it lies"
        )
        return Finding(
            status="ok", summary=f"No variable can be a hotspot: {why}.", evidence=evidence, value=0.0, **common
        )
    top = single.sort_values("per_step", ascending=False).iloc[0]
    ratio = asked[top["server"]] / (sum(asked) / servers)
    each = top["bytes"] / max(1.0, top["requests"])
    evidence |= {"variable": top["block"], "server": int(top["server"]), "ratio": ratio, "bytes_a_request": each}
    hot = top["per_step"] >= per_step and ratio > ratio_limit
    told = f"{top['block']!r} on ps {top['server']} is asked for {top['per_step']:.2g} times a step"
    if not hot:
        why = "" if top["per_step"] < per_step else f", and its server has {ratio:.2f} times the mean of all requests"
        return Finding(
            status="ok", summary=f"{told}{why}: no hotspot.", value=float(top["per_step"]), evidence=evidence, **common
        )
    small = each <= _SMALL
    advice = (
        "Compute it from the step where it is used, such as an lr by its schedule: then nobody asks for it.",
        "If it has to be a variable, read it once a closure of many steps and hand it on.",
    ) if small else (
        "Split it over the servers: variable_partitioner=FixedShardsPartitioner(number of servers).",
        "Ask for the rows that are needed alone: variable.gather(ids).",
    )  # fmt: skip
    return Finding(
        status="warn", value=float(top["per_step"]), evidence=evidence, advice=advice,
        summary=f"{told} ({each:,.0f} bytes each time), and makes its server answer {ratio:.2f} times the mean of all requests.", **common,
    )  # fmt: skip


def _remedies(heavy: pd.Series, measure: str) -> tuple[tuple[str, ...], str]:
    """Return what to try, and the clause that says so."""
    if measure == "requests" and not heavy["trained"] and not heavy["sharded"]:
        return ("Do without the variable that everybody asks for: see ps.hotspot.",), "T13.3"
    if heavy["sharded"]:
        return (
            "Shuffle the vocabulary before ids are given out (StringLookup.shuffled), so that frequent words do not share a shard.",
        ), "T13.4"
    return (
        "Split large variables over the servers: variable_partitioner=FixedShardsPartitioner(number of servers), or "
        "MinSizePartitioner, which leaves small ones whole.",
    ), "T13.2"


def _carrier(block: str, parameters: Mapping[str, int]) -> str:
    if not parameters:
        return repr(block)
    largest = max(parameters, key=lambda name: parameters[name])
    rest = len(parameters) - 1
    return f"parameter {largest!r}" + (
        f" ({parameters[largest]:,} of {sum(parameters.values()):,} values there)" if rest else ""
    )


def _sums(table: pd.DataFrame, name: str, servers: int) -> list[float]:
    found = table.groupby("server")[name].sum().reindex(range(servers), fill_value=0.0)
    return [float(value) for value in found]


def server_throughput(record: Audited) -> pd.DataFrame:
    """Return one row a run: name, workers, servers, steps_per_closure, updates_per_s, imbalance_bytes.

    Args:
        record: of `ParameterServerStudy`, whose timed runs are taken; of any other study on parameter servers its trials.
    """
    timed = record.facts.get("parameter_server_runs")
    trials = record.facts.get("parameter_server") or {}
    rows = []
    for facts in timed or [{"name": f"trial {k}"} | trials[k] for k in sorted(trials, key=int)]:
        servers, seconds = len(facts.get("servers") or ()), float(facts.get("training_s") or math.nan)
        rows.append(
            {
                "name": facts["name"], "workers": facts.get("workers"), "servers": servers,
                "steps_per_closure": str(facts.get("steps_per_closure", 1)),
                "updates_per_s": (facts.get("updates") or math.nan) / seconds,
                "imbalance_bytes": load_ratios(server_load(facts), servers)["bytes"] if servers else math.nan,
            }
        )  # fmt: skip
    names = ["name", "workers", "servers", "steps_per_closure", "updates_per_s", "imbalance_bytes"]
    return pd.DataFrame(rows, columns=names)


def saturation(workers: Any, updates_per_s: Any, *, gain: float = 1.1) -> int | None:
    """Return the smallest number of workers beyond which no larger one is `gain` times as fast; None where none saturates.

    Args:
        updates_per_s: of each run, the same length.
        gain: times as fast, for more workers to count as a help (rule of thumb).

    Returns:
        None also where fewer than two numbers of workers have a rate.

    Source: T1.3.
    """
    table = pd.DataFrame({"workers": np.asarray(workers), "rate": np.asarray(updates_per_s, dtype=np.float64)})
    table = table[np.isfinite(table["rate"]) & (table["rate"] > 0)]
    rates = table.groupby("workers")["rate"].median().sort_index()
    if len(rates) < 2:
        return None
    for position in range(len(rates) - 1):
        if rates.iloc[position + 1 :].max() < gain * rates.iloc[position]:
            return int(rates.index[position])
    return None
