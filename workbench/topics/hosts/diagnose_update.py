"""`hosts.init_seed`, `.not_wrapped`, `.clip`, `.straggler`: is one model trained, by one update, at one speed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.findings.finding import Finding
from workbench.topics.hosts.ranks import (
    CODES,
    Ranks,
    changed_apart,
    clipped_before_averaging,
    clips_of,
    drift_of,
    local_gradients,
    named,
    row_of,
    same,
    seen_by_all,
    sharded,
    values_of,
)


def init_seed(ranks: Ranks) -> Finding:
    """Judge whether all ranks start from the same parameters (P7.5)."""
    code = "hosts.init_seed"
    begun = [optimizer for step, optimizer in seen_by_all(ranks, "parameters") if step == 0]
    first = {r["rank"]: row_of(r["parameters"], min(begun, default=0), 0) for r in ranks}
    missing = [rank for rank, row in first.items() if row is None]
    if missing:
        return CODES.not_measured(code, f"no optimizer made an update on {named(missing)}")
    if any(row["sharded"] for row in first.values() if row) or sharded(ranks):
        return CODES.not_measured(code, "each host holds a part of the parameters by design")
    hashes = {rank: row["hash"] for rank, row in first.items() if row}
    models: dict[str, list[int]] = {}
    for rank, value in hashes.items():
        models.setdefault(value, []).append(rank)
    groups = sorted(models.values(), key=lambda group: (-len(group), group))
    before = {r["rank"]: r["wrappers"][0].get("before") for r in ranks if r["wrappers"]}
    evidence = {"parameters_at_step_0": hashes, "before_the_wrapper": before}
    numbers: dict[str, Any] = {"value": len(groups), "unit": "models", "threshold": 1, "step": 0, "evidence": evidence}
    if len(groups) == 1:
        sent = " They differed before the wrapper sent those of rank 0 around." if len(set(before.values())) > 1 else ""
        said = f"Parameters are equal on all {len(hashes)} hosts before the first update.{sent}"
        return CODES.finding(code, "ok", said, **numbers)
    against = " against ".join(named(group) for group in groups)
    return CODES.finding(
        code, "fail", f"{len(hashes)} hosts start from {len(groups)} different models: {against}.",
        advice=(
            "Seed the initialisation alike on all hosts (shared_seed), not by the rank.",
            "Or let DistributedDataParallel send the parameters of rank 0 around: init_sync=True, and no change to them after it.",
        ),
        **numbers,
    )  # fmt: skip


def not_wrapped(ranks: Ranks) -> Finding:
    """Judge whether gradients are averaged over the ranks."""
    code = "hosts.not_wrapped"
    alone = [r["rank"] for r in ranks if not r["initialised"]]
    raw, wrapped = ({r["rank"]: r["calls"][kind] for r in ranks} for kind in ("raw", "wrapped"))
    num_raw, num_wrapped = sum(raw.values()), sum(wrapped.values())
    local = local_gradients(ranks)
    evidence: dict[str, Any] = {"raw_calls": raw, "wrapped_calls": wrapped, "gradients_differ_at": local}
    numbers: dict[str, Any] = {"value": float(num_raw), "unit": "calls", "threshold": 0, "evidence": evidence}
    if alone:
        return CODES.finding(
            code, "fail", f"init_process_group was never called on {named(alone)}: {len(ranks)} processes train a model each.",
            advice=(
                "Call torch.distributed.init_process_group at the start, and wrap the model in DistributedDataParallel.",
                "torchrun tells each process its rank in the environment: RANK, WORLD_SIZE, LOCAL_RANK.",
            ),
            **numbers,
        )  # fmt: skip
    if num_raw:
        times = f"{num_raw} times in training, {num_wrapped} times through its wrapper"
        return CODES.finding(
            code, "fail", f"The raw module was called {times}: what it computes is not averaged over the hosts.",
            step=min((step for r in ranks for step in r["raw_steps"]), default=None),
            advice=("Call the wrapped model in training; model.module is for evaluation and for state_dict().",),
            **numbers,
        )  # fmt: skip
    if sharded(ranks):
        return CODES.finding(code, "ok", "The model is sharded over the hosts and called as a whole.", **numbers)
    if not any(r["gradients"] for r in ranks):
        return CODES.not_measured(code, "no optimizer made an update", **numbers)
    if local:
        look = (
            "the wrapper is there, so look for no_sync() around every backward"
            if num_wrapped
            else "no model is wrapped"
        )
        return CODES.finding(
            code, "fail", f"Gradients differ between hosts at update {local[0]}: they are not averaged ({look}).",
            step=local[0],
            advice=("Wrap the model in DistributedDataParallel, or average the gradients before each update.",),
            **numbers,
        )  # fmt: skip
    drift = drift_of(ranks)
    if drift is not None:
        evidence["parameters_differ_at"] = drift
        return CODES.finding(
            code, "fail", f"Parameters differ between hosts from update {drift} on, though gradients and clipping are the same.",
            step=drift,
            advice=("Look for code that changes parameters, the learning rate or the optimizer's state on some hosts only.",),
            **numbers,
        )  # fmt: skip
    how = "through the wrapper" if num_wrapped else "by collectives of the script's own"
    return CODES.finding(code, "ok", f"Gradients are averaged over {len(ranks)} hosts {how}.", **numbers)


def clip(ranks: Ranks) -> Finding:
    """Judge whether every rank clips, to the same norm, what all ranks have averaged."""
    code, clips = "hosts.clip", clips_of(ranks)
    counts = {rank: len(found) for rank, found in clips.items()}
    limits = {rank: tuple(sorted({(c["by"], c["limit"]) for c in found}, key=str)) for rank, found in clips.items()}
    evidence = {"calls": counts, "limits": {rank: [list(pair) for pair in found] for rank, found in limits.items()}}
    clipping = [rank for rank, count in counts.items() if count]
    numbers: dict[str, Any] = {
        "value": float(len(clipping)), "unit": "hosts", "threshold": float(len(ranks)), "evidence": evidence,
    }  # fmt: skip
    on_every = ("Clip on every host: each has the same averaged gradient, and so the same norm.",)
    if not clipping:
        return _clipped_by_hand(ranks, numbers, on_every)
    if len(set(counts.values())) > 1:
        often = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
        said = f"Not every host clips every gradient: calls {often}. From the first clipped update on they train different models."
        return CODES.finding(code, "fail", said, advice=on_every, **numbers)
    if len(set(limits.values())) > 1:
        said = "; ".join(f"rank {rank} {_limits(pairs)}" for rank, pairs in limits.items())
        advice = ("Give all hosts the same max_grad_norm.",)
        return CODES.finding(code, "fail", f"Hosts clip to different norms: {said}.", advice=advice, **numbers)
    early = clipped_before_averaging(ranks)
    if early is not None:
        said = f"Each host clips its own gradient before the hosts average theirs (update {early})."
        advice = ("Average first, then clip: the threshold is for the gradient of the whole batch.",)
        return CODES.finding(code, "fail", said, step=early, advice=advice, **numbers)
    return CODES.finding(code, "ok", f"Every host clips alike: {_limits(limits[clipping[0]])}.", **numbers)


def _clipped_by_hand(ranks: Ranks, numbers: Mapping[str, Any], advice: Sequence[str]) -> Finding:
    """Judge what was seen of gradients where torch's functions clip none: whether they change between backward and update."""
    code, apart = "hosts.clip", changed_apart(ranks)
    if apart is not None:
        return CODES.finding(
            code, "fail", f"Gradients are the same on all hosts after backward, and differ when update {apart} uses them: some hosts "
            "change them in between, as a clipping written by hand does.", step=apart, advice=advice, **{**numbers, "threshold": 0.0},
        )  # fmt: skip
    numbers = {**numbers, "threshold": None}
    if not sharded(ranks) and any(_hidden(ranks, key) for key in seen_by_all(ranks, "gradients")):
        return CODES.not_measured(
            code, "the script changes gradients before it averages them itself. Torch's functions do not "
            "clip them; whether a clipping written by hand does is not to be seen", **numbers,
        )  # fmt: skip
    said = "No host clips gradients with torch's functions, and what else changes them does so alike."
    return CODES.finding(code, "ok", said, **numbers)


def _hidden(ranks: Ranks, key: tuple[int, int]) -> bool:
    """Tell whether gradients that the script averages itself are changed before that, by what nobody can see."""
    backward, joining = (values_of(ranks, key, field) for field in ("after_backward", "at_joining"))
    averaged = None not in backward and len(set(backward)) > 1 and same(ranks, key, "at_step")
    return averaged and joining != backward


def _limits(pairs: Sequence[tuple[str, float | None]]) -> str:
    what = {"clip_grad_value_": "values"}
    return ", ".join(f"{what.get(by, 'the norm')} at {limit:g}" for by, limit in pairs if limit is not None)


def straggler(ranks: Ranks, *, ratio: float, share: float, min_steps: int, cores: int | None) -> Finding:
    """Judge whether one rank makes the others wait: in how many steps it is busy so much longer than they are in the same step."""
    code = "hosts.straggler"
    busy = {r["rank"]: np.asarray(r["times"]["busy_s"], dtype=np.float64) for r in ranks}
    if local_gradients(ranks):
        return CODES.finding(code, "ok", "No host waits for another: their gradients are not averaged.")
    steps = min((len(times) for times in busy.values()), default=0)
    if len(busy) < 2 or steps < min_steps:
        return CODES.not_measured(code, f"{steps} timed steps on {len(busy)} hosts; {min_steps} on 2 are needed")
    table = np.stack([times[:steps] for times in busy.values()])
    if not np.isfinite(table).all():
        return CODES.not_measured(code, "some times are no numbers")
    names = list(busy)
    others = np.stack([np.median(np.delete(table, k, axis=0), axis=0) for k in range(len(names))])
    late = ((table >= ratio * others) & (table > others)).mean(axis=1)
    medians = np.median(table, axis=1)
    worst = max(range(len(names)), key=lambda k: (late[k], medians[k]))
    found = float(late[worst])
    few = cores and cores < len(ranks)
    shared = (
        f" {len(ranks)} hosts share {cores} cores here, so the times are not those of {len(ranks)} machines."
        if few
        else ""
    )
    evidence = {
        "busy_s": dict(zip(names, medians.tolist(), strict=True)), "late_share": dict(zip(names, late.tolist(), strict=True)),
        "ratio": ratio, "steps": steps, "cores": cores,
        "step_s": {r["rank"]: float(np.median(r["times"]["step_s"])) for r in ranks},
    }  # fmt: skip
    numbers: dict[str, Any] = {"value": found, "unit": "share of steps", "threshold": share, "evidence": evidence}
    if found >= share:
        return CODES.finding(
            code, "warn", f"The others wait for rank {names[worst]}: in {found:.0%} of the steps it is busy {ratio:g} times as long as they are, or longer"
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
    return CODES.finding(code, "ok", f"No host makes the others wait{most}{shared}", **numbers)
