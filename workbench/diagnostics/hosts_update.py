"""`hosts.init_seed`, `hosts.not_wrapped`, `hosts.clip`, `hosts.straggler`: is one model trained, by one update, at one speed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.diagnostics.base import Finding
from workbench.diagnostics.hosts_area import host_finding, named, parted

__all__ = ["clip", "init_seed", "not_wrapped", "straggler"]

Ranks = Sequence[Mapping[str, Any]]


def init_seed(ranks: Ranks) -> Finding:
    """Judge whether all hosts start from the same parameters (P7.5)."""
    first = {r["rank"]: _row(r["parameters"], 0, 0) for r in ranks}
    if any(row is None for row in first.values()):
        missing = [rank for rank, row in first.items() if row is None]
        return host_finding(
            "init_seed", "not_measured", f"Not measured: no optimizer made an update on {named(missing)}."
        )
    if any(row["sharded"] for row in first.values() if row) or _sharded(ranks):
        return host_finding(
            "init_seed", "not_measured", "Not measured: each host holds a part of the parameters by design."
        )
    hashes = {rank: row["hash"] for rank, row in first.items() if row}
    groups = parted(hashes)
    before = {r["rank"]: r["wrappers"][0].get("before") for r in ranks if r["wrappers"]}
    evidence = {"parameters_at_step_0": hashes, "before_the_wrapper": before}
    numbers: dict[str, Any] = {"value": len(groups), "unit": "models", "threshold": 1, "step": 0, "evidence": evidence}
    if len(groups) == 1:
        sent = len(set(before.values())) > 1
        note = " They differed before the wrapper sent those of rank 0 around." if sent else ""
        return host_finding(
            "init_seed",
            "ok",
            f"Parameters are equal on all {len(hashes)} hosts before the first update.{note}",
            **numbers,
        )
    return host_finding(
        "init_seed", "fail", f"{len(hashes)} hosts start from {len(groups)} different models: {_against(groups)}.",
        advice=(
            "Seed the initialisation alike on all hosts (shared_seed), not by the rank.",
            "Or let DistributedDataParallel send the parameters of rank 0 around: init_sync=True, and no change to them after it.",
        ),
        **numbers,
    )  # fmt: skip


def not_wrapped(ranks: Ranks) -> Finding:
    """Judge whether gradients are averaged over the hosts."""
    alone = [r["rank"] for r in ranks if not r["initialised"]]
    raw = {r["rank"]: r["calls"]["raw"] for r in ranks}
    wrapped = {r["rank"]: r["calls"]["wrapped"] for r in ranks}
    local = _local_gradients(ranks)
    evidence: dict[str, Any] = {"raw_calls": raw, "wrapped_calls": wrapped, "gradients_differ_at": local}
    numbers: dict[str, Any] = {"value": float(sum(raw.values())), "unit": "calls", "threshold": 0, "evidence": evidence}
    if alone:
        return host_finding(
            "not_wrapped", "fail", f"init_process_group was never called on {named(alone)}: {len(ranks)} processes train a model each.",
            advice=(
                "Call torch.distributed.init_process_group at the start, and wrap the model in DistributedDataParallel.",
                "torchrun tells each process its rank in the environment: RANK, WORLD_SIZE, LOCAL_RANK.",
            ),
            **numbers,
        )  # fmt: skip
    if sum(raw.values()):
        steps = sorted({step for r in ranks for step in r["raw_steps"]})
        times = f"{sum(raw.values())} times in training, {sum(wrapped.values())} times through its wrapper"
        return host_finding(
            "not_wrapped", "fail", f"The raw module was called {times}: what it computes is not averaged over the hosts.",
            step=steps[0] if steps else None,
            advice=("Call the wrapped model in training; model.module is for evaluation and for state_dict().",),
            **numbers,
        )  # fmt: skip
    if _sharded(ranks):
        return host_finding(
            "not_wrapped", "ok", "The model is sharded over the hosts and called as a whole.", **numbers
        )
    if not any(r["gradients"] for r in ranks):
        return host_finding("not_wrapped", "not_measured", "Not measured: no optimizer made an update.", **numbers)
    if local:
        kind = (
            "the wrapper is there, so look for no_sync() around every backward"
            if sum(wrapped.values())
            else "no model is wrapped"
        )
        return host_finding(
            "not_wrapped", "fail", f"Gradients differ between hosts at update {local[0]}: they are not averaged ({kind}).",
            step=local[0],
            advice=("Wrap the model in DistributedDataParallel, or average the gradients before each update.",),
            **numbers,
        )  # fmt: skip
    drift = _drift(ranks)
    if drift is not None:
        evidence["parameters_differ_at"] = drift
        return host_finding(
            "not_wrapped", "fail", f"Parameters differ between hosts from update {drift} on, though gradients and clipping are the same.",
            step=drift,
            advice=("Look for code that changes parameters, the learning rate or the optimizer's state on some hosts only.",),
            **numbers,
        )  # fmt: skip
    how = "through the wrapper" if sum(wrapped.values()) else "by collectives of the script's own"
    return host_finding("not_wrapped", "ok", f"Gradients are averaged over {len(ranks)} hosts {how}.", **numbers)


def clip(ranks: Ranks) -> Finding:
    """Judge whether every host clips, to the same norm, what all hosts have averaged."""
    counts = {r["rank"]: len(r["clips"]) for r in ranks}
    limits = {r["rank"]: tuple(sorted({(c["by"], c["limit"]) for c in r["clips"]}, key=str)) for r in ranks}
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
        return host_finding(
            "clip", "ok", "No host clips gradients with torch's functions.", **(numbers | {"threshold": None})
        )
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
    early = _clipped_before_averaging(ranks)
    if early is not None:
        return host_finding(
            "clip", "fail", f"Each host clips its own gradient before the hosts average theirs (update {early}).", step=early,
            advice=("Average first, then clip: the threshold is for the gradient of the whole batch.",), **numbers,
        )  # fmt: skip
    return host_finding(
        "clip", "ok", f"Every host clips alike: {_listed({0: limits[clipping[0]]}, rank=False)}.", **numbers
    )


def straggler(ranks: Ranks, *, ratio: float, share: float, min_steps: int, cores: int | None) -> Finding:
    """Judge whether one host makes the others wait."""
    busy = {r["rank"]: np.asarray(r["times"]["busy_s"], dtype=np.float64) for r in ranks}
    if _local_gradients(ranks):
        return host_finding("straggler", "ok", "No host waits for another: their gradients are not averaged.")
    steps = min((len(times) for times in busy.values()), default=0)
    if len(busy) < 2 or steps < min_steps:
        return host_finding(
            "straggler",
            "not_measured",
            f"Not measured: {steps} timed steps on {len(busy)} hosts; {min_steps} on 2 are needed.",
        )
    table = np.stack([times[:steps] for times in busy.values()])
    if not np.isfinite(table).all():
        return host_finding("straggler", "not_measured", "Not measured: some times are no numbers.")
    names = list(busy)
    medians = np.median(table, axis=1)
    worst = int(medians.argmax())
    others = float(np.median(np.delete(medians, worst)))
    steady = float(np.quantile(table[worst], 0.25))  # slow in most steps, not in some
    found = float(steady / others) if others > 0 else (np.inf if steady > 0 else 1.0)
    slowest = float((table.argmax(axis=0) == worst).mean())
    shared = (
        f" {len(ranks)} hosts share {cores} cores here, so the times are not those of {len(ranks)} machines."
        if cores and cores < len(ranks)
        else ""
    )
    evidence = {
        "busy_s": dict(zip(names, medians.tolist(), strict=True)), "slowest_share": slowest, "steps": steps, "cores": cores,
        "step_s": {r["rank"]: float(np.median(r["times"]["step_s"])) for r in ranks},
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": found, "unit": "times", "threshold": ratio, "evidence": evidence}
    said = f"Rank {names[worst]} is busy for {1e3 * steady:.3g} ms or more in three of four steps, {found:.3g} times as long as the others"
    if found >= ratio and slowest >= share:
        return host_finding(
            "straggler", "warn", f"{said}, and the slowest in {slowest:.0%} of the steps: the others wait for it.{shared}",
            advice=(
                "Look at that host: data that are farther away, more work per example, a slower or busier machine.",
                "Every step lasts as long as that of the slowest host.",
            ),
            **numbers,
        )  # fmt: skip
    return host_finding(
        "straggler",
        "ok",
        f"No host makes the others wait. {said}, and the slowest in {slowest:.0%} of the steps.{shared}",
        **numbers,
    )


def _row(rows: Sequence[Mapping[str, Any]], optimizer: int, step: int) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["optimizer"] == optimizer and row["step"] == step), None)


def _sharded(ranks: Ranks) -> bool:
    return any(w.get("sharded") for r in ranks for w in r["wrappers"]) or any(
        p["sharded"] for r in ranks for p in r["parameters"]
    )


def _against(groups: Sequence[Sequence[int]]) -> str:
    return " against ".join(named(group) for group in groups)


def _seen_by_all(ranks: Ranks, kind: str) -> list[tuple[int, int]]:
    keys = [{(row["step"], row["optimizer"]) for row in r[kind]} for r in ranks]
    return sorted(set.intersection(*keys)) if keys else []


def _differ(ranks: Ranks, kind: str, key: tuple[int, int], field: str) -> bool:
    step, optimizer = key
    rows = (_row(r[kind], optimizer, step) for r in ranks)
    return len({row[field] for row in rows if row is not None}) > 1


def _local_gradients(ranks: Ranks) -> list[int]:
    """Return the updates whose gradients differ between hosts, before any clipping and after it."""
    return [
        key[0] for key in _seen_by_all(ranks, "gradients")
        if all(_differ(ranks, "gradients", key, field) for field in ("before_clip", "at_step"))
    ]  # fmt: skip


def _clipped_before_averaging(ranks: Ranks) -> int | None:
    """Return the first update whose gradients differed when they were clipped, and not any more when they were used."""
    for key in _seen_by_all(ranks, "gradients"):
        if _differ(ranks, "gradients", key, "before_clip") and not _differ(ranks, "gradients", key, "at_step"):
            return key[0]
    return None


def _drift(ranks: Ranks) -> int | None:
    """Return the first update before which parameters differ for no reason that has a code of its own."""
    if (
        len({len(r["clips"]) for r in ranks}) > 1
        or len({str(sorted({str(c["limit"]) for c in r["clips"]})) for r in ranks}) > 1
    ):
        return None
    steps = [key for key in _seen_by_all(ranks, "parameters") if _differ(ranks, "parameters", key, "hash")]
    return steps[0][0] if steps and steps[0][0] > 0 else None


def _listed(limits: Mapping[int, Sequence[tuple[str, float | None]]], *, rank: bool = True) -> str:
    said = []
    for number, pairs in limits.items():
        what = ", ".join(
            f"{'the norm' if by == 'clip_grad_norm_' else 'values'} at {limit:g}"
            for by, limit in pairs
            if limit is not None
        )
        said.append(f"rank {number} {what}" if rank else what)
    return "; ".join(said)
