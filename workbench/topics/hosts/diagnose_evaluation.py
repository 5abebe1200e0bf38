"""`hosts.evaluation`: is every example counted once, and does every host get the same outputs for it (P2.11, P7.1)?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.hosts.diagnose_area import evaluation_passes, host_finding, named
from workbench.topics.hosts.diagnose_shards import Shards, shards_of

__all__ = ["evaluation"]

Ranks = Sequence[Mapping[str, Any]]
_PADDING = (
    "Evaluate every world-th example on each host, Subset(data, range(rank, len(data), world)), and join sums and counts.",
    "DistributedSampler repeats examples until all hosts have as many; leave the repeated ones out of the metric.",
)


def evaluation(ranks: Ranks, *, merged: bool) -> Finding:
    """Judge coverage, padding and agreement of all evaluations; where statistics differ, that is said by `hosts.buffers`.

    Args:
        ranks: facts of all hosts.
        merged: whether running statistics were the same on all hosts.
    """
    occasions = _occasions(ranks)
    if not occasions:
        return host_finding(
            "evaluation", "not_measured", "Not measured: no evaluation came through a torch DataLoader."
        )
    named_by_place = [(moment, shards) for moment, shards in occasions if shards.by == "index"]
    found = [shards for _, shards in named_by_place]
    if not found:
        return host_finding("evaluation", "not_measured", "Not measured: the hosts evaluate data sets of their own.")
    seen: dict[Any, set[Any]] = {}
    for moment, shards in named_by_place:
        seen.setdefault(moment, set()).update(shards.holders)
    judged = [_coverage(ranks, shards, seen[moment]) for moment, shards in named_by_place]
    worst = next((finding for finding in judged if finding.status != "ok"), None)
    if worst is not None:
        return worst
    sums = {r["rank"]: [e["output_sum"] for e in r["evaluations"]] for r in ranks if r["evaluations"]}
    sizes = {r["rank"]: [e.get("output_size") for e in r["evaluations"]] for r in ranks if r["evaluations"]}
    alone = all(_everybody(shards) for shards in found)
    if alone and len(sums) > 1 and merged and _differ(sums, sizes):
        return host_finding(
            "evaluation", "fail", "Hosts evaluate the same examples and get different outputs: the metric depends on which one reports it.",
            value=float(len(sums)), unit="hosts", threshold=0, evidence={"output_sums": sums},
            advice=("Compare parameters and buffers of the hosts before the evaluation.",),
        )  # fmt: skip
    return max(judged, key=lambda finding: int(finding.evidence["examples"]))


def _occasions(ranks: Ranks) -> list[tuple[Any, Shards]]:
    """Return what was evaluated, occasion by occasion, each with the moment and the data set that it belongs to.

    What only some of the usual hosts looked at is none.
    """
    found: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for rank in ranks:
        seen: Counter[tuple[Any, ...]] = Counter()
        for one in evaluation_passes(rank):
            kind = (one["dataset"]["kind"], one["dataset"]["length"], one["steps"][0])
            found.setdefault((*kind, seen[kind]), {})[rank["rank"]] = one
            seen[kind] += 1
    usual = max((len(passes) for passes in found.values()), default=0)
    kept = {key: passes for key, passes in found.items() if len(passes) == usual}
    return [(key[:3], shards_of(passes, augmented=False)) for key, passes in kept.items()]


def _everybody(shards: Shards) -> bool:
    """Tell whether every host evaluates all examples."""
    return all(len(set(examples)) == len(shards.holders) for examples in shards.examples.values())


def _coverage(ranks: Ranks, shards: Shards, seen: Set[Any]) -> Finding:
    """Judge one evaluation: padding, examples left out, and shares that nobody joins.

    Args:
        ranks: facts of all hosts.
        shards: of the evaluation.
        seen: examples that were evaluated at the same moment, be it in another pass: what is left over may come by itself.
    """
    who = list(shards.examples)
    counted = Counter(i for examples in shards.examples.values() for i in examples)
    everybody = _everybody(shards)
    extra = 0 if everybody else sum(counted.values()) - len(counted)
    evidence: dict[str, Any] = {
        "by": who, "counted": sum(counted.values()), "examples": len(counted), "size": shards.size,
        "missing": shards.missing, "joined": {r["rank"]: len(r["joined"]["evaluation"]) for r in ranks},
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": float(extra), "unit": "examples", "threshold": 0, "evidence": evidence}
    if len(who) > 1 and not everybody and not any(r["joined"]["evaluation"] for r in ranks):
        twice = f" {extra} of {len(counted):,} are on two hosts, as a sampler's padding." if extra else ""
        return host_finding(
            "evaluation", "warn", f"Each host evaluates its own part, and no collective joins them: each reports another metric.{twice}",
            advice=("Join sums and counts of all hosts with all_reduce, then divide.", *(_PADDING if extra else ())), **numbers,
        )  # fmt: skip
    if extra:
        return host_finding(
            "evaluation", "warn", f"{extra} of {len(counted):,} examples are evaluated on two hosts, as a sampler's padding: where all count, the metric is biased.",
            advice=_PADDING,
            **numbers,
        )  # fmt: skip
    missing = max(0, (shards.size or 0) - len(seen | set(shards.holders))) if shards.missing else 0
    if missing:
        return host_finding(
            "evaluation", "warn", f"{missing:,} of {shards.size:,} examples are evaluated by no host.",
            advice=("Evaluate all of them: no drop_last, and shares whose union is the split.",),
            **(numbers | {"value": float(missing)}),
        )  # fmt: skip
    how = (
        f"by {named(who)}"
        if len(who) == 1
        else "by every host, all of them"
        if everybody
        else f"each by one of {len(who)} hosts, and joined"
    )
    return host_finding("evaluation", "ok", f"{len(counted):,} examples are evaluated {how}.", **numbers)


def _differ(sums: Mapping[int, Sequence[Any]], sizes: Mapping[int, Sequence[Any]]) -> bool:
    """Tell whether sums differ by more than rounding: outputs of both signs cancel, so what is small is measured by their size."""
    for values, among in zip(zip(*sums.values(), strict=False), zip(*sizes.values(), strict=False), strict=False):
        known = [float(v) for v in values if v is not None]
        largest = max((float(v) for v in among if v is not None and math.isfinite(float(v))), default=0.0)
        if any(not math.isclose(v, known[0], rel_tol=1e-5, abs_tol=1e-6 + 1e-6 * largest) for v in known):
            return True
    return False
