"""`hosts.clip`: does every host clip, to the same norm, what all hosts have averaged?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.hosts.diagnose_area import host_finding
from workbench.topics.hosts.diagnose_rows import (
    changed_apart,
    clipped_before_averaging,
    clips_of,
    same,
    seen_by_all,
    sharded,
    values_of,
)

__all__ = ["clip"]

Ranks = Sequence[Mapping[str, Any]]


def clip(ranks: Ranks) -> Finding:
    """Judge whether every host clips, to the same norm, what all hosts have averaged."""
    clips = clips_of(ranks)
    counts = {rank: len(found) for rank, found in clips.items()}
    limits = {rank: tuple(sorted({(c["by"], c["limit"]) for c in found}, key=str)) for rank, found in clips.items()}
    evidence = {"calls": counts, "limits": {rank: [list(pair) for pair in found] for rank, found in limits.items()}}
    clipping = [rank for rank, count in counts.items() if count]
    numbers: dict[str, Any] = {
        "value": float(len(clipping)),
        "unit": "hosts",
        "threshold": float(len(ranks)),
        "evidence": evidence,
    }
    same_count, same_limit = len(set(counts.values())) == 1, len(set(limits.values())) == 1
    if not clipping:
        return _clipped_by_hand(ranks, numbers | {"threshold": None})
    if not same_count:
        often = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
        return host_finding(
            "clip", "fail", f"Not every host clips every gradient: calls {often}. From the first clipped update on they train different models.",
            advice=("Clip on every host: each has the same averaged gradient, and so the same norm.",), **numbers,
        )  # fmt: skip
    if not same_limit:
        return host_finding(
            "clip", "fail", f"Hosts clip to different norms: {_listed(limits)}.",
            advice=("Give all hosts the same max_grad_norm.",), **numbers,
        )  # fmt: skip
    early = clipped_before_averaging(ranks)
    if early is not None:
        return host_finding(
            "clip", "fail", f"Each host clips its own gradient before the hosts average theirs (update {early}).", step=early,
            advice=("Average first, then clip: the threshold is for the gradient of the whole batch.",), **numbers,
        )  # fmt: skip
    return host_finding(
        "clip", "ok", f"Every host clips alike: {_listed({0: limits[clipping[0]]}, rank=False)}.", **numbers
    )


def _clipped_by_hand(ranks: Ranks, numbers: dict[str, Any]) -> Finding:
    """Judge what was seen of gradients where torch's functions clip none: whether they change between backward and update."""
    apart = changed_apart(ranks)
    if apart is not None:
        return host_finding(
            "clip", "fail", f"Gradients are the same on all hosts after backward, and differ when update {apart} uses them: some hosts "
            "change them in between, as a clipping written by hand does.", step=apart,
            advice=("Clip on every host: each has the same averaged gradient, and so the same norm.",),
            **(numbers | {"threshold": 0.0}),
        )  # fmt: skip
    if not sharded(ranks) and any(_hidden(ranks, key) for key in seen_by_all(ranks, "gradients")):
        return host_finding(
            "clip", "not_measured", "Not measured: the script changes gradients before it averages them itself. Torch's functions do not "
            "clip them; whether a clipping written by hand does is not to be seen.", **numbers,
        )  # fmt: skip
    return host_finding(
        "clip",
        "ok",
        "No host clips gradients with torch's functions, and what else changes them does so alike.",
        **numbers,
    )


def _hidden(ranks: Ranks, key: tuple[int, int]) -> bool:
    """Tell whether gradients that the script averages itself are changed before that, by what nobody can see."""
    backward, joining = (values_of(ranks, key, field) for field in ("after_backward", "at_joining"))
    averaged = None not in backward and len(set(backward)) > 1 and same(ranks, key, "at_step")
    return averaged and joining != backward


def _listed(limits: Mapping[int, Sequence[tuple[str, float | None]]], *, rank: bool = True) -> str:
    said = []
    for number, pairs in limits.items():
        what = ", ".join(
            f"{'values' if by == 'clip_grad_value_' else 'the norm'} at {limit:g}"
            for by, limit in pairs
            if limit is not None
        )
        said.append(f"rank {number} {what}" if rank else what)
    return "; ".join(said)
