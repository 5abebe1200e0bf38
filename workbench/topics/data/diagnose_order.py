"""`data.unshuffled` and `data.weak_shuffle`: the verdicts on an order of training (P2.9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.findings.diagnosis import Finding, Status

__all__ = ["CLAUSE", "data_finding", "unshuffled", "weak_shuffle"]

CLAUSE = {
    "leakage": "P2.9",
    "duplicates": "P2.9",
    "unshuffled": "P2.9",
    "weak_shuffle": "P2.9",
    "no_signal": "F1.1",
    "label_shift": "P3.2",
    "train_validation_shift": "P3.2",
    "scale": "F1.1",
    "imbalance": "P3.6",
    "worker_rng": "P2.9",
}
_SORTED = 0.5
"""Neighbours of one class are this far on the way from chance to all: in effect sorted (rule of thumb)."""
_IN_PLACE = 0.01
"""Mean displacement, over that of a random order, below which nothing was shuffled (rule of thumb)."""


def data_finding(name: str, status: Status, summary: str, **fields: Any) -> Finding:
    """Return a finding of the area "data", with its clause."""
    return Finding(code=f"data.{name}", status=status, summary=summary, clause=CLAUSE[name], **fields)


def unshuffled(facts: Mapping[str, Any], alpha: float) -> Finding:
    """Judge whether examples come sorted, or as they are stored."""
    order = facts["order"]
    if order is None:
        return data_finding(
            "unshuffled", "not_measured", "Not measured: a dataset has no order of training; audit its loader."
        )
    if order["source"] == "trainer":
        stored = order["stored_labels"]
        is_sorted = stored is not None and stored["neighbours"] >= _SORTED
        note = " They are stored by class, which does not matter here." if is_sorted else ""
        return data_finding(
            "unshuffled", "ok", f"The trainer draws a new order of all {order['examples']:,} examples each epoch.{note}",
            evidence=dict(order),
        )  # fmt: skip
    indices, labels = order["indices"], order["labels"]
    if indices is None and labels is None:
        return data_finding("unshuffled", "not_measured", "Not measured: a stream without labels does not show its order.", evidence=dict(order))  # fmt: skip
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
        return data_finding("unshuffled", "fail", f"Training examples come {kind}.", advice=(fix,), **numbers)
    if in_place:
        why = "their labels are in no order" if labels is not None else "labels are unknown"
        return data_finding(
            "unshuffled", "warn", f"Training examples come in the order they are stored in; {why}, but time or source may be.",
            advice=(fix,), **numbers,
        )  # fmt: skip
    in_order = indices is not None and indices["displacement"] < _IN_PLACE
    if order["examples"] < 2 or in_order or (labels is not None and labels["neighbours"] >= _SORTED):
        few = (
            f"Not measured: {order['examples']:,} examples are too few to tell an order that looks sorted from chance."
        )
        return data_finding("unshuffled", "not_measured", few, evidence=dict(order))
    return data_finding("unshuffled", "ok", "Training examples do not come sorted.", **numbers)


def weak_shuffle(facts: Mapping[str, Any], alpha: float, before: Finding) -> Finding:
    """Judge whether the order looks random, `before` being the verdict of `unshuffled`."""
    order = facts["order"]
    if order is None or (before.status == "not_measured" and not (order["epochs"] or {}).get("same")):
        return data_finding("weak_shuffle", "not_measured", before.summary)
    if order["source"] == "trainer":
        return data_finding("weak_shuffle", "ok", before.summary, evidence=dict(order))
    if before.status in ("warn", "fail"):
        return data_finding("weak_shuffle", "not_measured", "Not measured: nothing is shuffled, see data.unshuffled.")
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
        return data_finding("weak_shuffle", "warn", said, advice=(advice,), **numbers)
    return data_finding("weak_shuffle", "ok", f"The order looks random by {len(tests)} tests, the least of them p = {p:.2g} ({name}).", **numbers)  # fmt: skip


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
