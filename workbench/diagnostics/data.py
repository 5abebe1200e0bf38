"""`diagnose_data`: overlap of the splits, the order of training, classes, scale and workers (P2.9, F1.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.diagnostics.audited import Audited, why_missing
from workbench.diagnostics.base import Diagnosis, Finding
from workbench.diagnostics.data_order import CLAUSE, data_finding, unshuffled, weak_shuffle

__all__ = ["diagnose_data", "worker_rng_finding"]

_REPEATS = 0.8
"""Training rows that repeat, over the share found elsewhere, from which few distinct values are as likely a reason as a leak.

Copies in pairs give a half, each example five times over 0.8, rows of few values 1 (a random split assumed)."""


def diagnose_data(
    record: Audited,
    *,
    leaked_share: float = 0.01,
    few_rows: int = 32,
    alpha: float = 1e-4,
    class_ratio: float = 10.0,
    feature_ratio: float = 100.0,
    largest_scale: float = 30.0,
    smallest_scale: float = 0.01,
) -> Diagnosis:
    """Judge the facts that were collected about the data.

    Args:
        record: a study whose facts hold "data", or what `audit_data` returns.
        leaked_share: of a validation or test split that may be in the training split without an alarm (rule of thumb: a
            hundredth moves an accuracy by a hundredth at most).
        few_rows: distinct training rows below which rows are alike by nature (rule of thumb).
        alpha: chance at which a random order is called none; each of at most five tests a loader (rule of thumb).
        class_ratio: the most common class over the rarest, where imbalance begins (rule of thumb).
        feature_ratio: the largest feature over the smallest, where scales are far apart (rule of thumb: gradients then
            differ by its square).
        largest_scale: of the median feature (rule of thumb).
        smallest_scale: of the median feature (rule of thumb).

    Returns:
        `data.leakage`, `data.unshuffled`, `data.weak_shuffle`, `data.imbalance`, `data.scale`, `data.worker_rng`, once each.
    """
    facts = record.facts.get("data")
    if not facts:
        reason = why_missing(
            record.facts, "data", "nobody looked at the data; `workbench diagnose` and `audit_data` do"
        )
        findings = tuple(data_finding(name, "not_measured", reason) for name in CLAUSE)
    else:
        order = unshuffled(facts, alpha)
        findings = (
            _leakage(facts, leaked_share, few_rows),
            order,
            weak_shuffle(facts, alpha, order),
            _imbalance(facts, class_ratio),
            _scale(facts, feature_ratio, largest_scale, smallest_scale),
            worker_rng_finding(facts),
        )
    return Diagnosis(findings=findings, workload=record.workload, command=record.command, path=record.path)


def _leakage(facts: Mapping[str, Any], limit: float, few_rows: int) -> Finding:
    overlap = facts["overlap"]
    if overlap is None:
        why = "items change from one reading to the next; audit the datasets without their random augmentation"
        return data_finding(
            "leakage", "not_measured", f"Not measured: {why if facts['changes'] else 'no rows were read'}."
        )
    splits = {name: found for name, found in overlap["splits"].items() if found["rows"]}
    if not splits:
        return data_finding("leakage", "not_measured", "Not measured: there is no other split to compare with.")
    shares = {name: (found["exact"] + found["near"]) / found["rows"] for name, found in splits.items()}
    worst = max(shares, key=lambda name: shares[name])
    found, share = splits[worst], shares[worst]
    rows, repeated = overlap["train_rows"], overlap["train_duplicates"]
    if rows - repeated < few_rows:
        few = f"Not measured: the training split has {rows - repeated} distinct rows, too few to tell one from another."
        return data_finding("leakage", "not_measured", few)
    own = repeated / max(rows, 1)
    total = facts["examples"]["train"]
    evidence = {"splits": splits, "shares": shares, "train_rows_read": overlap["train_rows"], "train_rows": total,
                "train_duplicates": overlap["train_duplicates"], "near_looked_for": overlap["near"]}  # fmt: skip
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": evidence}
    part = (
        ""
        if overlap["train_rows"] >= total
        else f" The first {overlap['train_rows']:,} of {total:,} training rows were read."
    )
    kinds = "exact and near" if overlap["near"] else "exact"
    if share == 0:
        looked = " or ".join(splits)
        return data_finding(
            "leakage", "ok", f"No row of {looked} is in the training split ({kinds} duplicates).{part}", **numbers
        )
    label = f", {found['same_label']} of {found['labelled']} with the same label" if found["labelled"] else ""
    said = (
        f"{share:.2%} of {worst} is in the training split too ({found['exact']} exact and {found['near']} near of "
        f"{found['rows']:,} rows{label})"
    )
    if share <= limit:
        return data_finding("leakage", "ok", f"{said}: too few to matter.{part}", **numbers)
    first = found["pairs"][0]
    if own >= _REPEATS * share:
        again = f"{said}, and {own:.2%} of the training rows repeat as well"
        if facts["scale"]["kind"] == "integer":
            return data_finding("leakage", "ok", f"{again}: short rows of tokens do.{part}", **numbers)
        return data_finding(
            "leakage", "warn", f"{again}: copies from before the split, or rows of few distinct values.{part}",
            advice=(
                f"Look at {worst}[{first[0]}] and train[{first[1]}]: copies have to go before the split, oversampling after it.",
            ),
            **numbers,
        )  # fmt: skip
    return data_finding(
        "leakage", "fail", f"{said}: that metric measures memory.{part}",
        advice=(
            f"Look at {worst}[{first[0]}] and train[{first[1]}]; the evidence lists more.",
            "Remove duplicates before splitting, and split by source (person, file, day) where rows of one source are alike.",
        ),
        **numbers,
    )  # fmt: skip


def _imbalance(facts: Mapping[str, Any], limit: float) -> Finding:
    counts = facts["classes"]
    if not counts or len(counts) < 2:
        return data_finding(
            "imbalance", "not_measured", "Not measured: the labels are no classes, or there is only one."
        )
    common, rare = next(iter(counts)), list(counts)[-1]
    ratio = counts[common] / counts[rare]
    evidence = {"classes": len(counts), "counts": dict(list(counts.items())[:50])}
    numbers: dict[str, Any] = {"value": ratio, "unit": "times", "threshold": limit, "evidence": evidence}
    said = f"The most common of {len(counts)} classes has {ratio:.3g} times as many examples as the rarest ({counts[common]:,} and {counts[rare]:,})"
    if ratio < limit:
        return data_finding("imbalance", "ok", f"{said}.", **numbers)
    return data_finding(
        "imbalance", "warn", f"{said}: accuracy hides the rare ones.",
        advice=(
            "Look at each class by itself: recall with its counts, not accuracy alone.",
            "Weight the loss or sample the rare classes more often only if that metric asks for it.",
        ),
        **numbers,
    )  # fmt: skip


def _scale(facts: Mapping[str, Any], ratio_limit: float, largest: float, smallest: float) -> Finding:
    scale = facts["scale"]
    if scale["kind"] != "float" or scale["median"] is None:
        what = (
            "integers, which a model looks up or scales itself"
            if scale["kind"] == "integer"
            else "of no fixed size, or never vary"
        )
        return data_finding("scale", "not_measured", f"Not measured: the inputs are {what}.")
    ratio = scale["largest"] / scale["smallest"]
    evidence = dict(scale)
    numbers: dict[str, Any] = {"evidence": evidence}
    advice = ("Standardise each feature by its mean and deviation over the training split.",)
    if ratio > ratio_limit:
        return data_finding(
            "scale", "warn", f"Feature {scale['largest_at']} is {ratio:.3g} times as large as feature {scale['smallest_at']} "
            f"({scale['largest']:.3g} and {scale['smallest']:.3g}).", value=ratio, unit="times", threshold=ratio_limit,
            advice=advice, **numbers,
        )  # fmt: skip
    median = scale["median"]
    if not smallest <= median <= largest:
        limit = largest if median > largest else smallest
        return data_finding(
            "scale", "warn", f"Inputs are of size {median:.3g}, far from 1.", value=median, unit="input", threshold=limit,
            advice=advice, **numbers,
        )  # fmt: skip
    return data_finding(
        "scale", "ok", f"Inputs are of size {median:.3g}, and no feature is more than {ratio:.3g} times another.",
        value=ratio, unit="times", threshold=ratio_limit, **numbers,
    )  # fmt: skip


def worker_rng_finding(facts: Mapping[str, Any], *, alpha: float = 1e-4) -> Finding:
    """Return `data.worker_rng`: whether worker processes draw random numbers of their own.

    Args:
        facts: "workers" is what was found by asking them, None where nobody could.
        alpha: chance of as many equal draws (rule of thumb).
    """
    workers = facts["workers"]
    if workers is None:
        return data_finding(
            "worker_rng", "not_measured", "Not measured: of a stream nobody can ask for one example twice."
        )
    if not workers["workers"]:
        return data_finding(
            "worker_rng", "ok", "Data are loaded in the training process: there are no workers to draw alike."
        )
    evidence = dict(workers)
    if not workers["random"]:
        return data_finding(
            "worker_rng", "ok", "Examples are the same each time: workers have nothing to draw.", evidence=evidence
        )
    said, fix = [], []
    if workers["same_in_workers"] and workers["p"] < alpha:
        said.append("worker processes make the same random draws")
        fix.append(
            "Give each worker a generator of its own: worker_init_fn that seeds from torch.initial_seed(), or draw from torch."
        )
    if workers["same_in_epochs"] and workers["p"] < alpha:
        said.append("every epoch repeats the draws of the first")
        fix.append(
            "Do not make the generator once in __init__, nor seed it with a constant: workers start from a copy each epoch."
        )
    numbers: dict[str, Any] = {"value": workers["p"], "unit": "p", "threshold": alpha, "evidence": evidence}
    if said:
        text = " and ".join(said)
        return data_finding("worker_rng", "warn", f"{text[0].upper()}{text[1:]}: augmentation varies less than it seems.", advice=tuple(fix), **numbers)  # fmt: skip
    return data_finding("worker_rng", "ok", "Workers draw random numbers of their own, anew each epoch.", **numbers)
