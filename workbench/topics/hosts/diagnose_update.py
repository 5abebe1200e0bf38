"""`hosts.init_seed`, `hosts.not_wrapped`, `hosts.straggler`: is one model trained, by one update, at one speed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.findings.diagnosis import Finding
from workbench.topics.hosts.diagnose_area import host_finding, named, parted
from workbench.topics.hosts.diagnose_rows import drift_of, local_gradients, row_of, seen_by_all, sharded

__all__ = ["init_seed", "not_wrapped", "straggler"]

Ranks = Sequence[Mapping[str, Any]]


def init_seed(ranks: Ranks) -> Finding:
    """Judge whether all hosts start from the same parameters (P7.5)."""
    begun = [optimizer for step, optimizer in seen_by_all(ranks, "parameters") if step == 0]
    first = {r["rank"]: row_of(r["parameters"], min(begun, default=0), 0) for r in ranks}
    if any(row is None for row in first.values()):
        missing = [rank for rank, row in first.items() if row is None]
        return host_finding(
            "init_seed", "not_measured", f"Not measured: no optimizer made an update on {named(missing)}."
        )
    if any(row["sharded"] for row in first.values() if row) or sharded(ranks):
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
    local = local_gradients(ranks)
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
    if sharded(ranks):
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
    drift = drift_of(ranks)
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


def straggler(ranks: Ranks, *, ratio: float, share: float, min_steps: int, cores: int | None) -> Finding:
    """Judge whether one host makes the others wait: in how many steps it is busy so much longer than they are in the same step."""
    busy = {r["rank"]: np.asarray(r["times"]["busy_s"], dtype=np.float64) for r in ranks}
    if local_gradients(ranks):
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
    others = np.stack([np.median(np.delete(table, k, axis=0), axis=0) for k in range(len(names))])
    late = ((table >= ratio * others) & (table > others)).mean(axis=1)
    medians = np.median(table, axis=1)
    worst = max(range(len(names)), key=lambda k: (late[k], medians[k]))
    found = float(late[worst])
    shared = (
        f" {len(ranks)} hosts share {cores} cores here, so the times are not those of {len(ranks)} machines."
        if cores and cores < len(ranks)
        else ""
    )
    evidence = {
        "busy_s": dict(zip(names, medians.tolist(), strict=True)), "late_share": dict(zip(names, late.tolist(), strict=True)),
        "ratio": ratio, "steps": steps, "cores": cores,
        "step_s": {r["rank"]: float(np.median(r["times"]["step_s"])) for r in ranks},
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": found, "unit": "share of steps", "threshold": share, "evidence": evidence}
    if found >= share:
        return host_finding(
            "straggler", "warn", f"The others wait for rank {names[worst]}: in {found:.0%} of the steps it is busy {ratio:g} times as long as they are, or longer"
            f" (median {1e3 * medians[worst]:.3g} ms against {1e3 * np.median(others[worst]):.3g} ms).{shared}",
            advice=(
                "Look at that host: data that are farther away, more work per example, a slower or busier machine.",
                "Every step lasts as long as that of the slowest host.",
            ),
            **numbers,
        )  # fmt: skip
    most = (
        f". Rank {names[worst]} is busy {ratio:g} times as long as they are, or longer, in {found:.0%} of the steps; a straggler is in {share:.0%}."
        if found
        else f": in no step is one busy {ratio:g} times as long as they are."
    )
    return host_finding("straggler", "ok", f"No host makes the others wait{most}{shared}", **numbers)


def _against(groups: Sequence[Sequence[int]]) -> str:
    return " against ".join(named(group) for group in groups)
