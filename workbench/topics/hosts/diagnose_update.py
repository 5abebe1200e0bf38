"""The codes of `hosts`, and `hosts.init_seed`, `.not_wrapped`, `.clip`, `.straggler`: is one model trained, by one update, at one speed?"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from workbench.findings.finding import Codes, Finding

CODES = Codes({
    "hosts.init_seed": "P7.5", "hosts.data_seed": "P7.6", "hosts.set_epoch": "P7.6", "hosts.sharding": "P7.4", "hosts.writers": "P7.2",
    "hosts.checkpoint_writers": "P7.2", "hosts.evaluation": "P7.1", "hosts.buffers": "P7.3", "hosts.clip": "P7.1",
    "hosts.straggler": "P7.1", "hosts.not_wrapped": "P7.1",
})  # fmt: skip
Row = Mapping[str, Any]
Ranks = Sequence[Row]  # the facts of every rank


def named(ranks: Iterable[int]) -> str:
    """Return "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    *first, last = map(str, sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def training_passes(rank: Row) -> list[Row]:
    """Return the passes over loaders in which updates were made."""
    return [p for p in rank["passes"] if p["grad"] and p["steps"][1] > p["steps"][0]]


def evaluation_passes(rank: Row) -> list[Row]:
    """Return the passes over loaders in which nothing was trained."""
    return [p for p in rank["passes"] if p["grad"] is False or (p["exhausted"] and p["steps"][1] == p["steps"][0])]


def init_seed(ranks: Ranks) -> Finding:
    """Judge whether all ranks start from the same parameters (P7.5)."""
    code = "hosts.init_seed"
    own = min((optimizer for step, optimizer in _updates(ranks, "parameters") if step == 0), default=0)
    first = {
        r["rank"]: next((row for row in r["parameters"] if (row["step"], row["optimizer"]) == (0, own)), None)
        for r in ranks
    }
    missing = [rank for rank, row in first.items() if row is None]
    if missing:
        return CODES.not_measured(code, f"no optimizer made an update on {named(missing)}")
    if any(row["sharded"] for row in first.values() if row) or _sharded(ranks):
        return CODES.not_measured(code, "each rank holds a part of the parameters by design")
    hashes = {rank: row["hash"] for rank, row in first.items() if row}
    models: dict[str, list[int]] = {}
    for rank, value in hashes.items():
        models.setdefault(value, []).append(rank)
    groups = sorted(models.values(), key=lambda group: (-len(group), group))
    before = {r["rank"]: r["wrappers"][0].get("before") for r in ranks if r["wrappers"]}
    evidence = {"parameters_at_step_0": hashes, "before_the_wrapper": before}
    say = partial(CODES.finding, code, value=len(groups), unit="models", threshold=1, step=0, evidence=evidence)
    if len(groups) == 1:
        sent = " They differed before the wrapper sent those of rank 0 around." if len(set(before.values())) > 1 else ""
        return say("ok", f"Parameters are equal on all {len(hashes)} ranks before the first update.{sent}")
    against = " against ".join(named(group) for group in groups)
    advice: tuple[str, ...] = (
        "Seed the initialisation alike on all ranks (shared_seed), not by the rank.",
        "Or let DistributedDataParallel send the parameters of rank 0 around: init_sync=True, and no change to them after it.",
    )
    return say("fail", f"{len(hashes)} ranks start from {len(groups)} different models: {against}.", advice=advice)


def not_wrapped(ranks: Ranks) -> Finding:
    """Judge whether gradients are averaged over the ranks."""
    alone = [r["rank"] for r in ranks if not r["initialised"]]
    raw, wrapped = ({r["rank"]: r["calls"][kind] for r in ranks} for kind in ("raw", "wrapped"))
    num_raw, num_wrapped, (local, _) = sum(raw.values()), sum(wrapped.values()), _apart(ranks)
    evidence: dict[str, Any] = {"raw_calls": raw, "wrapped_calls": wrapped, "gradients_differ_at": local}
    say = partial(
        CODES.finding, "hosts.not_wrapped", value=float(num_raw), unit="calls", threshold=0, evidence=evidence
    )
    if alone:
        said = f"init_process_group was never called on {named(alone)}: {len(ranks)} processes train a model each."
        advice: tuple[str, ...] = (
            "Call torch.distributed.init_process_group at the start, and wrap the model in DistributedDataParallel.",
            "torchrun tells each process its rank in the environment: RANK, WORLD_SIZE, LOCAL_RANK.",
        )
        return say("fail", said, advice=advice)
    if num_raw:
        times = f"{num_raw} times in training, {num_wrapped} times through its wrapper"
        said = f"The raw module was called {times}: what it computes is not averaged over the ranks."
        advice = ("Call the wrapped model in training; model.module is for evaluation and for state_dict().",)
        first = min((step for r in ranks for step in r["raw_steps"]), default=None)
        return say("fail", said, step=first, advice=advice)
    if _sharded(ranks):
        return say("ok", "The model is sharded over the ranks and called as a whole.")
    if not any(r["gradients"] for r in ranks):
        return say("not_measured", "Not measured: no optimizer made an update.")
    if local:
        look = "the wrapper is there, so look for no_sync() around every backward"
        look = look if num_wrapped else "no model is wrapped"
        said = f"Gradients differ between ranks at update {local[0]}: they are not averaged ({look})."
        advice = ("Wrap the model in DistributedDataParallel, or average the gradients before each update.",)
        return say("fail", said, step=local[0], advice=advice)
    drift = _drift(ranks)
    if drift is not None:
        evidence["parameters_differ_at"] = drift
        said = f"Parameters differ between ranks from update {drift} on, though gradients and clipping are the same."
        advice = ("Look for code that changes parameters, lr or the optimizer's state on some ranks only.",)
        return say("fail", said, step=drift, advice=advice)
    how = "through the wrapper" if num_wrapped else "outside of a wrapper, by collectives of the training loop"
    return say("ok", f"Gradients are averaged over {len(ranks)} ranks {how}.")


def clip(ranks: Ranks) -> Finding:
    """Judge whether every rank clips, to the same norm, what all ranks have averaged."""
    clips = _clips(ranks)
    counts = {rank: len(found) for rank, found in clips.items()}
    limits = {rank: tuple(sorted({(c["by"], c["limit"]) for c in found}, key=str)) for rank, found in clips.items()}
    evidence = {"calls": counts, "limits": {rank: [list(pair) for pair in found] for rank, found in limits.items()}}
    clipping = [rank for rank, count in counts.items() if count]
    say = partial(CODES.finding, "hosts.clip", value=float(len(clipping)), unit="ranks", evidence=evidence)
    on_every = ("Clip on every rank: each has the same averaged gradient, and so the same norm.",)
    if not clipping:
        return _clipped_by_hand(ranks, say, on_every)
    say = partial(say, threshold=float(len(ranks)))
    if len(set(counts.values())) > 1:
        often = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
        said = f"Not every rank clips every gradient: calls {often}. From the first clipped update on they train different models."
        return say("fail", said, advice=on_every)
    if len(set(limits.values())) > 1:
        said = "; ".join(f"rank {rank} {_limits(pairs)}" for rank, pairs in limits.items())
        advice: tuple[str, ...] = ("Give all ranks the same max_grad_norm.",)
        return say("fail", f"Ranks clip to different norms: {said}.", advice=advice)
    seen = _updates(ranks).items()
    early = [step for (step, _), rows in seen if _differ(rows, "before_clip") and not _differ(rows, "at_step")]
    if early:
        said = f"Each rank clips its own gradient before the ranks average theirs (update {early[0]})."
        advice = ("Average first, then clip: the threshold is for the gradient of the whole batch.",)
        return say("fail", said, step=early[0], advice=advice)
    return say("ok", f"Every rank clips alike: {_limits(limits[clipping[0]])}.")


def _clipped_by_hand(ranks: Ranks, say: Any, advice: Sequence[str]) -> Finding:
    """Judge what was seen of gradients where torch's functions clip none: whether they change between backward and update."""
    _, changed = _apart(ranks)
    found: Finding
    if changed:
        said = f"Gradients are the same on all ranks after backward, and differ when update {changed[0]} uses them: some ranks change them in between, as hand-written clipping does."
        found = say("fail", said, step=changed[0], advice=advice, threshold=0.0)
        return found

    def hidden(rows: Ranks) -> bool:
        """Tell whether gradients that the script averages itself are changed before that, by what nobody can see."""
        backward = [row.get("after_backward") for row in rows]
        averaged = None not in backward and _differ(rows, "after_backward") and _same(rows, "at_step")
        return averaged and [row.get("at_joining") for row in rows] != backward

    if not _sharded(ranks) and any(map(hidden, _updates(ranks).values())):
        said = "Not measured: the script changes gradients before it averages them itself. Torch's functions do not clip them; whether hand-written clipping does cannot be seen."
        found = say("not_measured", said)
    else:
        found = say("ok", "No rank calls a clipping function of torch, and all ranks update with the same gradients.")
    return found


def _limits(pairs: Sequence[tuple[str, float | None]]) -> str:
    what = {"clip_grad_value_": "values"}
    return ", ".join(f"{what.get(by, 'the norm')} at {limit:g}" for by, limit in pairs if limit is not None)


def straggler(ranks: Ranks, *, ratio: float, share: float, min_steps: int, cores: int | None) -> Finding:
    """Judge whether one rank makes the others wait: in how many steps it is busy so much longer than they are in the same step."""
    code = "hosts.straggler"
    busy = {r["rank"]: np.asarray(r["times"]["busy_s"], dtype=np.float64) for r in ranks}
    if _apart(ranks)[0]:
        return CODES.finding(code, "ok", "No rank waits for another: their gradients are not averaged.")
    steps = min((len(times) for times in busy.values()), default=0)
    if len(busy) < 2 or steps < min_steps:
        return CODES.not_measured(code, f"{steps} timed steps on {len(busy)} ranks; {min_steps} on 2 are needed")
    table, names = np.stack([times[:steps] for times in busy.values()]), list(busy)
    if not np.isfinite(table).all():
        return CODES.not_measured(code, "some times are no numbers")
    others = np.stack([np.median(np.delete(table, k, axis=0), axis=0) for k in range(len(names))])
    late = ((table >= ratio * others) & (table > others)).mean(axis=1)
    medians = np.median(table, axis=1)
    worst = max(range(len(names)), key=lambda k: (late[k], medians[k]))
    found = float(late[worst])
    shared = ""
    if cores and cores < len(ranks):
        shared = f" {len(ranks)} ranks share {cores} cores here, so the times are not those of {len(ranks)} machines."
    step_s = {r["rank"]: float(np.median(r["times"]["step_s"])) for r in ranks}
    evidence = {
        "busy_s": dict(zip(names, medians.tolist(), strict=True)), "late_share": dict(zip(names, late.tolist(), strict=True)),
        "ratio": ratio, "steps": steps, "cores": cores, "step_s": step_s,
    }  # fmt: skip
    say = partial(CODES.finding, code, value=found, unit="share of steps", threshold=share, evidence=evidence)
    often = f"busy {ratio:g} times as long as they are, or longer"
    if found >= share:
        medianly = f"median {1e3 * medians[worst]:.3g} ms against {1e3 * np.median(others[worst]):.3g} ms"
        said = (
            f"The others wait for rank {names[worst]}: in {found:.0%} of the steps it is {often} ({medianly}).{shared}"
        )
        advice: tuple[str, ...] = (
            "Look at that rank: data that are farther away, more work per example, a slower or busier machine.",
            "Every step lasts as long as that of the slowest rank.",
        )
        return say("warn", said, advice=advice)
    waits = min(1 - medians[k] / step_s[name] if step_s[name] > 0 else 0.0 for k, name in enumerate(names))
    idle = f" Communication takes {waits:.0%} of a step or more on every rank." * bool(waits >= 0.5)
    most = f"no rank takes {ratio:g} times as long as the others in any step."
    if found:
        most = f"rank {names[worst]} takes {ratio:g} times as long as the others in {found:.0%} of the steps (limit: {share:.0%})."
    return say("ok", f"No straggler: {most}{idle}{shared}")


def _sharded(ranks: Ranks) -> bool:
    """Tell whether each rank holds a part of the parameters by design."""
    return any(w.get("sharded") for r in ranks for w in (*r["wrappers"], *r["parameters"]))


def _together(ranks: Ranks) -> float:
    """Return the step from which update k of one rank is not that of the others: with uneven inputs, where the first data end."""
    if len({r["steps"] for r in ranks}) < 2:
        return math.inf
    ends = [p["steps"][1] for r in ranks for p in training_passes(r)[:1]]
    return max(1, min(*ends, *(r["steps"] for r in ranks))) if ends else 1


def _updates(ranks: Ranks, kind: str = "gradients") -> dict[tuple[int, int], list[Row]]:
    """Return what every rank wrote of an update, in "parameters" or "gradients": (step, optimizer) -> a row a rank."""
    last = _together(ranks)
    rows = [{(row["step"], row["optimizer"]): row for row in r[kind] if row["step"] < last} for r in ranks]
    return {key: [own[key] for own in rows] for key in sorted(set.intersection(*map(set, rows)))}


def _clips(ranks: Ranks) -> dict[int, list[Row]]:
    """Return what each rank clips; a norm that nothing exceeds only measures."""
    last = _together(ranks)
    return {
        r["rank"]: [c for c in r["clips"] if c["limit"] not in ("inf", math.inf) and c["step"] < last] for r in ranks
    }


def _differ(rows: Sequence[Row], *fields: str) -> bool:
    """Tell whether ranks wrote different values, in each of these fields."""
    return all(len({row.get(field) for row in rows}) > 1 for field in fields)


def _same(rows: Sequence[Row], field: str) -> bool:
    return not _differ(rows, field) and rows[0].get(field) is not None


def _apart(ranks: Ranks) -> tuple[list[int], list[int]]:
    """Return the updates whose gradients differ between ranks, before torch's clipping and after it: from backward on, and only later."""
    differ = [(step, rows) for (step, _), rows in _updates(ranks).items() if _differ(rows, "before_clip", "at_step")]
    found: dict[bool, list[int]] = {False: [], True: []}
    for step, rows in differ:
        found[_same(rows, "after_backward")].append(step)
    return found[False], found[True]


def _drift(ranks: Ranks) -> int | None:
    """Return the first update before which parameters differ for no reason that has a code of its own."""
    clips = _clips(ranks).values()
    counts, limits = {len(found) for found in clips}, {str(sorted({str(c["limit"]) for c in found})) for found in clips}
    if len(counts) > 1 or len(limits) > 1 or _apart(ranks)[1]:
        return None
    parameters = _updates(ranks, "parameters").items()
    first = next((step for (step, _), rows in parameters if _differ(rows, "hash")), 0)
    return first if first > 0 else None
