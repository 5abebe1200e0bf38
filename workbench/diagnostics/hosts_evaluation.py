"""`hosts.evaluation`, `hosts.buffers`: is every example counted once, by the same model on every host?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.diagnostics.base import Finding
from workbench.diagnostics.hosts_area import evaluation_passes, host_finding, named
from workbench.diagnostics.hosts_shards import shards_of

__all__ = ["buffers", "evaluation"]

Ranks = Sequence[Mapping[str, Any]]
_MOMENTS = ("evaluation", "checkpoint")
_SAME = 1e-6
"""Relative difference of statistics, or of outputs, up to which they are the same: rounding in another order."""


def evaluation(ranks: Ranks, *, merged: bool) -> Finding:
    """Judge coverage, padding and agreement of evaluations; where statistics differ, that is said by `hosts.buffers`."""
    by_rank = {r["rank"]: evaluation_passes(r) for r in ranks}
    who = [rank for rank, passes in by_rank.items() if passes]
    if not who:
        return host_finding(
            "evaluation", "not_measured", "Not measured: no evaluation came through a torch DataLoader."
        )
    count = min(len(by_rank[rank]) for rank in who)
    found = [shards_of({rank: by_rank[rank][k] for rank in who}, augmented=False) for k in range(count)]
    if found[0].by != "index":
        return host_finding("evaluation", "not_measured", "Not measured: the hosts evaluate data sets of their own.")
    shards = found[0]
    counted = Counter(i for examples in shards.examples.values() for i in examples)
    everybody = all(len(set(examples)) == len(shards.holders) for examples in shards.examples.values())
    extra = 0 if everybody else sum(counted.values()) - len(counted)
    evidence: dict[str, Any] = {
        "evaluations": count, "by": who, "counted": sum(counted.values()), "examples": len(counted), "size": shards.size,
        "missing": shards.missing, "joined": {r["rank"]: len(r["joined"]["evaluation"]) for r in ranks},
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": float(extra), "unit": "examples", "threshold": 0, "evidence": evidence}
    if extra:
        return host_finding(
            "evaluation", "warn", f"{extra} of {len(counted):,} examples are evaluated on two hosts, as a sampler's padding: where all count, the metric is biased.",
            advice=(
                "Evaluate every world-th example on each host, Subset(data, range(rank, len(data), world)), and join sums and counts.",
                "DistributedSampler repeats examples until all hosts have as many; leave the repeated ones out of the metric.",
            ),
            **numbers,
        )  # fmt: skip
    if shards.missing:
        return host_finding(
            "evaluation", "warn", f"{shards.missing:,} of {shards.size:,} examples are evaluated by no host.",
            advice=("Evaluate all of them: no drop_last, and shares whose union is the split.",),
            **(numbers | {"value": float(shards.missing)}),
        )  # fmt: skip
    shared_out = len(who) > 1 and not everybody
    if shared_out and not any(r["joined"]["evaluation"] for r in ranks):
        return host_finding(
            "evaluation", "warn", "Each host evaluates its own part, and no collective joins them: each reports another metric.",
            advice=("Join sums and counts of all hosts with all_reduce, then divide.",), **numbers,
        )  # fmt: skip
    sums = {r["rank"]: [e["output_sum"] for e in r["evaluations"]] for r in ranks if r["evaluations"]}
    if everybody and len(sums) > 1 and merged and _differ(sums):
        evidence["output_sums"] = sums
        return host_finding(
            "evaluation", "fail", "Hosts evaluate the same examples and get different outputs: the metric depends on which one reports it.",
            advice=("Compare parameters and buffers of the hosts before the evaluation.",), **numbers,
        )  # fmt: skip
    how = (
        f"by {named(who)}"
        if len(who) == 1
        else "by every host, all of them"
        if everybody
        else f"each by one of {len(who)} hosts, and joined"
    )
    return host_finding("evaluation", "ok", f"{len(counted):,} examples are evaluated {how}.", **numbers)


def _differ(sums: Mapping[int, Sequence[float | None]]) -> bool:
    for values in zip(*sums.values(), strict=False):
        known = [v for v in values if v is not None]
        if known and not all(math.isclose(v, known[0], rel_tol=1e-5, abs_tol=1e-6) for v in known):
            return True
    return False


def buffers(ranks: Ranks, *, large_shift: float) -> Finding:
    """Judge whether running statistics were merged before each evaluation and each checkpoint (P7.3)."""
    if not any(r["buffers"] for r in ranks):
        seen = any(r["calls"]["wrapped"] + r["calls"]["other"] + r["calls"]["raw"] for r in ranks)
        if seen:
            return host_finding("buffers", "ok", "The model keeps no running statistics.")
        return host_finding("buffers", "not_measured", "Not measured: no model was called in training.")
    events = sorted({(row["step"], row["moment"]) for r in ranks for row in r["buffers"] if row["moment"] in _MOMENTS})
    if not events:
        return host_finding("buffers", "not_measured", "Not measured: nobody evaluated or saved the model.")
    apart = [(moment, step, shift) for step, moment in events if (shift := _shift(ranks, step, moment)) is not None]
    worst = max((shift for _, _, shift in apart), default=0.0)
    area = "evaluation" if not apart or any(moment == "evaluation" for moment, _, _ in apart) else "checkpointing"
    evidence: dict[str, Any] = {
        "area": area, "moments": len(events), "apart": [{"moment": m, "step": s, "shift": x} for m, s, x in apart[:50]],
        "broadcast_buffers": sorted({bool(w.get("broadcast_buffers")) for r in ranks for w in r["wrappers"]}),
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "value": worst,
        "unit": "standard deviations",
        "threshold": large_shift,
        "evidence": evidence,
    }
    if not apart:
        return host_finding(
            "buffers",
            "ok",
            f"Batch norm's running statistics are the same on all hosts at all {len(events)} evaluations and checkpoints.",
            **numbers,
        )
    what = " and ".join(sorted({"evaluations" if m == "evaluation" else "checkpoints" for m, _, _ in apart}))
    wins = (
        " DistributedDataParallel copies those of rank 0 over all others."
        if True in evidence["broadcast_buffers"]
        else ""
    )
    return host_finding(
        "buffers", "fail" if worst > large_shift else "warn",
        f"Batch norm's running statistics differ between hosts at {len(apart)} of {len(events)} {what}, by up to {worst:.2g} standard deviations of a channel.{wins}",
        step=apart[0][1],
        advice=(
            "Merge the running statistics of all hosts before each evaluation and each checkpoint, by the law of total variance.",
            "Or train with synchronised batch norm, or with a norm that keeps no statistics.",
        ),
        **numbers,
    )  # fmt: skip


def _shift(ranks: Ranks, step: int, moment: str) -> float | None:
    """Return how far statistics of two hosts are apart, in standard deviations of the channel; None where they are the same."""
    rows = [row for r in ranks if (row := _at(r["buffers"], step, moment)) is not None]
    if len({row["hash"] for row in rows}) < 2:
        return None
    if any("means" not in row for row in rows):
        return float("nan")
    means = np.array([row["means"] for row in rows], dtype=np.float64)
    variances = np.array([row["variances"] for row in rows], dtype=np.float64)
    if not (np.isfinite(means).all() and np.isfinite(variances).all()):
        return float("nan")
    deviation = np.sqrt(np.maximum(variances.mean(axis=0), 1e-30))
    of_means = np.ptp(means, axis=0) / deviation
    of_deviations = np.ptp(np.sqrt(np.maximum(variances, 0)), axis=0) / deviation
    found = float(max(of_means.max(initial=0.0), of_deviations.max(initial=0.0)))
    return found if found > _SAME else None


def _at(rows: Sequence[Mapping[str, Any]], step: int, moment: str) -> Mapping[str, Any] | None:
    """Return the statistics at a moment, or, of a host that did nothing then, those with which it went on."""
    own = [row for row in rows if row["step"] == step and row["moment"] == moment]
    later = [row for row in rows if row["step"] == step and row["moment"] in ("training", "end")]
    return next(iter(own + later), None)
