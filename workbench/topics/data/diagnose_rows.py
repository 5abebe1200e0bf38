"""`data.leakage`, `.duplicates`, `.unshuffled` and `.weak_shuffle`: rows that are there more than once, and the order they come in (P2.9)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from scipy import stats

from workbench.findings.finding import Codes, Finding, named

Facts = Mapping[str, Any]
CODES = Codes({
    "data.leakage": "P2.9", "data.duplicates": "P2.9", "data.unshuffled": "P2.9", "data.weak_shuffle": "P2.9", "data.no_signal": "F1.1",
    "data.label_shift": "P3.2", "data.train_validation_shift": "P3.2", "data.scale": "F1.1", "data.imbalance": "P3.6", "data.worker_rng": "P2.9",
})  # fmt: skip
_BITS = 4.0
"""Bits of a row, over those of the number of rows, from which on no two agree by chance: 2 for independent columns, twice that for
columns that depend on each other (rule of thumb)."""
_OVERSAMPLED = 0.02
"""Share of the repeated rows that the largest class may have, for the others to have been sampled more often on purpose (rule of thumb)."""
_REPEATS = 0.8
"""Training rows that repeat, over the share found elsewhere, from which on short texts are as likely a reason as a leak."""
_SORTED = 0.5  # neighbours of one class are this far on the way from chance to all: in effect sorted (rule of thumb)
_IN_PLACE = 0.01  # mean displacement, over that of a random order, below which nothing was shuffled (rule of thumb)
_AUGMENTED = " Items are augmented at random, and were read under one random state."


def unshuffled(facts: Facts, alpha: float) -> Finding:
    """Judge whether examples come sorted, or as they are stored."""
    order, code = facts["order"], "data.unshuffled"
    if order is None:
        return CODES.not_measured(code, "a dataset has no order of training; audit its loader")
    say = partial(CODES.finding, code, evidence=dict(order))
    if order["source"] == "trainer":
        stored = order["stored_labels"]
        is_sorted = stored is not None and stored["neighbours"] >= _SORTED
        note = " They are stored by class, which does not matter here." if is_sorted else ""
        return say("ok", f"The trainer draws a new order of all {order['examples']:,} examples each epoch.{note}")
    indices, labels = order["indices"], order["labels"]
    if indices is None and labels is None:
        return CODES.not_measured(code, "a stream without labels does not show its order", evidence=dict(order))
    clumped = labels is not None and labels["neighbours"] >= _SORTED
    in_order = indices is not None and indices["displacement"] < _IN_PLACE
    by_class = clumped and labels["neighbours_p"] < alpha
    in_place = in_order and indices["displacement_p"] < alpha
    value = max(0.0, indices["displacement"] if indices is not None else 1 - labels["neighbours"])
    threshold = _IN_PLACE if indices is not None else _SORTED
    tell = partial(say, value=value, unit="of a random order", threshold=threshold)
    fix = "Set shuffle=True, or a RandomSampler; give a stream a shuffle buffer of several thousand examples, or shuffle it on disk."
    ordered = labels is not None and min(labels["neighbours_p"], _one(labels["drift_p"])) < alpha
    if by_class or (in_place and ordered):
        kind = "in the order they are stored in, and their labels follow it"
        kind = f"sorted by {labels.get('by', 'class')}" if by_class else kind
        return tell("fail", f"Training examples come {kind}.", advice=(fix,))
    if in_place:
        why = "their labels are in no order" if labels is not None else "labels are unknown"
        said = f"Training examples come in the order they are stored in; {why}, but time or source may be."
        return tell("warn", said, advice=(fix,))
    if order["examples"] < 2 or in_order or clumped:
        few = f"{order['examples']:,} examples are too few to tell an order that looks sorted from chance"
        return CODES.not_measured(code, few, evidence=dict(order))
    return tell("ok", "Training examples do not come sorted.")


def weak_shuffle(facts: Facts, alpha: float, before: Finding) -> Finding:
    """Judge whether the order looks random, `before` being the verdict of `unshuffled`."""
    order, code = facts["order"], "data.weak_shuffle"
    if order is None or (before.status == "not_measured" and not (order["epochs"] or {}).get("same")):
        return CODES.finding(code, "not_measured", before.summary)
    if order["source"] == "trainer":
        return CODES.finding(code, "ok", before.summary, evidence=dict(order))
    if before.status in ("warn", "fail"):
        return CODES.not_measured(code, "nothing is shuffled, see data.unshuffled")
    tests = _shuffle_tests(order)
    name, (p, said, advice) = min(tests.items(), key=lambda item: item[1][0])
    evidence, limit = {**order, "p": {test: found[0] for test, found in tests.items()}}, alpha / len(tests)
    say = partial(CODES.finding, code, value=p, unit="p", threshold=limit, evidence=evidence)
    if p < limit:
        return say("warn", said, advice=(advice,))
    return say("ok", f"The order looks random by {len(tests)} tests, the least of them p = {p:.2g} ({name}).")


def _shuffle_tests(order: Facts) -> dict[str, tuple[float, str, str]]:
    """Return p, what to say, and what to do, of each test that could be made."""
    tests: dict[str, tuple[float, str, str]] = {}
    indices, labels, epochs = order["indices"], order["labels"], order["epochs"]
    larger = "Take a larger shuffle buffer, or shuffle the whole epoch."
    if indices is not None:
        said = f"Examples stay near their place in storage, as from a shuffle buffer of about {indices['buffer']:,.0f} of {indices['examples']:,}."
        tests["place"] = (indices["displacement_p"], said, larger)
        said = f"{indices['successions']:,} of {indices['examples']:,} examples follow the one stored before them: blocks are shuffled, not examples."
        tests["blocks"] = (indices["successions_p"], said, "Shuffle within blocks too.")
    if labels is not None:
        said = "Classes come in clumps: neighbours are more often alike than chance makes them."
        tests["neighbours"] = (labels["neighbours_p"], said, larger)
        if labels["drift_p"] is not None:
            tests["drift"] = (labels["drift_p"], "The mix of classes changes over the epoch.", larger)
    if epochs is not None:
        fix = "Draw a new order each epoch: no fixed seed within it, and sampler.set_epoch(epoch) where there is one."
        same = "The second epoch has nearly the order of the first."
        same = "Every epoch has the same order." if epochs["same"] else same
        tests["epochs"] = (0.0 if epochs["same"] else _one(epochs["displacement_p"]), same, fix)
    return tests


def _one(p: float | None) -> float:
    return 1.0 if p is None else p


def answer_among(facts: Facts) -> Finding | None:
    """Return a warning where columns of the inputs give the target away, see `answer_columns`."""
    found = facts.get("columns")
    if not found or not found["columns"]:
        return None
    which = named([f"column {k}" for k in found["columns"]])
    follow = "follows" if len(found["columns"]) == 1 else "follow"
    return CODES.finding(
        "data.leakage", "warn", f"{which[0].upper()}{which[1:]} of the inputs, of {found['of']}, {follow} the target without an exception in all of {found['examples']:,} examples: the answer is among the features.",
        value=float(len(found["columns"])), unit="columns", evidence=dict(found),
        advice=("Leave the target, and what is computed from it, out of the inputs. Where the task is as easy as that, leave it.",),
    )  # fmt: skip


def leakage(facts: Facts, *, limit: float, few_rows: int, alpha: float) -> Finding:
    """Judge how much of the other splits is in the training split; with fewer distinct rows than `few_rows` they are alike by nature."""
    overlap, code = facts["overlap"], "data.leakage"
    if overlap is None or facts.get("reading") == "drawn":
        return _not_compared(code, facts, "; audit the datasets without their random augmentation")
    splits = {name: found for name, found in overlap["splits"].items() if found["rows"]}
    rows, repeated, total = overlap["train_rows"], overlap["train_duplicates"], facts["examples"]["train"]
    if not splits:
        return CODES.not_measured(code, "there is no other split to compare with")
    if rows - repeated < few_rows:
        few = f"the training split has {rows - repeated} distinct rows, too few to tell one from another"
        return CODES.finding(code, "ok", f"Does not apply: {few}.")
    shares = {name: (found["exact"] + found["near"]) / found["rows"] for name, found in splits.items()}
    worst = max(shares, key=lambda name: shares[name])
    found, share = splits[worst], shares[worst]
    evidence = {"splits": splits, "shares": shares, "train_rows_read": rows, "train_rows": total,
                "train_duplicates": repeated, "near_looked_for": overlap["near"], "bits": facts.get("bits")}  # fmt: skip
    say = partial(CODES.finding, code, value=share, unit="share", threshold=limit, evidence=evidence)
    part = "" if rows >= total else f" The first {rows:,} of {total:,} training rows were read."
    part += _AUGMENTED if facts.get("reading") == "augmented" else ""
    same = [name for name, each in splits.items() if each.get("same")]
    if same:
        advice = ("Hold out examples that are never trained on, and evaluate on these.",)
        return say("fail", f"The {same[0]} split is the training split, row for row: its metric measures memorisation.", advice=advice)  # fmt: skip
    label = f", {found['same_label']} of {found['labelled']} with the same label" if found["labelled"] else ""
    said = (
        f"{share:.2%} of {worst} is in the training split too ({found['exact']} exact and {found['near']} near of "
        f"{found['rows']:,} rows{label})"
    )
    chance = by_chance(facts, rows)
    # more rows than the limit allows, by more than chance; near ones come by chance themselves
    allowed = ((found["exact"], limit), (found["exact"] + found["near"], limit + found.get("by_chance", 0.0)))
    if chance or not any(p < 1 and stats.binom.sf(n - 1, found["rows"], p) < alpha for n, p in allowed):
        why = "rows of so few distinct values agree by chance" if chance else "too few to matter"
        none = f"No row of {' or '.join(splits)} is in the training split ({'exact and near' if overlap['near'] else 'exact'} duplicates)"
        return say("ok", f"{said}: {why}.{part}" if share else f"{none}.{part}")
    first, own = found["pairs"][0], repeated / max(rows, 1)
    look = f"Look at {worst}[{first[0]}] and train[{first[1]}]"
    if own >= _REPEATS * share:
        said = f"{said}, and {own:.2%} of the training rows repeat as well"
        if facts.get("ids"):
            return say("ok", f"{said}: short rows of tokens do.{part}")
        copies = f"{look}: copies have to go before the split, oversampling after it."
        return say("fail", f"{said}: copies from before the split.{part}", advice=(copies,))
    split = "Remove duplicates before splitting, and split by source (person, file, day) where rows of one source are alike."
    return say("fail", f"{said}: that metric measures memorisation.{part}", advice=(f"{look}; the evidence lists more.", split))  # fmt: skip


def _not_compared(code: str, facts: Facts, fix: str) -> Finding:
    if facts.get("reading") == "drawn":
        said = "Does not apply: items are generated anew at each reading, whatever their index."
        return CODES.finding(code, "ok", said)
    why = f"items change from one reading to the next{fix}" if facts.get("reading") == "random" else "no rows were read"
    return CODES.not_measured(code, why)


def by_chance(facts: Facts, rows: int) -> bool:
    """Tell whether rows take so few values that some of them agree by chance."""
    bits = facts.get("bits")
    return bits is not None and rows > 1 and float(bits) < _BITS * math.log2(rows)


def duplicates(facts: Facts, *, limit: float, blank: float) -> Finding:
    """Judge how much of a split is there more than once, `blank` being the share of one and the same row."""
    overlap, code = facts["overlap"], "data.duplicates"
    if overlap is None or facts.get("reading") == "drawn":
        return _not_compared(code, facts, "")
    known = {name: each for name, each in (overlap.get("repeats") or {}).items() if each["rows"] > 1}
    if not known or facts.get("stream"):
        why = "a stream may pass its examples more than once" if known else "there are too few rows"
        return CODES.finding(code, "ok", f"Does not apply: {why}.")
    shares = {name: each["repeated"] / each["rows"] for name, each in known.items()}
    worst = max(shares, key=lambda name: shares[name])
    found, rows, (count, first) = known[worst], known[worst]["rows"], known[worst]["top"]
    evidence = {"splits": known, "bits": facts.get("bits")}
    say = partial(CODES.finding, code, value=shares[worst], unit="share", threshold=limit, evidence=evidence)
    chance = by_chance(facts, rows)
    if rows > count >= max(10, blank * rows) and not chance:
        return say(
            "fail" if 2 * count > rows else "warn",
            f"One and the same input stands {count:,} times among the {rows:,} rows of {worst} ({count / rows:.1%}).",
            advice=(f"Look at {worst}[{first}]: an empty or broken input tells the model nothing, whatever its target.",),
        )  # fmt: skip
    share = f"{shares[worst]:.2%} of the rows" if found["repeated"] else "None of the rows"
    said = f"{share} of {worst} repeat an earlier row"
    rare = found["majority"] is not None and found["majority"] < _OVERSAMPLED * found["repeated"]
    if shares[worst] < limit or chance or rare or count == rows:
        why = ": rows of so few distinct values agree by chance" if chance else ""
        why = ", of the rarer classes alone, as by oversampling" if rare and found["repeated"] else why
        return say("ok", f"{said}{why}.{_AUGMENTED if facts.get('reading') == 'augmented' else ''}")
    other = f", {found['contradicting']:,} of them with another label" if found["contradicting"] else ""
    advice = ("Look for a join or a loop that makes copies, and remove them before splitting.",)
    return say("warn", f"{said}{other}: there are far fewer examples than it seems.", advice=advice)
