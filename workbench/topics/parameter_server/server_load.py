"""Load and throughput of parameter servers: who does how much, and which variable carries it (T1.3, T13.1 to T13.4)."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.findings.audited import Audited
from workbench.findings.finding import Codes, Finding
from workbench.record.json_values import number

CODES = Codes({"ps.imbalance": "T13.1", "ps.hotspot": "T13.3", "ps.staleness": "T1.2", "ps.bound": "T13.5"})
MEASURES = {"bytes": "bytes", "requests": "requests", "apply_s": "apply time"}
_SHARED = re.compile(r"(@|/shard_)\d+$")
_SMALL = 1024  # bytes a request up to which moving a value costs nothing beside asking for it (rule of thumb)
SPLIT = "variable_partitioner=FixedShardsPartitioner(number of servers)"


def server_load(facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return the load of every block: columns server, block, group, carrier, trained, sharded, bytes, requests, apply_s.

    Blocks of one variable or module on several servers have a group in common; the carrier is the largest parameter in a
    block, with the number of those beside it, or the variable.
    """
    rows = [
        {
            "server": server, "block": name, "group": _SHARED.sub("", name), "carrier": _carrier(name, block.get("parameters")),
            "trained": bool(block.get("parameters")), "sharded": "/shard_" in name,
            "bytes": number(block.get("bytes_in")) + number(block.get("bytes_out")),
            "requests": number(block.get("requests")), "apply_s": number(block.get("apply_s")),
        }
        for server, load in enumerate(facts.get("servers") or ())
        for name, block in load["blocks"].items()
    ]  # fmt: skip
    columns = ["server", "block", "group", "carrier", "trained", "sharded", *MEASURES]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(MEASURES, np.float64))


def _carrier(block: str, parameters: Mapping[str, int] | None) -> str:
    if not parameters:
        return repr(block)
    largest = max(parameters, key=lambda name: parameters[name])
    share = f" ({parameters[largest]:,} of {sum(parameters.values()):,} values there)"
    return f"parameter {largest!r}" + share * (len(parameters) > 1)


def load_ratios(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return for each of `MEASURES` the load of the busiest server over the mean of all; NaN where nobody did anything."""
    table, servers = server_load(facts), range(len(facts.get("servers") or ()))
    by_server = table.groupby("server")[[*MEASURES]].sum(min_count=1).reindex(servers, fill_value=0.0)
    mean = by_server.mean(skipna=False)
    return {name: float(by_server[name].max() / mean[name]) if mean[name] > 0 else math.nan for name in MEASURES}


def _sums(table: pd.DataFrame, name: str, servers: int) -> list[float]:
    return [float(v) for v in table.groupby("server")[name].sum().reindex(range(servers), fill_value=0.0)]


def imbalance(facts: Mapping[str, Any], *, limit: float, least_apply: float) -> Finding:
    """Return `ps.imbalance`; the thresholds are those of `diagnose_parameter_server`."""
    servers, table, ratios = len(facts.get("servers") or ()), server_load(facts), load_ratios(facts)
    if not math.isfinite(ratios["bytes"]) or not math.isfinite(ratios["requests"]):
        why = "the servers were never queried" if servers and not table["requests"].sum() else "the loads are not known"
        return CODES.not_measured("ps.imbalance", why)
    by_server = {name: _sums(table, name, servers) for name in MEASURES}
    evidence: dict[str, Any] = {"ratios": ratios, "by_server": by_server, "servers": servers}
    numbers: dict[str, Any] = {"value": 1.0, "unit": "times the mean", "threshold": limit, "evidence": evidence}
    if servers == 1:
        alone = "One server carries everything: there is nothing to balance."
        return CODES.finding("ps.imbalance", "ok", alone, **numbers)
    seconds = number(facts.get("training_s", facts.get("seconds")))
    compared = ["bytes", "requests"]
    if math.isfinite(ratios["apply_s"]) and seconds > 0 and sum(by_server["apply_s"]) >= least_apply * seconds:
        compared.append("apply_s")
    measure = max(compared, key=lambda name: ratios[name])
    worst, server = ratios[measure], int(np.argmax(by_server[measure]))
    heavy = table[table["server"] == server].sort_values(measure, ascending=False).iloc[0]
    evidence |= {"measure": measure, "server": server, "block": heavy["block"], "carrier": heavy["carrier"]}
    numbers["value"] = worst
    if worst <= limit:
        even = f"The busiest of {servers} servers has {worst:.2f} times the mean load in {MEASURES[measure]}."
        return CODES.finding("ps.imbalance", "ok", even, **numbers)
    if measure == "requests" and not heavy["trained"] and not heavy["sharded"]:
        advice, clause = "Avoid the variable that every worker requests: see ps.hotspot.", "T13.3"
    elif heavy["sharded"]:
        clause = "T13.4"
        advice = "Shuffle the vocabulary before ids are given out (StringLookup.shuffled), so that frequent words do not share a shard."
    else:
        clause = "T13.2"
        advice = (
            f"Split large variables over the servers: {SPLIT}, or MinSizePartitioner, which leaves small ones whole."
        )
    uneven = f"ps {server} has {worst:.2f} times the mean load of {servers} servers in {MEASURES[measure]}, most of it {heavy['carrier']}."
    return replace(CODES.finding("ps.imbalance", "warn", uneven, advice=(advice,), **numbers), clause=clause)


def hotspot(facts: Mapping[str, Any], *, per_step: float, ratio_limit: float) -> Finding:
    """Return `ps.hotspot`: a variable on one server that is asked for in every step, while the other servers are not."""
    servers, steps, table = len(facts.get("servers") or ()), number(facts.get("steps")), server_load(facts)
    if not servers or not steps > 0 or not np.isfinite(table["requests"]).all() or not table["requests"].sum() > 0:
        why = "no step was counted" if servers and not steps > 0 else "the requests to the servers are not known"
        return CODES.not_measured("ps.hotspot", why)
    asked = _sums(table, "requests", servers)
    evidence: dict[str, Any] = {"requests": asked, "steps": steps, "servers": servers}
    numbers: dict[str, Any] = {"value": 0.0, "unit": "requests a step", "threshold": per_step, "evidence": evidence}
    spread = table.groupby("group")["server"].nunique()
    single = table[~table["trained"] & (table["group"].map(spread) < max(2, servers))]
    if servers == 1 or single.empty:
        why = (
            "there is one server" if servers == 1 else "every variable lies on all servers, or is trained where it lies"
        )
        return CODES.finding("ps.hotspot", "ok", f"No variable can be a hotspot: {why}.", **numbers)
    top = single.sort_values("requests", ascending=False).iloc[0]
    asked_for, each = float(top["requests"] / steps), top["bytes"] / max(1.0, top["requests"])
    ratio = asked[top["server"]] / (sum(asked) / servers)
    evidence |= {"variable": top["block"], "server": int(top["server"]), "ratio": ratio, "bytes_a_request": each}
    numbers["value"] = asked_for
    told = f"{top['block']!r} on ps {top['server']} is asked for {asked_for:.2g} times a step"
    if asked_for < per_step or not ratio > ratio_limit:
        why = "" if asked_for < per_step else f", and its server has {ratio:.2f} times the mean of all requests"
        return CODES.finding("ps.hotspot", "ok", f"{told}{why}: no hotspot.", **numbers)
    advice = (
        "Compute it from the step where it is used, such as an lr by its schedule: then it is never requested.",
        "If it has to be a variable, read it once a closure of many steps and hand it on.",
    ) if each <= _SMALL else (
        f"Split it over the servers: {SPLIT}.",
        "Ask for the rows that are needed alone: variable.gather(ids).",
    )  # fmt: skip
    hot = (
        f"{told} ({each:,.0f} bytes each time), and makes its server answer {ratio:.2f} times the mean of all requests."
    )
    return CODES.finding("ps.hotspot", "warn", hot, advice=advice, **numbers)


def server_throughput(record: Audited) -> pd.DataFrame:
    """Return one row a run: name, workers, servers, steps_per_closure, updates_per_s, imbalance_bytes.

    Args:
        record: of `ParameterServerStudy`, whose timed runs are taken; of any other study on parameter servers its trials.
    """
    trials = record.facts.get("parameter_server") or {}
    runs = record.facts.get("parameter_server_runs")
    rows = [
        {
            "name": facts["name"], "workers": facts.get("workers"), "servers": len(facts.get("servers") or ()),
            "steps_per_closure": str(facts.get("steps_per_closure", 1)),
            "updates_per_s": (facts.get("updates") or math.nan) / float(facts.get("training_s") or math.nan),
            "imbalance_bytes": load_ratios(facts)["bytes"],
        }
        for facts in runs or [{"name": f"trial {k}"} | trials[k] for k in sorted(trials, key=int)]
    ]  # fmt: skip
    columns = ["name", "workers", "servers", "steps_per_closure", "updates_per_s", "imbalance_bytes"]
    return pd.DataFrame(rows, columns=columns)


def saturation(workers: Any, updates_per_s: Any, *, gain: float = 1.1) -> int | None:
    """Return the smallest number of workers beyond which no larger one is `gain` times as fast; None where none saturates.

    Args:
        updates_per_s: of each run, the same length; where fewer than two numbers of workers have a rate, none saturates.
        gain: times as fast, for more workers to count as a help (rule of thumb).

    Source: T1.3.
    """
    table = pd.DataFrame({"workers": np.asarray(workers), "rate": np.asarray(updates_per_s, dtype=np.float64)})
    table = table[np.isfinite(table["rate"]) & (table["rate"] > 0)]
    rates = table.groupby("workers")["rate"].median().sort_index()
    best_beyond = rates[::-1].cummax()[::-1].shift(-1)
    flat = rates.index[best_beyond < gain * rates]
    return int(flat[0]) if len(flat) else None
