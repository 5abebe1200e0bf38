"""`hosts.sharding`, `hosts.set_epoch`, `hosts.data_seed`: what each host is given to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.hosts.diagnose_area import evaluation_passes, host_finding, named, training_passes
from workbench.topics.hosts.diagnose_shards import Shards, shards_of

__all__ = ["data_seed", "set_epoch", "sharding", "training_shards"]

Ranks = Sequence[Mapping[str, Any]]
FIRST = 8
"""Indices shown of each host."""


def training_shards(ranks: Ranks) -> list[Shards]:
    """Return the shards of every pass that all hosts made over the training data."""
    passes = [training_passes(r) for r in ranks]
    augmented = any(row["where"] == "item" for r in ranks for row in r["draws"])
    count = min((len(found) for found in passes), default=0)
    return [
        shards_of({r["rank"]: found[k] for r, found in zip(ranks, passes, strict=True)}, augmented=augmented)
        for k in range(count)
    ]


def sharding(ranks: Ranks, *, content_share: float) -> Finding:
    """Judge whether the hosts' shares of the training data are disjoint and complete (P7.4)."""
    found = training_shards(ranks)
    if not found:
        return host_finding(
            "sharding", "not_measured", "Not measured: no training data came through a torch DataLoader on every host."
        )
    compared = [shards for shards in found if not shards.why_not]
    if not compared:
        return host_finding("sharding", "not_measured", f"Not measured: {found[0].why_not}.")
    found = compared
    if any(shards.with_replacement for shards in found):
        return host_finding(
            "sharding", "not_measured", "Not measured: examples are drawn with replacement, so there are no shares."
        )
    worst = max(found, key=lambda shards: len(shards.twice))
    twice, seen = len(worst.twice), max(1, len(worst.holders))
    sampler = sorted({p["sampler"] for r in ranks for p in training_passes(r)})
    padding = len(ranks) - 1
    allowed = padding if worst.by == "index" else max(padding, int(content_share * seen))
    evidence: dict[str, Any] = {
        "examples": {rank: len(set(examples)) for rank, examples in worst.examples.items()}, "on_several_hosts": twice,
        "union": len(worst.holders), "size": worst.size, "compared_by": worst.by, "samplers": sampler,
        "passes": len(found), "missing": [shards.missing for shards in found],
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "value": twice / seen,
        "unit": "share",
        "threshold": allowed / seen,
        "evidence": evidence,
    }
    if twice > allowed:
        whole = all(len(set(examples)) == seen for examples in worst.examples.values())
        what = "Every host trains on all of them" if whole else "The shares overlap"
        return host_finding(
            "sharding", "fail", f"{twice:,} of {seen:,} examples are on more than one host in one epoch. {what}.",
            advice=(
                "Give each host its share: DistributedSampler(data) with the rank and the number of the process group.",
                "Or share out the files that hold the data, so that no host reads what it does not need.",
            ),
            **numbers,
        )  # fmt: skip
    missing = _missing(found)
    if missing is not None:
        held_out = _evaluated(ranks, found[0])
        dropped = _dropped(ranks)
        lost = max(0, missing - held_out)
        if lost > max(padding, dropped):
            return host_finding(
                "sharding", "warn", f"{lost:,} of {worst.size:,} examples are on no host.",
                advice=("Look at how the shares are cut: their union has to be the data set, but for what was held out on purpose.",),
                **(numbers | {"value": lost / max(1, worst.size or 1), "threshold": max(padding, dropped) / max(1, worst.size or 1)}),
            )  # fmt: skip
        once = max(shards.missing or 0 for shards in found) - held_out
        left = (
            f" but for the {lost} of incomplete last batches"
            if lost
            else f", in {len(found)} epochs of which one leaves out {once:,}"
            if once > 0
            else ""
        )
        trained = (worst.size or seen) - min(held_out, missing)
        return host_finding(
            "sharding",
            "ok",
            f"The {len(ranks)} hosts' shares are disjoint, and together they are all {trained:,} examples{left}.",
            **numbers,
        )
    how = "by their contents" if worst.by == "content" else "as far as the run went"
    return host_finding(
        "sharding",
        "ok",
        f"The {len(ranks)} hosts' shares are disjoint, {how} ({seen:,} examples); whether they are complete was not to be seen.",
        **numbers,
    )


def _missing(found: Sequence[Shards]) -> int | None:
    """Return how many examples were on no host in any pass; None where that cannot be known."""
    seen: dict[int, set[Any]] = {}
    for shards in found:
        if shards.missing is not None and shards.size is not None:
            seen.setdefault(shards.size, set()).update(shards.holders)
    return min((max(0, size - len(examples)) for size, examples in seen.items()), default=None)


def _evaluated(ranks: Ranks, shards: Shards) -> int:
    """Return how many examples of the same data set were evaluated and never trained on: they were held out."""
    names = {(p["dataset"]["hash"], p["dataset"]["length"]) for r in ranks for p in training_passes(r)}
    held = {
        i for r in ranks for p in evaluation_passes(r)
        if (p["dataset"]["hash"], p["dataset"]["length"]) in names for i in p["indices"]
    }  # fmt: skip
    return len(held - set(shards.holders)) if shards.by == "index" else 0


def _dropped(ranks: Ranks) -> int:
    """Return how many examples incomplete last batches hold at most; a sampler may leave out less than a batch of all hosts."""
    last = [training_passes(r)[0] for r in ranks if training_passes(r)]
    whole = sum(int(p["batch_size"] or 0) for p in last)
    return whole if any(p["drop_last"] and not p["planned"] for p in last) else max(0, whole - 1)


def set_epoch(ranks: Ranks) -> Finding:
    """Judge whether epochs have orders of their own (P7.6)."""
    same: list[int] = []
    looked = called = unshuffled = once = 0
    for rank in ranks:
        passes = [p for p in training_passes(rank) if p["distributed"]]
        for own in _epochs(passes):
            if own[0]["shuffles"] is False:
                unshuffled += 1
            elif len(own) < 2:
                once += 1
                called += int(own[0]["set_epoch_calls"] > 0)
            else:
                looked += 1
                if _order(own[0]) == _order(own[1]) and len(_order(own[0])) > 1:
                    same.append(rank["rank"])
    if not any(training_passes(r) for r in ranks):
        return host_finding(
            "set_epoch", "not_measured", "Not measured: no training data came through a torch DataLoader."
        )
    calls = {r["rank"]: max((p["set_epoch_calls"] for p in r["passes"]), default=0) for r in ranks}
    epochs = {r["rank"]: [p["epoch"] for p in training_passes(r) if p["distributed"]][:20] for r in ranks}
    numbers: dict[str, Any] = {
        "value": float(len(same)), "unit": "hosts", "threshold": 0, "evidence": {"set_epoch_calls": calls, "epochs": epochs},
    }  # fmt: skip
    if same:
        return host_finding(
            "set_epoch", "fail", f"Every epoch comes in the order of the first on {named(same)}: set_epoch was "
            f"{'never called' if not any(calls.values()) else 'called with the same number'}.",
            advice=("Call sampler.set_epoch(epoch) before each epoch.",), **numbers,
        )  # fmt: skip
    if looked:
        return host_finding("set_epoch", "ok", "The second epoch comes in an order of its own on all hosts.", **numbers)
    if once and called == once:
        return host_finding(
            "set_epoch", "ok", "set_epoch was called before the first epoch, the only one that was seen.", **numbers
        )
    if once:
        return host_finding(
            "set_epoch",
            "not_measured",
            "Not measured: the run was over before a second epoch began. Train for more steps.",
            **numbers,
        )
    why = "the sampler does not shuffle" if unshuffled else "no sampler has a set_epoch"
    return host_finding("set_epoch", "ok", f"Nothing to call: {why}.", **numbers)


def _epochs(passes: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return passes over the same data one after the other, through one loader or a new one for each epoch; a new optimizer begins anew."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for one in passes:
        data = one["dataset"]
        own = found.setdefault((data["kind"], data["length"], data["hash"], one["sampler"], one.get("optimizers")), [])
        if not own or one["steps"][0] >= own[-1]["steps"][1]:  # and not one beside the other
            own.append(one)
    return list(found.values())


def _order(one: Mapping[str, Any]) -> list[Any]:
    return list(one["indices"] if one["exhausted"] else one["planned"] or one["indices"])[:4096]


def data_seed(ranks: Ranks) -> Finding:
    """Judge whether hosts draw random numbers of their own for their data (P7.6)."""
    passes = {r["rank"]: training_passes(r) for r in ranks}
    first = {rank: list(found[0]["indices"][:FIRST]) for rank, found in passes.items() if found}
    draws: dict[tuple[str, str], dict[int, set[int]]] = {}
    for rank in ranks:
        for row in rank["draws"]:
            draws.setdefault((row["generator"], row["where"]), {}).setdefault(rank["rank"], set()).add(row["state"])
    shared = {key: found for key, found in ((key, _sharing(states)) for key, states in draws.items()) if found}
    drawn = sorted(
        {f"{generator} ({'in the dataset' if where == 'item' else 'on the batch'})" for generator, where in draws}
    )
    evidence = {
        "first_indices": first,
        "drawn_from": drawn,
        "alike": {f"{g}, {w}": sorted(r) for (g, w), r in shared.items()},
    }
    most = max((len(found) for found in shared.values()), default=0)
    numbers: dict[str, Any] = {"value": float(most), "unit": "hosts", "threshold": 0, "evidence": evidence}
    if shared:
        (generator, where), found = next(iter(shared.items()))
        what = "examples are prepared" if where == "item" else "batches are augmented"
        return host_finding(
            "data_seed", "fail", f"{named(found)} draw the same random numbers where {what} (generator: {generator}).".capitalize(),
            advice=(
                "Seed what prepares the data with the rank in it (per_host_seed), after the model was initialised from the shared seed.",
                "A generator that a dataset makes for itself with a constant is the same on all hosts.",
            ),
            **numbers,
        )  # fmt: skip
    replaced = [s for s in training_shards(ranks) if s.with_replacement and s.alike]
    if replaced:
        return host_finding(
            "data_seed", "fail", "Hosts draw the same examples in the same order, with replacement.",
            advice=("Seed the sampler with the rank in it (per_host_seed).",), **numbers,
        )  # fmt: skip
    if not first and not draws:
        return host_finding(
            "data_seed", "not_measured", "Not measured: no training data came through a torch DataLoader."
        )
    said = (
        f"Each host draws from a random state of its own: {', '.join(drawn)}."
        if drawn
        else "Nothing is drawn while examples are prepared."
    )
    return host_finding("data_seed", "ok", said, **numbers)


def _sharing(states: Mapping[int, set[int]]) -> set[int]:
    """Return the hosts that drew from a state from which another host drew as well."""
    return {a for a in states for b in states if a != b and states[a] & states[b]}
