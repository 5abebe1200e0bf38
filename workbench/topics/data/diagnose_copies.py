"""`data.leakage` and `data.duplicates`: rows that are there more than once, across splits and within one (P2.9)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scipy import stats

from workbench.findings.diagnosis import Finding
from workbench.topics.data.diagnose_order import data_finding

__all__ = ["duplicates", "leakage"]

Facts = Mapping[str, Any]

_BITS = 4.0
"""Bits of a row, over those of the number of rows, from which on no two agree by chance: 2 for independent columns, twice that for
columns that depend on each other (rule of thumb)."""
_OVERSAMPLED = 0.02
"""Share of the repeated rows that the largest class may have, for the others to have been sampled more often on purpose (rule of thumb)."""
_AUGMENTED = " Items are augmented at random, and were read under one random state."
_DRAWN = "Does not apply: items are generated anew at each reading, whatever their index"
_REPEATS = 0.8
"""Training rows that repeat, over the share found elsewhere, from which on short texts are as likely a reason as a leak."""


def leakage(facts: Facts, *, limit: float, few_rows: int, alpha: float) -> Finding:
    """Judge how much of the other splits is in the training split.

    Args:
        facts: of the data.
        limit: share that may be without an alarm.
        few_rows: distinct training rows below which rows are alike by nature.
        alpha: chance at which more than that share is found where there is no more.
    """
    overlap = facts["overlap"]
    missing = _not_compared(facts, few_rows)
    if missing is not None:
        return missing
    splits = {name: found for name, found in overlap["splits"].items() if found["rows"]}
    rows, repeated = overlap["train_rows"], overlap["train_duplicates"]
    shares = {name: (found["exact"] + found["near"]) / found["rows"] for name, found in splits.items()}
    worst = max(shares, key=lambda name: shares[name])
    found, share = splits[worst], shares[worst]
    total = facts["examples"]["train"]
    evidence = {"splits": splits, "shares": shares, "train_rows_read": rows, "train_rows": total,
                "train_duplicates": repeated, "near_looked_for": overlap["near"], "bits": facts.get("bits")}  # fmt: skip
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": evidence}
    part = "" if rows >= total else f" The first {rows:,} of {total:,} training rows were read."
    part += _AUGMENTED if facts.get("reading") == "augmented" else ""
    same = [name for name, each in splits.items() if each.get("same")]
    if same:
        return data_finding(
            "leakage", "fail", f"The {same[0]} split is the training split, row for row: its metric measures memory.",
            advice=("Hold out examples that are never trained on, and evaluate on these.",), **numbers,
        )  # fmt: skip
    if share == 0:
        kinds = "exact and near" if overlap["near"] else "exact"
        said = f"No row of {' or '.join(splits)} is in the training split ({kinds} duplicates).{part}"
        return data_finding("leakage", "ok", said, **numbers)
    label = f", {found['same_label']} of {found['labelled']} with the same label" if found["labelled"] else ""
    said = (
        f"{share:.2%} of {worst} is in the training split too ({found['exact']} exact and {found['near']} near of "
        f"{found['rows']:,} rows{label})"
    )
    chance = by_chance(facts, rows)
    if chance or not _beyond(found, limit, alpha):
        why = "rows of so few distinct values agree by chance" if chance else "too few to matter"
        return data_finding("leakage", "ok", f"{said}: {why}.{part}", **numbers)
    first = found["pairs"][0]
    look = f"Look at {worst}[{first[0]}] and train[{first[1]}]"
    own = repeated / max(rows, 1)
    if own >= _REPEATS * share:
        again = f"{said}, and {own:.2%} of the training rows repeat as well"
        if facts.get("ids"):
            return data_finding("leakage", "ok", f"{again}: short rows of tokens do.{part}", **numbers)
        copies = f"{look}: copies have to go before the split, oversampling after it."
        return data_finding(
            "leakage", "fail", f"{again}: copies from before the split.{part}", advice=(copies,), **numbers
        )
    return data_finding(
        "leakage", "fail", f"{said}: that metric measures memory.{part}",
        advice=(
            f"{look}; the evidence lists more.",
            "Remove duplicates before splitting, and split by source (person, file, day) where rows of one source are alike.",
        ),
        **numbers,
    )  # fmt: skip


def _not_compared(facts: Facts, few_rows: int) -> Finding | None:
    overlap = facts["overlap"]
    if facts.get("reading") == "drawn":
        return data_finding("leakage", "ok", f"{_DRAWN}.")
    if overlap is None:
        why = "items change from one reading to the next; audit the datasets without their random augmentation"
        return data_finding("leakage", "not_measured", f"Not measured: {why if facts.get('reading') == 'random' else 'no rows were read'}.")  # fmt: skip
    distinct = overlap["train_rows"] - overlap["train_duplicates"]
    if not any(found["rows"] for found in overlap["splits"].values()):
        return data_finding("leakage", "not_measured", "Not measured: there is no other split to compare with.")
    if distinct < few_rows:
        few = f"Does not apply: the training split has {distinct} distinct rows, too few to tell one from another."
        return data_finding("leakage", "ok", few)
    return None


def _beyond(found: Facts, limit: float, alpha: float) -> bool:
    """Tell whether more rows were found than the limit allows, by more than chance; near ones come by chance themselves."""
    allowed = ((found["exact"], limit), (found["exact"] + found["near"], limit + found.get("by_chance", 0.0)))
    return any(share < 1 and stats.binom.sf(count - 1, found["rows"], share) < alpha for count, share in allowed)


def by_chance(facts: Facts, rows: int) -> bool:
    """Tell whether rows take so few values that some of them agree by chance."""
    bits = facts.get("bits")
    return bits is not None and rows > 1 and float(bits) < _BITS * math.log2(rows)


def duplicates(facts: Facts, *, limit: float, blank: float) -> Finding:
    """Judge how much of a split is there more than once.

    Args:
        facts: of the data.
        limit: share of the rows that were there before.
        blank: share of the rows that are all the same one.
    """
    overlap = facts["overlap"]
    if facts.get("reading") == "drawn":
        return data_finding("duplicates", "ok", f"{_DRAWN}.")
    if overlap is None:
        why = "items change from one reading to the next" if facts.get("reading") == "random" else "no rows were read"
        return data_finding("duplicates", "not_measured", f"Not measured: {why}.")
    known = {name: each for name, each in (overlap.get("repeats") or {}).items() if each["rows"] > 1}
    if not known or facts.get("stream"):
        why = "a stream may pass its examples more than once" if known else "there are too few rows"
        return data_finding("duplicates", "ok", f"Does not apply: {why}.")
    shares = {name: each["repeated"] / each["rows"] for name, each in known.items()}
    worst = max(shares, key=lambda name: shares[name])
    found, rows = known[worst], known[worst]["rows"]
    evidence = {"splits": known, "bits": facts.get("bits")}
    numbers: dict[str, Any] = {"value": shares[worst], "unit": "share", "threshold": limit, "evidence": evidence}
    count, first = found["top"]
    said = f"{shares[worst]:.2%} of the rows of {worst} were there before"
    chance = by_chance(facts, rows)
    if rows > count >= max(10, blank * rows) and not chance:
        return data_finding(
            "duplicates", "fail" if 2 * count > rows else "warn",
            f"One and the same input stands {count:,} times among the {rows:,} rows of {worst} ({count / rows:.1%}).",
            advice=(f"Look at {worst}[{first}]: an empty or broken input tells the model nothing, whatever its target.",), **numbers,
        )  # fmt: skip
    rare = found["majority"] is not None and found["majority"] < _OVERSAMPLED * found["repeated"]
    if shares[worst] < limit or chance or rare or count == rows:
        why = ": rows of so few distinct values agree by chance" if chance else ""
        why = ", of the rarer classes alone, as by oversampling" if rare and found["repeated"] else why
        augmented = _AUGMENTED if facts.get("reading") == "augmented" else ""
        return data_finding("duplicates", "ok", f"{said}{why}.{augmented}", **numbers)
    other = found["contradicting"]
    contradicting = f", {other:,} of them with another label" if other else ""
    return data_finding(
        "duplicates", "warn", f"{said}{contradicting}: there are far fewer examples than it seems.",
        advice=("Look for a join or a loop that makes copies, and remove them before splitting.",), **numbers,
    )  # fmt: skip
