"""`server_remedies`: the remedies of T13 with what they were worth, one row each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workbench.findings.audited import Audited
from workbench.topics.parameter_server.server_load import load_ratios, server_load

__all__ = ["server_remedies"]


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
