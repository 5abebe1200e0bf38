"""`server_throughput`: updates per second of every run on parameter servers; `saturation`: where more workers stop helping (T1.3)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from workbench.findings.audited import Audited
from workbench.topics.parameter_server.server_load import load_ratios, server_load

__all__ = ["saturation", "server_throughput"]


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
