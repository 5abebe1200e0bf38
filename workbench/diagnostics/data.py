"""`diagnose_data`: overlap of the splits, the order of training, classes, scale and workers (P2.9, F1.1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from workbench.diagnostics.base import Diagnosis, Finding, Status

__all__ = ["diagnose_data"]

_CLAUSE = {
    "leakage": "P2.9",
    "unshuffled": "P2.9",
    "weak_shuffle": "P2.9",
    "imbalance": "P3.6",
    "scale": "F1.1",
    "worker_rng": "P2.9",
}
_SORTED = 0.5
"""Neighbours of one class are this far on the way from chance to all: in effect sorted (rule of thumb)."""
_REPEATS = 0.8
"""Training rows that repeat, over the share found elsewhere, from which few distinct values are as likely a reason as a leak.

Copies in pairs give a half, each example five times over 0.8, rows of few values 1 (a random split assumed)."""
_IN_PLACE = 0.01
"""Mean displacement, over that of a random order, below which nothing was shuffled (rule of thumb)."""


class _Facts(Protocol):
    """What is read: a study, or what `audit_data` returns."""

    @property
    def facts(self) -> dict[str, Any]: ...
    @property
    def workload(self) -> str: ...
    @property
    def command(self) -> str | None: ...
    @property
    def path(self) -> Path | None: ...


def diagnose_data(
    record: _Facts,
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
        reason = "Not measured: nobody looked at the data; `workbench diagnose` and `audit_data` do."
        findings = tuple(_finding(name, "not_measured", reason) for name in _CLAUSE)
    else:
        unshuffled = _unshuffled(facts, alpha)
        findings = (
            _leakage(facts, leaked_share, few_rows),
            unshuffled,
            _weak_shuffle(facts, alpha, unshuffled),
            _imbalance(facts, class_ratio),
            _scale(facts, feature_ratio, largest_scale, smallest_scale),
            _worker_rng(facts),
        )
    return Diagnosis(findings=findings, workload=record.workload, command=record.command, path=record.path)


def _finding(name: str, status: Status, summary: str, **fields: Any) -> Finding:
    return Finding(code=f"data.{name}", status=status, summary=summary, clause=_CLAUSE[name], **fields)


def _leakage(facts: Mapping[str, Any], limit: float, few_rows: int) -> Finding:
    overlap = facts["overlap"]
    if overlap is None:
        why = "items change from one reading to the next; audit the datasets without their random augmentation"
        return _finding("leakage", "not_measured", f"Not measured: {why if facts['changes'] else 'no rows were read'}.")
    splits = {name: found for name, found in overlap["splits"].items() if found["rows"]}
    if not splits:
        return _finding("leakage", "not_measured", "Not measured: there is no other split to compare with.")
    shares = {name: (found["exact"] + found["near"]) / found["rows"] for name, found in splits.items()}
    worst = max(shares, key=lambda name: shares[name])
    found, share = splits[worst], shares[worst]
    rows, repeated = overlap["train_rows"], overlap["train_duplicates"]
    if rows - repeated < few_rows:
        few = f"Not measured: the training split has {rows - repeated} distinct rows, too few to tell one from another."
        return _finding("leakage", "not_measured", few)
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
        return _finding(
            "leakage", "ok", f"No row of {looked} is in the training split ({kinds} duplicates).{part}", **numbers
        )
    label = f", {found['same_label']} of {found['labelled']} with the same label" if found["labelled"] else ""
    said = (
        f"{share:.2%} of {worst} is in the training split too ({found['exact']} exact and {found['near']} near of "
        f"{found['rows']:,} rows{label})"
    )
    if share <= limit:
        return _finding("leakage", "ok", f"{said}: too few to matter.{part}", **numbers)
    first = found["pairs"][0]
    if own >= _REPEATS * share:
        again = f"{said}, and {own:.2%} of the training rows repeat as well"
        if facts["scale"]["kind"] == "integer":
            return _finding("leakage", "ok", f"{again}: short rows of tokens do.{part}", **numbers)
        return _finding(
            "leakage", "warn", f"{again}: copies from before the split, or rows of few distinct values.{part}",
            advice=(
                f"Look at {worst}[{first[0]}] and train[{first[1]}]: copies have to go before the split, oversampling after it.",
            ),
            **numbers,
        )  # fmt: skip
    return _finding(
        "leakage", "fail", f"{said}: that metric measures memory.{part}",
        advice=(
            f"Look at {worst}[{first[0]}] and train[{first[1]}]; the evidence lists more.",
            "Remove duplicates before splitting, and split by source (person, file, day) where rows of one source are alike.",
        ),
        **numbers,
    )  # fmt: skip


def _unshuffled(facts: Mapping[str, Any], alpha: float) -> Finding:
    order = facts["order"]
    if order is None:
        return _finding(
            "unshuffled", "not_measured", "Not measured: a dataset has no order of training; audit its loader."
        )
    if order["source"] == "trainer":
        stored = order["stored_labels"]
        is_sorted = stored is not None and stored["neighbours"] >= _SORTED
        note = " They are stored by class, which does not matter here." if is_sorted else ""
        return _finding(
            "unshuffled", "ok", f"The trainer draws a new order of all {order['examples']:,} examples each epoch.{note}",
            evidence=dict(order),
        )  # fmt: skip
    indices, labels = order["indices"], order["labels"]
    if indices is None and labels is None:
        return _finding("unshuffled", "not_measured", "Not measured: a stream without labels does not show its order.", evidence=dict(order))  # fmt: skip
    by_class = labels is not None and labels["neighbours"] >= _SORTED and labels["neighbours_p"] < alpha
    in_place = indices is not None and indices["displacement"] < _IN_PLACE and indices["displacement_p"] < alpha
    value = indices["displacement"] if indices is not None else 1 - labels["neighbours"]
    numbers: dict[str, Any] = {
        "value": max(0.0, value), "unit": "of a random order", "threshold": _IN_PLACE if indices is not None else _SORTED,
        "evidence": dict(order),
    }  # fmt: skip
    fix = "Set shuffle=True, or a RandomSampler; give a stream a shuffle buffer of several thousand examples, or shuffle it on disk."
    ordered = labels is not None and min(labels["neighbours_p"], _one(labels["drift_p"])) < alpha
    if by_class or (in_place and ordered):
        kind = "sorted by class" if by_class else "in the order they are stored in, and their labels follow it"
        return _finding("unshuffled", "fail", f"Training examples come {kind}.", advice=(fix,), **numbers)
    if in_place:
        why = "their labels are in no order" if labels is not None else "labels are unknown"
        return _finding(
            "unshuffled", "warn", f"Training examples come in the order they are stored in; {why}, but time or source may be.",
            advice=(fix,), **numbers,
        )  # fmt: skip
    return _finding("unshuffled", "ok", "Training examples do not come sorted.", **numbers)


def _weak_shuffle(facts: Mapping[str, Any], alpha: float, unshuffled: Finding) -> Finding:
    order = facts["order"]
    if order is None or (unshuffled.status == "not_measured" and not (order["epochs"] or {}).get("same")):
        return _finding("weak_shuffle", "not_measured", unshuffled.summary)
    if order["source"] == "trainer":
        return _finding("weak_shuffle", "ok", unshuffled.summary, evidence=dict(order))
    if unshuffled.status in ("warn", "fail"):
        return _finding("weak_shuffle", "not_measured", "Not measured: nothing is shuffled, see data.unshuffled.")
    tests = _shuffle_tests(order)
    name, (p, said, advice) = min(tests.items(), key=lambda item: item[1][0])
    each = {test: found[0] for test, found in tests.items()}
    numbers: dict[str, Any] = {
        "value": p,
        "unit": "p",
        "threshold": alpha / len(tests),
        "evidence": {**order, "p": each},
    }
    if p < alpha / len(tests):
        return _finding("weak_shuffle", "warn", said, advice=(advice,), **numbers)
    return _finding("weak_shuffle", "ok", f"The order looks random by {len(tests)} tests, the least of them p = {p:.2g} ({name}).", **numbers)  # fmt: skip


def _shuffle_tests(order: Mapping[str, Any]) -> dict[str, tuple[float, str, str]]:
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
        p = 0.0 if epochs["same"] else _one(epochs["displacement_p"])
        said = (
            "Every epoch has the same order."
            if epochs["same"]
            else "The second epoch has nearly the order of the first."
        )
        tests["epochs"] = (
            p,
            said,
            "Draw a new order each epoch: no fixed seed within it, and sampler.set_epoch(epoch) where there is one.",
        )
    return tests


def _one(p: float | None) -> float:
    return 1.0 if p is None else p


def _imbalance(facts: Mapping[str, Any], limit: float) -> Finding:
    counts = facts["classes"]
    if not counts or len(counts) < 2:
        return _finding("imbalance", "not_measured", "Not measured: the labels are no classes, or there is only one.")
    common, rare = next(iter(counts)), list(counts)[-1]
    ratio = counts[common] / counts[rare]
    evidence = {"classes": len(counts), "counts": dict(list(counts.items())[:50])}
    numbers: dict[str, Any] = {"value": ratio, "unit": "times", "threshold": limit, "evidence": evidence}
    said = f"The most common of {len(counts)} classes has {ratio:.3g} times as many examples as the rarest ({counts[common]:,} and {counts[rare]:,})"
    if ratio < limit:
        return _finding("imbalance", "ok", f"{said}.", **numbers)
    return _finding(
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
        return _finding("scale", "not_measured", f"Not measured: the inputs are {what}.")
    ratio = scale["largest"] / scale["smallest"]
    evidence = dict(scale)
    numbers: dict[str, Any] = {"evidence": evidence}
    advice = ("Standardise each feature by its mean and deviation over the training split.",)
    if ratio > ratio_limit:
        return _finding(
            "scale", "warn", f"Feature {scale['largest_at']} is {ratio:.3g} times as large as feature {scale['smallest_at']} "
            f"({scale['largest']:.3g} and {scale['smallest']:.3g}).", value=ratio, unit="times", threshold=ratio_limit,
            advice=advice, **numbers,
        )  # fmt: skip
    median = scale["median"]
    if not smallest <= median <= largest:
        limit = largest if median > largest else smallest
        return _finding(
            "scale", "warn", f"Inputs are of size {median:.3g}, far from 1.", value=median, unit="input", threshold=limit,
            advice=advice, **numbers,
        )  # fmt: skip
    return _finding(
        "scale", "ok", f"Inputs are of size {median:.3g}, and no feature is more than {ratio:.3g} times another.",
        value=ratio, unit="times", threshold=ratio_limit, **numbers,
    )  # fmt: skip


def _worker_rng(facts: Mapping[str, Any], *, alpha: float = 1e-4) -> Finding:
    workers = facts["workers"]
    if workers is None:
        return _finding("worker_rng", "not_measured", "Not measured: of a stream nobody can ask for one example twice.")
    if not workers["workers"]:
        return _finding(
            "worker_rng", "ok", "Data are loaded in the training process: there are no workers to draw alike."
        )
    evidence = dict(workers)
    if not workers["random"]:
        return _finding(
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
        return _finding("worker_rng", "warn", f"{text[0].upper()}{text[1:]}: augmentation varies less than it seems.", advice=tuple(fix), **numbers)  # fmt: skip
    return _finding("worker_rng", "ok", "Workers draw random numbers of their own, anew each epoch.", **numbers)
