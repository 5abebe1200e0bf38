"""`hosts.sharding`, `.set_epoch`, `.data_seed`, `.evaluation`: what each rank is given to train on, and what it evaluates."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.findings.finding import Finding
from workbench.topics.hosts.diagnose_update import CODES, Ranks, Row, evaluation_passes, named, training_passes

FIRST = 8  # indices shown of each rank


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Which examples each rank saw in one pass over the data."""

    # of each rank, in their order: positions in the data set they share, or hashes of their content
    examples: Mapping[int, Sequence[Any]]
    by: str  # "index" or "content"
    size: int | None = None  # of the data that the ranks share out; None where it is not known
    whole: bool = False  # whether each rank's part is complete, and not what a short run saw of it
    why_not: str | None = None  # why ranks cannot be compared; None where they can

    @property
    def holders(self) -> Counter[Any]:
        """On how many ranks each example was."""
        return Counter(example for found in self.examples.values() for example in set(found))

    @property
    def twice(self) -> list[Any]:
        """Examples that were on more than one rank."""
        return [example for example, ranks in self.holders.items() if ranks > 1]

    @property
    def missing(self) -> int | None:
        """Examples that were on no rank; None where that cannot be known."""
        known = self.size is not None and self.whole and self.by == "index"
        return max(0, (self.size or 0) - len(self.holders)) if known else None

    @property
    def everywhere(self) -> bool:
        """Whether every rank saw all examples."""
        return all(len(set(examples)) == len(self.holders) for examples in self.examples.values())

    @property
    def with_replacement(self) -> bool:
        """Whether a rank drew examples more than once in one pass, beyond what padding explains."""
        return any(len(found) - len(set(found)) >= len(self.examples) for found in self.examples.values())


def _shards(passes: Mapping[int, Row], *, augmented: bool) -> Shards:
    """Return the examples of one pass of all ranks: positions where all have the same data set, else contents."""
    sets = [p["dataset"] for p in passes.values()]
    same = len({(found["hash"], found["length"], found["kind"]) for found in sets}) == 1
    unlike = sets[0]["hash"] is None and _same_position_other_content(passes)
    if same and not unlike and not any(found["stream"] for found in sets):
        whole = all(p["exhausted"] or p["planned"] for p in passes.values())
        seen = {rank: _order(p) for rank, p in passes.items()}
        # the smallest part of the data that all ranks have in common
        levels = [p.get("levels") or [] for p in passes.values()]
        common = (level[0] for level in levels[0] if all(level in other for other in levels[1:]))
        return Shards(examples=seen, by="index", size=next(common, sets[0]["length"]), whole=whole)
    content, why = {rank: list(p["contents"]) for rank, p in passes.items()}, None
    if augmented:
        why = "each rank has a data set of its own, and augmentation hides which examples are alike"
    elif not all(content.values()):
        why = "each rank has a data set of its own, and its examples hold no numbers to compare"
    return Shards(examples=content, by="content", why_not=why)


def _same_position_other_content(passes: Mapping[int, Row]) -> bool:
    """Tell whether ranks have different examples at the same positions: shards that were made before the loader."""
    known: dict[Any, str] = {}
    votes: Counter[bool] = Counter()
    for found in passes.values():
        for position, content in zip(found["indices"], found["contents"], strict=False):
            if position in known:
                votes[known[position] == content] += 1
            known.setdefault(position, content)
    return votes[False] > votes[True]


def training_shards(ranks: Ranks) -> list[Shards]:
    """Return the shards of every pass that all ranks made over the training data."""
    augmented = any(row["where"] == "item" for r in ranks for row in r["draws"])
    names, passes = [r["rank"] for r in ranks], [training_passes(r) for r in ranks]
    return [_shards(dict(zip(names, one, strict=True)), augmented=augmented) for one in zip(*passes, strict=False)]


def sharding(ranks: Ranks, *, content_share: float) -> Finding:
    """Judge whether the ranks' shares of the training data are disjoint and complete (P7.4)."""
    code, shares = "hosts.sharding", training_shards(ranks)
    if not shares:
        return CODES.not_measured(code, "no training data came through a torch DataLoader on every rank")
    found = [shards for shards in shares if not shards.why_not]
    if not found:
        return CODES.not_measured(code, str(shares[0].why_not))
    if any(shards.with_replacement for shards in found):
        return CODES.not_measured(code, "examples are drawn with replacement, so there are no shares")
    worst = max(found, key=lambda shards: len(shards.twice))
    twice, seen, padding = len(worst.twice), max(1, len(worst.holders)), len(ranks) - 1
    allowed = padding if worst.by == "index" else max(padding, int(content_share * seen))
    evidence: dict[str, Any] = {
        "examples": {rank: len(set(examples)) for rank, examples in worst.examples.items()}, "on_several_hosts": twice,
        "union": len(worst.holders), "size": worst.size, "compared_by": worst.by,
        "samplers": sorted({p["sampler"] for r in ranks for p in training_passes(r)}),
        "passes": len(found), "missing": [shards.missing for shards in found],
    }  # fmt: skip
    say = partial(CODES.finding, code, unit="share", evidence=evidence)
    known = {"value": twice / seen, "threshold": allowed / seen}
    if twice > allowed:
        what = "Every rank trains on all of them" if worst.everywhere else "The shares overlap"
        advice: tuple[str, ...] = (
            "Give each rank its share: DistributedSampler(data) with the rank and the number of the process group.",
            "Or share out the files that hold the data, so that no rank reads what it does not need.",
        )
        said = f"{twice:,} of {seen:,} examples are on more than one rank in one epoch. {what}."
        return say("fail", said, advice=advice, **known)
    missing = _missing(found)
    if missing is None:
        how = "by their contents" if worst.by == "content" else "as far as the run went"
        said = f"The {len(ranks)} ranks' shares are disjoint, {how} ({seen:,} examples); whether they are complete could not be determined."
        return say("ok", said, **known)
    held_out = _held_out(ranks, found[0])
    lost, spare, size = max(0, missing - held_out), max(padding, _dropped(ranks)), max(1, worst.size or 1)
    if lost > spare:
        advice = (
            "Look at how the shares are cut: their union has to be the data set, but for what was held out on purpose.",
        )
        said = f"{lost:,} of {worst.size:,} examples are on no rank."
        return say("warn", said, advice=advice, value=lost / size, threshold=spare / size)
    once = max(shards.missing or 0 for shards in found) - held_out
    left = f", in {len(found)} epochs of which one leaves out {once:,}" if once > 0 else ""
    left = f" but for the {lost} of incomplete last batches" if lost else left
    trained = (worst.size or seen) - min(held_out, missing)
    said = f"The {len(ranks)} ranks' shares are disjoint, and together they are all {trained:,} examples{left}."
    return say("ok", said, **known)


def _missing(found: Sequence[Shards]) -> int | None:
    """Return how many examples were on no rank in any pass; None where that cannot be known."""
    seen: dict[int, set[Any]] = {}
    for shards in found:
        if shards.missing is not None and shards.size is not None:
            seen.setdefault(shards.size, set()).update(shards.holders)
    return min((max(0, size - len(examples)) for size, examples in seen.items()), default=None)


def _held_out(ranks: Ranks, shards: Shards) -> int:
    """Return how many examples of the same data set were evaluated and never trained on."""

    def key(one: Row) -> tuple[Any, Any]:
        return one["dataset"]["hash"], one["dataset"]["length"]

    trained = {key(p) for r in ranks for p in training_passes(r)}
    held = {i for r in ranks for p in evaluation_passes(r) if key(p) in trained for i in p["indices"]}
    return len(held - set(shards.holders)) if shards.by == "index" else 0


def _dropped(ranks: Ranks) -> int:
    """Return how many examples incomplete last batches hold at most; a sampler may leave out less than a batch of all ranks."""
    last = [passes[0] for r in ranks if (passes := training_passes(r))]
    whole = sum(int(p["batch_size"] or 0) for p in last)
    return whole if any(p["drop_last"] and not p["planned"] for p in last) else max(0, whole - 1)


def set_epoch(ranks: Ranks) -> Finding:
    """Judge whether epochs have orders of their own (P7.6)."""
    code, same, seen = "hosts.set_epoch", list[int](), Counter[str]()
    for rank in ranks:
        for own in _epochs([p for p in training_passes(rank) if p["distributed"]]):
            if own[0]["shuffles"] is False:
                seen["unshuffled"] += 1
            elif len(own) < 2:
                seen["once"] += 1
                seen["called"] += int(own[0]["set_epoch_calls"] > 0)
            else:
                seen["twice"] += 1
                first, second = (_order(p)[:4096] for p in own[:2])
                if first == second and len(first) > 1:
                    same.append(rank["rank"])
    if not any(training_passes(r) for r in ranks):
        return CODES.not_measured(code, "no training data came through a torch DataLoader")
    calls = {r["rank"]: max((p["set_epoch_calls"] for p in r["passes"]), default=0) for r in ranks}
    epochs = {r["rank"]: [p["epoch"] for p in training_passes(r) if p["distributed"]][:20] for r in ranks}
    evidence = {"set_epoch_calls": calls, "epochs": epochs}
    say = partial(CODES.finding, code, value=float(len(same)), unit="ranks", threshold=0, evidence=evidence)
    if same:
        how = "called with the same number" if any(calls.values()) else "never called"
        said = f"Every epoch comes in the order of the first on {named(same)}: set_epoch was {how}."
        return say("fail", said, advice=("Call sampler.set_epoch(epoch) before each epoch.",))
    if seen["twice"]:
        return say("ok", "The second epoch comes in an order of its own on all ranks.")
    if seen["once"] and seen["called"] == seen["once"]:
        return say("ok", "set_epoch was called before the first epoch, the only one that was seen.")
    if seen["once"]:
        return say("not_measured", "Not measured: the run was over before a second epoch began. Train for more steps.")
    why = "the sampler does not shuffle" if seen["unshuffled"] else "no sampler has a set_epoch"
    return say("ok", f"Nothing to call: {why}.")


def _epochs(passes: Sequence[Row]) -> list[list[Row]]:
    """Return passes over the same data one after the other, through one loader or a new one for each epoch; a new optimizer begins anew."""
    found: dict[Any, list[Row]] = {}
    for one in passes:
        data = one["dataset"]
        own = found.setdefault((data["kind"], data["length"], data["hash"], one["sampler"], one.get("optimizers")), [])
        if not own or one["steps"][0] >= own[-1]["steps"][1]:  # and not one beside the other
            own.append(one)
    return list(found.values())


def _order(one: Row) -> list[Any]:
    return list(one["planned"] or one["indices"])


def data_seed(ranks: Ranks) -> Finding:
    """Judge whether ranks draw random numbers of their own for their data (P7.6)."""
    code, passes = "hosts.data_seed", {r["rank"]: training_passes(r) for r in ranks}
    first = {rank: list(found[0]["indices"][:FIRST]) for rank, found in passes.items() if found}
    draws: dict[tuple[str, str], dict[int, set[int]]] = {}
    for rank in ranks:
        for row in rank["draws"]:
            draws.setdefault((row["generator"], row["where"]), {}).setdefault(rank["rank"], set()).add(row["state"])
    shared = {
        key: found for key, states in draws.items()
        if (found := {a for a in states for b in states if a != b and states[a] & states[b]})
    }  # fmt: skip
    places = {"item": "in the dataset", "batch": "on the batch"}
    drawn = sorted({f"{generator} ({places[where]})" for generator, where in draws})
    alike = {f"{generator}, {where}": sorted(found) for (generator, where), found in shared.items()}
    evidence = {"first_indices": first, "drawn_from": drawn, "alike": alike}
    most = max((len(found) for found in shared.values()), default=0)
    say = partial(CODES.finding, code, value=float(most), unit="ranks", threshold=0, evidence=evidence)
    if shared:
        (generator, where), found = next(iter(shared.items()))
        what = "examples are prepared" if where == "item" else "batches are augmented"
        said = f"{named(found)} draw the same random numbers where {what} (generator: {generator}).".capitalize()
        advice: tuple[str, ...] = (
            "Seed what prepares the data with the rank in it (per_host_seed), after the model was initialised from the shared seed.",
            "A generator that a dataset makes for itself with a constant is the same on all ranks.",
        )
        return say("fail", said, advice=advice)
    for shards in training_shards(ranks):
        orders = [tuple(found) for found in shards.examples.values() if len(found)]
        if shards.with_replacement and len(set(orders)) < len(orders):
            advice = ("Seed the sampler with the rank in it (per_host_seed).",)
            return say("fail", "Ranks draw the same examples in the same order, with replacement.", advice=advice)
    if not first and not draws:
        return CODES.not_measured(code, "no training data came through a torch DataLoader")
    own = f"Each rank draws from a random state of its own: {', '.join(drawn)}."
    return say("ok", own if drawn else "Nothing is drawn while examples are prepared.")


_PADDING = (
    "Evaluate every world-th example on each rank, Subset(data, range(rank, len(data), world)), and join sums and counts.",
    "DistributedSampler repeats examples until all ranks have as many; leave the repeated ones out of the metric.",
)


def evaluation(ranks: Ranks, *, merged: bool) -> Finding:
    """Judge coverage, padding and agreement of all evaluations (P2.11, P7.1).

    Where running statistics were not `merged`, the same on all ranks, `hosts.buffers` says so, and outputs are not compared.
    """
    code, all_occasions = "hosts.evaluation", _occasions(ranks)
    if not all_occasions:
        return CODES.not_measured(code, "no evaluation came through a torch DataLoader")
    occasions = [(moment, shards) for moment, shards in all_occasions if shards.by == "index"]
    if not occasions:
        return CODES.not_measured(code, "the ranks evaluate data sets of their own")
    seen: dict[Any, set[Any]] = {}
    for moment, shards in occasions:
        seen.setdefault(moment, set()).update(shards.holders)
    judged = [_coverage(ranks, shards, seen[moment]) for moment, shards in occasions]
    worst = next((finding for finding in judged if finding.status != "ok"), None)
    if worst is not None:
        return worst
    evaluated = {r["rank"]: r["evaluations"] for r in ranks if r["evaluations"]}
    sums = {rank: [e["output_sum"] for e in found] for rank, found in evaluated.items()}
    sizes = [[e.get("output_size") for e in found] for found in evaluated.values()]
    alone = all(shards.everywhere for _, shards in occasions)
    if alone and len(sums) > 1 and merged and _differ(list(sums.values()), sizes):
        said = "Ranks evaluate the same examples and get different outputs: the metric depends on which one reports it."
        return CODES.finding(
            code, "fail", said, value=float(len(sums)), unit="ranks", threshold=0, evidence={"output_sums": sums},
            advice=("Compare parameters and buffers of the ranks before the evaluation.",),
        )  # fmt: skip
    return max(judged, key=lambda finding: int(finding.evidence["examples"]))


def _occasions(ranks: Ranks) -> list[tuple[Any, Shards]]:
    """Return what was evaluated, each with its moment and data set; what only some of the usual ranks looked at is left out."""
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for rank in ranks:
        seen: Counter[tuple[Any, ...]] = Counter()
        for one in evaluation_passes(rank):
            kind = (one["dataset"]["kind"], one["dataset"]["length"], one["steps"][0])
            found.setdefault((*kind, seen[kind]), {})[rank["rank"]] = one
            seen[kind] += 1
    usual = max((len(passes) for passes in found.values()), default=0)
    return [(key[:3], _shards(passes, augmented=False)) for key, passes in found.items() if len(passes) == usual]


def _coverage(ranks: Ranks, shards: Shards, seen: Set[Any]) -> Finding:
    """Judge one evaluation: padding, examples left out, and shares that nobody joins."""
    who = list(shards.examples)
    counted = Counter(i for examples in shards.examples.values() for i in examples)
    extra = 0 if shards.everywhere else sum(counted.values()) - len(counted)
    joined = {r["rank"]: len(r["joined"]["evaluation"]) for r in ranks}
    evidence: dict[str, Any] = {
        "by": who, "counted": sum(counted.values()), "examples": len(counted), "size": shards.size,
        "missing": shards.missing, "joined": joined,
    }  # fmt: skip
    missing = max(0, (shards.size or 0) - len(seen | set(shards.holders))) if shards.missing else 0
    value = float(extra or missing)
    say = partial(CODES.finding, "hosts.evaluation", unit="examples", threshold=0, evidence=evidence)
    padding = f"{extra} of {len(counted):,}"
    if len(who) > 1 and not shards.everywhere and not any(joined.values()):
        twice = f" {padding} are on two ranks, as a sampler's padding." if extra else ""
        said = f"Each rank evaluates its own part, and no collective joins them: each reports another metric.{twice}"
        join = "Join sums and counts of all ranks with all_reduce, then divide."
        return say("warn", said, value=float(extra), advice=(join, *(_PADDING if extra else ())))
    if extra:
        said = f"{padding} examples are evaluated on two ranks, as a sampler's padding: where all count, the metric is biased."
        return say("warn", said, value=value, advice=_PADDING)
    if missing:
        advice: tuple[str, ...] = ("Evaluate all of them: no drop_last, and shares whose union is the split.",)
        return say(
            "warn", f"{missing:,} of {shards.size:,} examples are evaluated by no rank.", value=value, advice=advice
        )
    how = "by every rank, all of them" if shards.everywhere else f"each by one of {len(who)} ranks, and joined"
    how = f"by {named(who)}" if len(who) == 1 else how
    return say("ok", f"{len(counted):,} examples are evaluated {how}.", value=value)


def _differ(sums: Sequence[Sequence[Any]], sizes: Sequence[Sequence[Any]]) -> bool:
    """Tell whether sums differ by more than rounding: outputs of both signs cancel, so what is small is measured by their size."""
    for values, among in zip(zip(*sums, strict=False), zip(*sizes, strict=False), strict=False):
        known = [float(v) for v in values if v is not None]
        largest = max((float(v) for v in among if v is not None and math.isfinite(float(v))), default=0.0)
        if any(not math.isclose(v, known[0], rel_tol=1e-5, abs_tol=1e-6 + 1e-6 * largest) for v in known):
            return True
    return False
