"""`diagnose_preflight`: what is wrong before any training; the cheapest findings there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.curves.classify import chance_loss
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.data.diagnose_signal import wrong_labels

__all__ = ["diagnose_preflight", "misnumbered", "spoilt_splits"]

_CLAUSE = {
    "data.nonfinite": "F1.1",
    "data.labels": "F1.1",
    "init.loss": "F2.4",
    "loop.no_gradient": "F1.1",
    "loop.no_update": "F1.1",
}


def diagnose_preflight(
    record: RecordLike,
    *,
    init_loss_ratio: float = 1.5,
    init_spread_ratio: float = 30.0,
    init_offset: float = 10.0,
    min_class_frac: float = 0.0,
    cut_share: float = 0.1,
    unused_share: float = 0.2,
    cancelled_share: float = 0.02,
) -> Diagnosis:
    """Judge the facts that were collected before training.

    Args:
        record: a study whose facts hold "preflight", and "one_batch" for what a single step cannot tell.
        init_loss_ratio: the initial loss may be this many times that of guessing uniformly (rule of thumb: a fresh
            classifier should know nothing, and not be confident of it).
        init_spread_ratio: the fresh outputs of a regression may vary this many times as much as the targets (rule of thumb).
        init_offset: standard deviations of the targets that they may lie from their mean (rule of thumb).
        min_class_frac: smallest share of the training examples that a class may have; 0 asks for one example.
        cut_share: share of the trained parameters, or of their tensors, from which on it is a failure that the forward pass
            uses them and no gradient reaches them, or that the optimizer leaves them as they are (rule of thumb).
        unused_share: share of the trained parameters that the forward pass may leave unused (rule of thumb: a head that is not
            needed has less).
        cancelled_share: share of them that may have a gradient of 0 in the graph: a bias cancels in a difference of two outputs of one
            net, or before a norm (rule of thumb).

    Returns:
        `data.nonfinite`, `data.labels`, `init.loss`, `loop.no_gradient`, `loop.no_update`, once each.
    """
    facts = record.facts.get("preflight")
    if not facts:
        reason = "Not measured: this study has no pre-flight; `workbench diagnose` makes one."
        findings = tuple(Finding(code=code, status="not_measured", summary=reason) for code in _CLAUSE)
    else:
        one_batch = record.facts.get("one_batch") or {}
        findings = (
            _nonfinite(facts),
            _labels(facts, record.facts.get("data") or {}, min_class_frac),
            _init_loss(facts, one_batch, init_loss_ratio, init_spread_ratio, init_offset),
            _no_gradient(facts, one_batch, cut_share, unused_share, cancelled_share),
            _no_update(facts | {"no_update": [n for n in facts["no_update"] if n not in _unowned(record)]}, cut_share),
        )
    findings = tuple(replace(f, clause=_CLAUSE[f.code]) for f in findings)
    return Diagnosis.of(record, findings)


def spoilt_splits(facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the splits whose loss is spoilt by values that are not finite, with their number.

    Values that the loss does not see are none: a mask of minus infinity, or a missing target that is left out.
    """
    return {
        split: facts[split]["nonfinite_values"]
        for split in ("train", "validation")
        if facts[split]["nonfinite_values"] and facts[split]["loss"] is None
    }


def misnumbered(facts: Mapping[str, Any]) -> list[str]:
    """Return what is said of targets that the model has no output for, split by split."""
    return [said for split in ("train", "validation") if (said := (facts.get(split) or {}).get("misnumbered"))]


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
        ", ".join(f"{count} in {split}{_parts(facts[split])}" for split, count in bad.items())
        or f"the gradient of {', '.join(gradient[:3])}"
    )
    return Finding(
        code="data.nonfinite", status="fail", value=float(sum(bad.values())), unit="values", evidence=evidence,
        summary=f"NaN or infinite values: {where}.",
        advice=[
            *(_where_to_look(split, facts[split]) for split in bad),
            *([] if bad else ["Look at logarithms and divisions."]),
            "Replace or drop missing values before training.",
        ],
    )  # fmt: skip


def _parts(split: Mapping[str, Any]) -> str:
    """Return which parts of the batches hold the values, of a record that knows."""
    known = split.get("nonfinite_in") or {}
    parts = " and ".join(known if len(known) == 1 else [f"{n} in {part}" for part, n in known.items()])
    return f" ({parts})" if parts else ""


def _where_to_look(name: str, split: Mapping[str, Any]) -> str:
    first, last = split["nonfinite_from_example"], split.get("nonfinite_to_example")
    if last is None:
        return f"Look at the {name} data from example {first} on."
    if first == last:
        return f"Look at example {first} of the {name} data: it is the first."
    return f"Look at examples {first} to {last} of the {name} data: the first is one of them."


def _labels(facts: Mapping[str, Any], data: Mapping[str, Any], min_class_frac: float) -> Finding:
    counts = facts["train"]["class_counts"]
    wrong = misnumbered(facts)
    if wrong:
        return Finding(
            code="data.labels", status="fail", evidence={"misnumbered": wrong}, summary=f"Targets are no classes of the model: {wrong[0]}",
            advice=["Number the classes from 0, in every split alike.", "Give the model as many outputs as there are classes."],
        )  # fmt: skip
    tokens = (
        counts is not None and sum(counts) != facts["train"]["read"]
    )  # a vocabulary may well have symbols that a text has not
    if counts is not None and len(counts) > 1 and max(counts) == sum(counts) > 0 and not tokens:
        return Finding(
            code="data.labels", status="fail", evidence={"class_counts": counts},
            summary=f"All {sum(counts):,} training examples are of class {counts.index(sum(counts))}.",
            advice=["Look at how the targets are made, and at what was filtered or cut off."],
        )  # fmt: skip
    flipped = wrong_labels(data)
    if flipped is not None:
        return Finding(
            code="data.labels", status="warn", value=flipped["share"], unit="share", evidence={"class_counts": counts, **flipped},
            summary=f"About {flipped['share']:.0%} of the training labels look wrong at random: they fall on all other classes alike, however "
            f"unlike their examples these are, while {flipped['right']:.0%} are what a linear model says.",
            advice=["Look at some examples whose label a simple model finds least likely.", "Ask how the labels were made, and joined to the inputs."],
        )  # fmt: skip
    if counts is None:
        return Finding(
            code="data.labels", status="ok",
            summary="Does not apply: the loss is not one of classification(...), so the targets are no classes that could be counted.",
        )  # fmt: skip
    total = sum(counts)
    rare = [k for k, n in enumerate(counts) if n <= min_class_frac * total]
    evidence = {"class_counts": counts}
    if len(counts) > 50 or tokens or not rare:
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


def _init_loss(
    facts: Mapping[str, Any], one_batch: Mapping[str, Any], ratio: float, spread_ratio: float, offset: float
) -> Finding:
    classes, losses = facts["train"]["classes"], (facts["train"]["loss"], facts["first_loss"])
    if facts.get("nonfinite_loss"):
        return Finding(
            code="init.loss", status="fail", evidence={"loss": facts["nonfinite_loss"]},
            summary=f"The loss is {facts['nonfinite_loss']} before any update, though all data are finite.",
            advice=("Look at the size of inputs and targets, at the model's initialisation, and at exponentials, logarithms and divisions in the loss.",),
        )  # fmt: skip
    if losses[0] is None:
        return Finding(code="init.loss", status="not_measured", summary="Not measured: the initial loss is not finite.")
    loss = min(v for v in losses if v is not None)  # batch norm: in evaluation the fresh statistics tell nothing
    asked = one_batch.get("loss") or {}
    if classes and classes >= 2:
        chance = chance_loss(classes)
        return _against_chance(loss, chance, f"guessing among {classes} classes gives {chance:.3f}", ratio, classes)
    if asked.get("kind") in ("binary", "classes") and asked["ignorant"] > 0:  # a function of the user's own
        equal = asked["ignorant"]
        return _against_chance(loss, equal, f"equal logits give {equal:.4g}", ratio, asked["classes"])
    return _init_scale(losses[0], one_batch, spread_ratio, offset)


def _against_chance(loss: float, chance: float, said: str, ratio: float, classes: int) -> Finding:
    shown = f"The initial loss is {loss:.4g}; {said}"
    numbers: dict[str, Any] = {
        "value": loss, "unit": "loss", "threshold": ratio * chance, "evidence": {"loss": loss, "chance": chance, "classes": classes},
    }  # fmt: skip
    if loss <= ratio * chance:
        return Finding(code="init.loss", status="ok", summary=f"{shown}.", **numbers)
    return Finding(
        code="init.loss", status="warn", summary=f"{shown}: the untrained model is confidently wrong.", advice=_SMALLER, **numbers,
    )  # fmt: skip


_SMALLER = (
    "Scale the inputs to about unit size.",
    "Initialise the last layer smaller (zeros are allowed there), so that the first outputs are near 0.",
)


def _init_scale(loss: float, one_batch: Mapping[str, Any], spread_limit: float, offset_limit: float) -> Finding:
    """Judge a regression: its fresh outputs may be wrong, but neither vary far more than the targets nor lie far from them."""
    asked, outputs = one_batch.get("loss") or {}, one_batch.get("spread") or {}
    targets, spread, mean = asked.get("target_spread"), outputs.get("spread"), outputs.get("mean")
    if asked.get("kind") != "regression" or not targets or not all(isinstance(v, (int, float)) for v in (spread, mean)):
        said = "Does not apply: the loss is neither cross-entropy over classes nor an error, so what guessing costs is unknown."
        return Finding(code="init.loss", status="ok", summary=said, evidence={"loss": loss})
    ratio, offset = spread / targets, abs(mean - asked["target_mean"]) / targets
    evidence = {
        "loss": loss,
        "output_spread": spread,
        "output_mean": mean,
        "target_spread": targets,
        "target_mean": asked["target_mean"],
    }
    if ratio > spread_limit:
        return Finding(
            code="init.loss", status="warn", value=ratio, unit="times", threshold=spread_limit, evidence=evidence, advice=_SMALLER,
            summary=f"The fresh model's outputs vary {ratio:.3g} times as much as the targets.",
        )  # fmt: skip
    numbers: dict[str, Any] = {"value": offset, "unit": "deviations", "threshold": offset_limit, "evidence": evidence}
    said = f"The fresh model's outputs lie {offset:.3g} standard deviations of the targets from their mean"
    if offset <= offset_limit:
        return Finding(code="init.loss", status="ok", summary=f"{said}.", **numbers)
    return Finding(
        code="init.loss", status="warn", summary=f"{said}: training has to find their mean first.", **numbers,
        advice=["Standardise the targets, or begin the last layer's bias at their mean."],
    )  # fmt: skip


def _unowned(record: RecordLike) -> set[str]:
    """Return the parameters that the optimizer was not given: another finding's business (`diagnose_parameters`)."""
    return {str(row["name"]) for row in (record.facts.get("parameters") or {}).get("unowned", ())}


_NO_STEP = "Not measured: the data holds values that are not finite, so no step was taken."


def _no_gradient(
    facts: Mapping[str, Any],
    one_batch: Mapping[str, Any],
    cut_share: float,
    unused_share: float,
    cancelled_share: float,
) -> Finding:
    """Judge tensors that got no gradient in the first step, nor in those in which one batch was fitted."""
    fit, layers = one_batch.get("fit") or {}, one_batch.get("layers") or {}
    later = fit.get("without_gradient")
    names = [name for name in facts["no_gradient"] if later is None or name in later]
    unused = [name for name in names if name in layers.get("not_in_forward", ())]
    cut = [name for name in names if name in layers.get("not_in_graph", ()) and name not in unused]
    evidence = {
        "parameters": names, "unused": unused, "cut_off": cut, "frozen_on_purpose": facts["frozen"], "tensors": facts["tensors"],
    }  # fmt: skip
    share = _share(facts, names)
    numbers: dict[str, Any] = {"value": share, "unit": "share", "evidence": evidence}
    code, few = "loop.no_gradient", _few(names)
    if not facts["tensors"]:
        return Finding(code=code, status="not_measured", summary=_NO_STEP)
    if not names:
        frozen = f"; {len(facts['frozen'])} are frozen on purpose" if facts["frozen"] else ""
        said = f"Every one of {facts['tensors']} trained parameter tensors gets a gradient{frozen}."
        return Finding(code=code, status="ok", summary=said, **numbers)
    if cut:
        heavy = _share(facts, cut) >= cut_share or len(cut) >= facts["tensors"] / 4
        return Finding(
            code=code, status="fail" if heavy else "warn", threshold=cut_share,
            summary=f"{_share(facts, cut):.0%} of the trained parameters are used, but no gradient reaches them: {_few(cut)}.", **numbers,
            advice=["Look for detach(), no_grad(), .item(), .data or NumPy behind them; freeze on purpose with requires_grad_(False)."],
        )  # fmt: skip
    if len(unused) == len(names):
        said = f"{share:.0%} of the trained parameters are not used by the forward pass: {few}."
        if share < unused_share:
            return Finding(code=code, status="ok", summary=said, threshold=unused_share, **numbers)
        return Finding(
            code=code, status="warn", summary=said, threshold=unused_share, **numbers,
            advice=["Call the layers in forward, or delete them."],
        )  # fmt: skip
    if share <= cancelled_share:
        said = f"{len(names)} of {facts['tensors']} parameter tensors, {share:.1%} of the parameters, have no effect on the loss: {few}."
        return Finding(code=code, status="ok", summary=said, threshold=cancelled_share, **numbers)
    return Finding(
        code=code, status="fail" if len(names) == facts["tensors"] else "warn", **numbers,
        summary=f"{len(names)} of {facts['tensors']} parameter tensors get no gradient: {few}.",
        advice=[
            "Check that the forward pass uses them, and that nothing detaches the graph before them.",
            "A branch that is multiplied by zero, an input that is always 0, or a ReLU that is off everywhere also shows here.",
        ],
    )  # fmt: skip


def _no_update(facts: Mapping[str, Any], limit: float) -> Finding:
    names = [name for name in facts["no_update"] if name not in facts["no_gradient"]]
    evidence = {"parameters": names, "frozen_on_purpose": facts["frozen"], "tensors": facts["tensors"]}
    share = _share(facts, names)
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": evidence}
    if not facts["tensors"]:
        return Finding(code="loop.no_update", status="not_measured", summary=_NO_STEP)
    if not names:
        said = "Every parameter tensor that gets a gradient gets an update."
        return Finding(code="loop.no_update", status="ok", summary=said, **numbers)
    return Finding(
        code="loop.no_update", status="fail" if share >= limit else "warn", **numbers,
        summary=f"{share:.0%} of the trained parameters get a gradient, but the optimizer does not move them: {_few(names)}.",
        advice=["Give the optimizer all of model.parameters(), after every layer is made; freeze on purpose with requires_grad_(False)."],
    )  # fmt: skip


def _share(facts: Mapping[str, Any], names: Sequence[str]) -> float:
    """Return the share of the trained parameters in these tensors."""
    sizes = facts.get("sizes", {})
    return float(sum(sizes.get(name, 0) for name in names) / max(1, facts["parameters"]))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
