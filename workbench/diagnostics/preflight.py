"""`diagnose_preflight`: what is wrong before any training; the cheapest findings there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.diagnostics.base import Diagnosis, Finding
from workbench.diagnostics.chance import chance_loss
from workbench.diagnostics.trials import RecordLike

__all__ = ["diagnose_preflight", "spoilt_splits"]

_CLAUSE = {
    "data.nonfinite": "F1.1",
    "data.labels": "F1.1",
    "init.loss": "F2.4",
    "loop.no_gradient": "F1.1",
    "loop.no_update": "F1.1",
}


def diagnose_preflight(record: RecordLike, *, init_loss_ratio: float = 1.5, min_class_frac: float = 0.0) -> Diagnosis:
    """Judge the facts that were collected before training.

    Args:
        record: a study whose facts hold "preflight".
        init_loss_ratio: the initial loss may be this many times that of guessing uniformly (rule of thumb: a fresh
            classifier should know nothing, and not be confident of it).
        min_class_frac: smallest share of the training examples that a class may have; 0 asks for one example.

    Returns:
        `data.nonfinite`, `data.labels`, `init.loss`, `loop.no_gradient`, `loop.no_update`, once each.
    """
    facts = record.facts.get("preflight")
    if not facts:
        reason = "Not measured: this study has no pre-flight; `workbench diagnose` makes one."
        findings = tuple(Finding(code=code, status="not_measured", summary=reason) for code in _CLAUSE)
    else:
        findings = (
            _nonfinite(facts),
            _labels(facts, min_class_frac),
            _init_loss(facts, init_loss_ratio),
            _parameters(facts, "no_gradient"),
            _parameters(facts, "no_update"),
        )
    findings = tuple(replace(f, clause=_CLAUSE[f.code]) for f in findings)
    return Diagnosis(findings=findings, workload=record.workload, command=record.command, path=record.path)


def spoilt_splits(facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the splits whose loss is spoilt by values that are not finite, with their number.

    Values that the loss does not see are none: a mask of minus infinity, or a missing target that is left out.
    """
    return {
        split: facts[split]["nonfinite_values"]
        for split in ("train", "validation")
        if facts[split]["nonfinite_values"] and not math.isfinite(facts[split]["loss"] or math.nan)
    }


def _nonfinite(facts: Mapping[str, Any]) -> Finding:
    bad, gradient = spoilt_splits(facts), facts["nonfinite_gradient"]
    masked = sum(facts[s]["nonfinite_values"] for s in ("train", "validation"))
    read = {s: facts[s]["read"] for s in ("train", "validation")}
    evidence = {"nonfinite_values": bad, "examples_read": read, "nonfinite_gradient": gradient}
    if not bad and not gradient:
        shown = " and ".join(f"{n} {s}" for s, n in read.items())
        said = f"All values of {shown} examples are finite."
        if masked:
            said = f"{masked} values of {shown} examples are not finite; the loss of every example is."
        return Finding(code="data.nonfinite", status="ok", summary=said, evidence=evidence)
    where = (
        ", ".join(f"{count} in {split}" for split, count in bad.items()) or f"the gradient of {', '.join(gradient[:3])}"
    )
    first = {split: facts[split]["nonfinite_from_example"] for split in bad}
    return Finding(
        code="data.nonfinite", status="fail", value=float(sum(bad.values())), unit="values", evidence=evidence,
        summary=f"NaN or infinite values: {where}.",
        advice=[
            *(f"Look at the {split} data from example {start} on." for split, start in first.items()),
            *([] if bad else ["Look at logarithms and divisions."]),
            "Replace or drop missing values before training.",
        ],
    )  # fmt: skip


def _labels(facts: Mapping[str, Any], min_class_frac: float) -> Finding:
    counts = facts["train"]["class_counts"]
    if counts is None:
        return Finding(
            code="data.labels", status="not_measured",
            summary="Not measured: the loss is not one of classification(...), so classes are unknown.",
        )  # fmt: skip
    total = sum(counts)
    rare = [k for k, n in enumerate(counts) if n <= min_class_frac * total]
    evidence = {"class_counts": counts}
    if len(counts) > 50 or not rare:
        summary = f"All targets lie in 0 to {len(counts) - 1}; the rarest class has {min(counts)} of {total} examples."
        return Finding(
            code="data.labels",
            status="ok",
            summary=summary,
            value=float(min(counts)),
            unit="examples",
            evidence=evidence,
        )
    return Finding(
        code="data.labels", status="warn", value=float(len(rare)), unit="classes", evidence=evidence,
        summary=f"The model has {len(counts)} outputs, but no training example is of class {', '.join(map(str, rare[:8]))}.",
        advice=["Check how targets are numbered, and whether the split lost a class.", "Give the model fewer outputs."],
    )  # fmt: skip


def _init_loss(facts: Mapping[str, Any], ratio: float) -> Finding:
    classes, loss = facts["train"]["classes"], facts["train"]["loss"]
    if loss is None:
        return Finding(code="init.loss", status="not_measured", summary="Not measured: the initial loss is not finite.")
    if not classes or classes < 2:
        return Finding(
            code="init.loss", status="not_measured",
            summary="Not measured: the loss is no cross-entropy over classes, so chance is unknown.",
            evidence={"loss": loss},
        )  # fmt: skip
    chance = chance_loss(classes)
    evidence = {"loss": loss, "chance": chance, "classes": classes}
    shown = f"The initial loss is {loss:.3f}; guessing among {classes} classes gives {chance:.3f}"
    if loss <= ratio * chance:
        return Finding(
            code="init.loss",
            status="ok",
            summary=f"{shown}.",
            value=loss,
            unit="loss",
            threshold=ratio * chance,
            evidence=evidence,
        )
    return Finding(
        code="init.loss", status="warn", value=loss, unit="loss", threshold=ratio * chance, evidence=evidence,
        summary=f"{shown}: the untrained model is confidently wrong.",
        advice=[
            "Scale the inputs to about unit size.",
            "Initialise the last layer smaller (zeros are allowed there), so that the first outputs are near 0.",
        ],
    )  # fmt: skip


def _parameters(facts: Mapping[str, Any], kind: str) -> Finding:
    names, total = facts[kind], facts["tensors"]
    word = "a gradient" if kind == "no_gradient" else "an update"
    evidence = {"parameters": names, "frozen_on_purpose": facts["frozen"], "tensors": total}
    if not total:
        said = "Not measured: the data holds values that are not finite, so no step was taken."
        return Finding(code=f"loop.{kind}", status="not_measured", summary=said)
    if not names:
        frozen = f"; {len(facts['frozen'])} are frozen on purpose" if facts["frozen"] else ""
        return Finding(
            code=f"loop.{kind}", status="ok", summary=f"Every one of {total} trained parameter tensors gets {word}{frozen}.",
            evidence=evidence,
        )  # fmt: skip
    nothing_learns = kind == "no_gradient" and len(names) == total
    return Finding(
        code=f"loop.{kind}", status="fail" if nothing_learns else "warn", value=float(len(names)), unit="tensors", evidence=evidence,
        summary=f"{len(names)} of {total} parameter tensors get no {word.rsplit(maxsplit=1)[-1]} in the first step: {', '.join(names[:4])}.",
        advice=[
            "Check that the forward pass uses them, and that nothing detaches the graph before them.",
            "A branch that is multiplied by zero at the start, or a ReLU that is off everywhere, also shows here.",
        ],
    )  # fmt: skip
