"""`ps.staleness`: how old gradients are when they are applied, against what as many workers make of it by themselves (T1.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from workbench.findings.diagnosis import Finding

__all__ = ["histogram", "staleness"]

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
        facts: of one trial.
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
