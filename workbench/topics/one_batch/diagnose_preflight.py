"""`diagnose_preflight`: what is wrong before any training; the cheapest findings there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from workbench.curves.instability import chance_loss
from workbench.curves.trial_curves import RecordLike
from workbench.findings.causes import STANDS_ALONE
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, named

CODES = Codes({
    "data.nonfinite": "F1.1", "data.labels": "F1.1", "init.loss": "F2.4", "loop.no_gradient": "F1.1", "loop.no_update": "F1.1",
})  # fmt: skip
SPLITS = ("train", "validation")
_SMALLER = (
    "Initialise the last layer smaller (zeros are allowed there; 0.02 for an embedding that also makes the logits), so that the first outputs are near 0.",
    "Scale the inputs to about unit size.",
)
MOST_OUTPUTS = 50
"""Outputs up to which a class without an example is told (rule of thumb)."""
_NO_STEP = "the data holds values that are not finite, so no step was taken"
_NO_CLASS = "the model has no output for some of the targets, so that there is no loss"
Facts = Mapping[str, Any]
_FEWEST_CLASSES = 5  # with fewer, classes that overlap have as even a tail as wrong labels


def diagnose_preflight(
    record: RecordLike,
    *,
    init_loss_ratio: float = 1.5,
    init_loss_excess: float = 1.0,
    init_spread_ratio: float = 30.0,
    init_offset: float = 10.0,
    min_class_frac: float = 0.0,
    cut_share: float = 0.1,
    unused_share: float = 0.2,
    cancelled_share: float = 0.02,
) -> Diagnosis:
    """Judge the facts that were collected before training.

    Args:
        init_loss_ratio: the initial loss may be this many times that of guessing uniformly (rule of thumb: a fresh
            classifier should know nothing, and not be confident of it).
        init_loss_excess: nats that it may lie above that in any case: independent logits of deviation s cost about s**2 / 2, and a linear
            layer of few inputs as torch draws it reaches 0.6 (rule of thumb).
        init_spread_ratio: the fresh outputs of a regression may vary this many times as much as the targets (rule of thumb).
        init_offset: standard deviations of the targets that they may lie from their mean (rule of thumb).
        min_class_frac: smallest share of the training examples that a class may have; 0 asks for one example.
        cut_share: share of the trained parameters, or of their tensors, from which on it is a failure that the forward pass
            uses them and no gradient reaches them, or that the optimizer leaves them as they are (rule of thumb).
        unused_share: share of the trained parameters that the forward pass may leave unused (rule of thumb: a head that is not
            needed has less).
        cancelled_share: share of them that may have a gradient of 0 in the graph: a bias cancels in a difference of two outputs of one
            net, or before a norm (rule of thumb).
    """
    facts, one_batch = record.facts.get("preflight"), record.facts.get("one_batch") or {}
    if not facts:
        reason = "this study made no checks before training; `workbench diagnose` does"
        return Diagnosis.of(record, [CODES.not_measured(code, reason) for code in CODES])
    unowned = {str(row["name"]) for row in (record.facts.get("parameters") or {}).get("unowned", ())}
    findings = (
        _nonfinite(facts),
        _labels(facts, record.facts.get("data") or {}, min_class_frac),
        initial_loss(
            facts,
            one_batch,
            ratio=init_loss_ratio,
            excess=init_loss_excess,
            spread_ratio=init_spread_ratio,
            offset=init_offset,
        ),
        _no_gradient(facts, one_batch, cut_share, unused_share, cancelled_share),
        _no_update(facts, unowned, cut_share),
    )
    return Diagnosis.of(record, findings)


def spoilt_splits(facts: Facts) -> dict[str, int]:
    """Return the splits whose loss is spoilt by values that are not finite, with their number."""
    counts = {split: facts[split]["nonfinite_values"] for split in SPLITS}
    return {split: count for split, count in counts.items() if count and facts[split]["loss"] is None}


def misnumbered(facts: Facts) -> list[str]:
    """Return what is said of targets that the model has no output for, split by split."""
    return [said for split in SPLITS if (said := (facts.get(split) or {}).get("misnumbered"))]


def _nonfinite(facts: Facts) -> Finding:
    bad, gradient = spoilt_splits(facts), facts["nonfinite_gradient"]
    read = {split: facts[split]["read"] for split in SPLITS}
    evidence = {"nonfinite_values": bad, "examples_read": read, "nonfinite_gradient": gradient}
    say = partial(CODES.finding, "data.nonfinite", evidence=evidence)
    if not bad and not gradient:
        shown, masked = (
            " and ".join(f"{n} {s}" for s, n in read.items()),
            sum(facts[s]["nonfinite_values"] for s in SPLITS),
        )
        if masked:
            return say("ok", f"{masked} values of {shown} examples are not finite; the loss of every example is.")
        return say("ok", f"All values of {shown} examples are finite.")
    where, advice = [f"the gradient of {', '.join(gradient[:3])}"], ["Look at logarithms and divisions."]
    if bad:
        where, advice = [], []
    for split, count in bad.items():
        known = facts[split].get("nonfinite_in") or {}  # older records do not know
        parts = " and ".join(known if len(known) == 1 else [f"{n} in {part}" for part, n in known.items()])
        where.append(f"{count} in {split}" + (f" ({parts})" if parts else ""))
        first, last = facts[split]["nonfinite_from_example"], facts[split].get("nonfinite_to_example")
        look = f"Look at examples {first} to {last} of the {split} data: the first is one of them."
        if last is None:
            look = f"Look at the {split} data from example {first} on."
        elif first == last:
            look = f"Look at example {first} of the {split} data: it is the first."
        advice.append(look)
    return say(
        "fail", f"NaN or infinite values: {', '.join(where)}.", value=float(sum(bad.values())), unit="values",
        advice=[*advice, "Replace or drop missing values before training."],
    )  # fmt: skip


def _labels(facts: Facts, data: Facts, min_class_frac: float) -> Finding:
    counts, wrong, say = facts["train"]["class_counts"], misnumbered(facts), partial(CODES.finding, "data.labels")
    if wrong:
        said, _, fix = wrong[0].partition("). ")
        return say("fail", f"{said[:1].upper()}{said[1:]}).", evidence={"misnumbered": wrong}, advice=[fix])
    evidence, total = {"class_counts": counts}, sum(counts or ())
    say = partial(say, evidence=evidence)
    tokens = total != facts["train"]["read"]  # a vocabulary may well have symbols that a text has not
    if counts is not None and len(counts) > 1 and max(counts) == total > 0 and not tokens:
        advice = ["Look at how the targets are made, and at what was filtered or cut off."]
        return say("fail", f"All {total:,} training examples are of class {counts.index(total)}.", advice=advice)
    if (found := wrong_targets(data, evidence)) is not None:
        return found
    if (apart := wrong_in_training(data)) is not None:
        return CODES.finding(
            "data.labels", "warn", f"About {apart['share']:.0%} of the training labels, or more, look wrong: a simple model predicts {apart['validation']:.0%} of the labels of "
            f"validation and {apart['predicted']:.0%} of those of training rows that it was not fitted to, though inputs and classes of both splits are alike.",
            value=apart["share"], unit="share", evidence={**evidence, **apart},
            advice=["Look at training examples whose label a simple model finds least likely, and which class it prefers: labels of one source may be numbered differently."],
        )  # fmt: skip
    if counts is None:
        said = "Does not apply: the loss is not one of classification(...), so the targets are not classes that could be counted."
        return CODES.finding("data.labels", "ok", said)
    rare = [k for k, n in enumerate(counts) if n <= min_class_frac * total]
    if len(counts) > MOST_OUTPUTS or tokens or not rare:
        said = f"All targets lie in 0 to {len(counts) - 1}; the rarest class has {min(counts)} of {total} examples."
        return say("ok", said, value=float(min(counts)), unit="examples")
    return empty_classes(rare, len(counts), evidence)


def empty_classes(empty: list[int], outputs: int, evidence: Facts, of: str = "no training example") -> Finding:
    """Return the finding that classes have no example; outputs beyond the last class that has one do no harm."""
    if empty == list(range(empty[0], outputs)):
        beyond = (
            f"outputs {empty[0]} to {outputs - 1} of the model have"
            if len(empty) > 1
            else f"output {empty[0]} of the model has"
        )
        return CODES.finding(
            "data.labels",
            "ok",
            f"All classes up to {empty[0] - 1} have training examples; {beyond} few or none.",
            evidence=evidence,
        )
    return CODES.finding(
        "data.labels", "warn", f"The model has {outputs} outputs, but {of} is of class {', '.join(map(str, empty[:8]))}.",
        value=float(len(empty)), unit="classes", evidence=evidence,
        advice=["Check how targets are numbered, and whether the split lost a class.", "Give the model fewer outputs."],
    )  # fmt: skip


def wrong_targets(data: Facts, evidence: Facts, *, share: float = 0.1) -> Finding | None:
    """Return the finding that labels are wrong at random, or that a `share` of targets or more (rule of thumb) belongs to other rows; None where neither shows."""
    say, flipped = partial(CODES.finding, "data.labels", "warn", unit="share"), wrong_labels(data)
    if flipped is not None:
        return say(
            f"About {flipped['share']:.0%} of the training labels look wrong at random: they fall on all other classes alike, however "
            f"unlike their examples these are, while {flipped['right']:.0%} are what a linear model says.", value=flipped["share"], evidence={**evidence, **flipped},
            advice=["Look at some examples whose label a simple model finds least likely.", "Ask how the labels were made, and joined to the inputs."],
        )  # fmt: skip
    strangers = (data.get("yardsticks") or {}).get("strangers")
    if strangers is None or strangers["share"] < share:
        return None
    return say(
        f"About {strangers['share']:.0%} of the training targets look like those of other rows: their inputs tell nothing of them, while a linear model predicts the others.",
        value=strangers["share"], evidence={**evidence, **strangers},
        advice=["Check how inputs and targets are joined: by a key that repeats or is missing, or after one of the two was sorted.", "Look at the rows that are furthest from a linear fit."],
    )  # fmt: skip


def initial_loss(
    facts: Facts,
    one_batch: Facts,
    *,
    ratio: float = 1.5,
    excess: float = 1.0,
    spread_ratio: float = 30.0,
    offset: float = 10.0,
) -> Finding:
    """Judge the loss of the fresh model by that of guessing, or its outputs by the targets; see `diagnose_preflight`."""
    code, classes, asked = "init.loss", facts["train"]["classes"], one_batch.get("loss") or {}
    losses = (facts["train"]["loss"], facts["first_loss"])
    if broken := facts.get("nonfinite_loss"):
        return CODES.finding(
            code, "fail", f"The loss is {broken} before any update, though all data are finite.", evidence={"loss": broken},
            advice=("Look at the size of inputs and targets, at the model's initialisation, and at exponentials, logarithms and divisions in the loss.",),
        )  # fmt: skip
    if losses[0] is None:
        return CODES.not_measured(code, _NO_CLASS if misnumbered(facts) else "the initial loss is not finite")
    loss = min(v for v in losses if v is not None)  # batch norm: in evaluation the fresh statistics tell nothing
    if classes and classes >= 2:
        chance = chance_loss(classes)
        said = f"guessing among {classes} classes gives {chance:.3f}"
    elif asked.get("kind") in ("binary", "classes") and asked["ignorant"] > 0:  # a function of the user's own
        chance, classes = asked["ignorant"], asked["classes"]
        said = f"equal logits give {chance:.4g}"
    else:
        return _init_scale(losses[0], one_batch, spread_ratio, offset)
    limit = max(ratio * chance, chance + excess)
    said, wrong = f"The initial loss is {loss:.4g}; {said}", loss > limit
    return CODES.finding(
        code, "warn" if wrong else "ok", f"{said}: the untrained model is confidently wrong." if wrong else f"{said}.", value=loss, unit="loss",
        threshold=limit, evidence={"loss": loss, "chance": chance, "classes": classes}, advice=_SMALLER if wrong else (),
    )  # fmt: skip


def _init_scale(loss: float, one_batch: Facts, spread_limit: float, offset_limit: float) -> Finding:
    """Judge a regression: its fresh outputs may be wrong, but neither vary far more than the targets nor lie far from them."""
    asked, outputs = one_batch.get("loss") or {}, one_batch.get("spread") or {}
    targets, spread, mean = asked.get("target_spread"), outputs.get("spread"), outputs.get("mean")
    say = partial(CODES.finding, "init.loss")
    if asked.get("kind") != "regression" or not targets or not all(isinstance(v, (int, float)) for v in (spread, mean)):
        said = "Does not apply: the loss is neither cross-entropy over classes nor an error, so what guessing costs is unknown."
        return say("ok", said, evidence={"loss": loss})
    ratio, offset = spread / targets, abs(mean - asked["target_mean"]) / targets
    evidence = {
        "loss": loss, "output_spread": spread, "output_mean": mean, "target_spread": targets, "target_mean": asked["target_mean"],
    }  # fmt: skip
    if ratio > spread_limit:
        return say(
            "warn", f"The fresh model's outputs vary {ratio:.3g} times as much as the targets.",
            value=ratio, unit="times", threshold=spread_limit, evidence=evidence, advice=_SMALLER,
        )  # fmt: skip
    say = partial(say, value=offset, unit="deviations", threshold=offset_limit, evidence=evidence)
    said = f"The fresh model's outputs lie {offset:.3g} standard deviations of the targets from their mean"
    if offset <= offset_limit:
        return say("ok", f"{said}.")
    advice = ["Standardise the targets, or begin the last layer's bias at their mean."]
    return say("warn", f"{said}: training has to find their mean first.", advice=advice)


def _no_gradient(
    facts: Facts, one_batch: Facts, cut_share: float, unused_share: float, cancelled_share: float
) -> Finding:
    """Judge tensors that got no gradient in the first step, nor in those in which one batch was fitted."""
    code, tensors, frozen = "loop.no_gradient", facts["tensors"], facts["frozen"]
    layers, later = one_batch.get("layers") or {}, (one_batch.get("fit") or {}).get("without_gradient")
    names = [name for name in facts["no_gradient"] if later is None or name in later]
    unused = [name for name in names if name in layers.get("not_in_forward", ())]
    cut = [name for name in names if name in layers.get("not_in_graph", ()) and name not in unused]
    evidence = {"parameters": names, "unused": unused, "cut_off": cut, "frozen_on_purpose": frozen, "tensors": tensors}
    share, few = _share_of_parameters(facts, names), named(names, shown=4)
    say = partial(CODES.finding, code, value=share, unit="share", evidence=evidence)
    if not tensors:
        return CODES.not_measured(code, _NO_CLASS if misnumbered(facts) else _NO_STEP)
    if not names:
        kept = f"; {len(frozen)} are frozen on purpose" if frozen else ""
        return say("ok", f"Every one of {tensors} trained parameter tensors gets a gradient{kept}.")
    if cut:
        heavy = _share_of_parameters(facts, cut) >= cut_share or len(cut) >= tensors / 4
        return say(
            "fail" if heavy else "warn", threshold=cut_share,
            summary=f"{_share_of_parameters(facts, cut):.0%} of the trained parameters are used, but no gradient reaches them: {named(cut, shown=4)}.",
            advice=["Look for detach(), no_grad(), .item(), .data or NumPy behind them; freeze on purpose with requires_grad_(False)."],
        )  # fmt: skip
    idle = _share_of_parameters(facts, unused)
    if unused and (idle >= unused_share or len(unused) == len(names)):
        few_enough, others = idle < unused_share, len(names) - len(unused)
        evidence[STANDS_ALONE] = True  # whatever keeps the rest from training
        more = f" {others} other{'s get' if others > 1 else ' gets'} no gradient." if others else ""
        return say(
            "ok" if few_enough else "warn", f"{idle:.0%} of the trained parameters are not used by the forward pass: {named(unused, shown=4)}.{more}",
            threshold=unused_share, advice=() if few_enough else ["Call the layers in forward, or delete them."],
        )  # fmt: skip
    if share <= cancelled_share:
        said = f"{len(names)} of {tensors} parameter tensors, {share:.1%} of the parameters, have no effect on the loss: {few}."
        return say("ok", said, threshold=cancelled_share)
    return say(
        "fail" if len(names) == tensors else "warn", f"{len(names)} of {tensors} parameter tensors get no gradient: {few}.",
        advice=[
            "Check that the forward pass uses them, and that nothing detaches the graph before them.",
            "A branch that is multiplied by zero, an input that is always 0, or a ReLU that is off everywhere also shows here.",
        ],
    )  # fmt: skip


def _no_update(facts: Facts, unowned: set[str], limit: float) -> Finding:
    """Judge tensors that got a gradient and no update; those that the optimizer was not given are `diagnose_parameters`' business."""
    code = "loop.no_update"
    names = [name for name in facts["no_update"] if name not in facts["no_gradient"] and name not in unowned]
    evidence = {"parameters": names, "frozen_on_purpose": facts["frozen"], "tensors": facts["tensors"]}
    share = _share_of_parameters(facts, names)
    say = partial(CODES.finding, code, value=share, unit="share", threshold=limit, evidence=evidence)
    if not facts["tensors"]:
        return CODES.not_measured(code, _NO_CLASS if misnumbered(facts) else _NO_STEP)
    if not names:
        return say("ok", "Every parameter tensor that gets a gradient gets an update.")
    return say(
        "fail" if share >= limit else "warn",
        f"{share:.0%} of the trained parameters get a gradient, but the optimizer does not move them: {named(names, shown=4)}.",
        advice=["Give the optimizer all of model.parameters(), after every layer is made; freeze on purpose with requires_grad_(False)."],
    )  # fmt: skip


def _share_of_parameters(facts: Facts, names: Sequence[str]) -> float:
    """Return the share of the trained parameters in these tensors."""
    sizes = facts.get("sizes", {})
    return float(sum(sizes.get(name, 0) for name in names) / max(1, facts["parameters"]))


def wrong_labels(facts: Facts, *, share: float = 0.1, even: float = 0.5, fewest: int = 20) -> dict[str, float] | None:
    """Return what share of the labels is wrong at random; None where they do not look so.

    Examples that are hard to tell apart have labels among the few classes that come into question. Labels that are wrong at random fall
    on all others alike, those that come into question last as well: where the ranks that the yardsticks give to the labels
    have such an even tail behind a first place that is mostly right.

    Args:
        share: of wrong labels, from which on it matters (rule of thumb).
        even: the lower half of the ranks below the first, over the upper half; 1 is even (rule of thumb).
        fewest: labels in the lower half.
    """
    ranks = (facts.get("yardsticks") or {}).get("ranks")
    if not ranks or len(ranks) < _FEWEST_CLASSES:
        return None
    counts = np.array(ranks, dtype=np.float64)
    half = (len(counts) - 1) // 2
    upper, lower = counts[1 : len(counts) - half], counts[len(counts) - half :]
    wrong = float(lower.mean()) * (len(counts) - 1) / counts.sum()
    if wrong < share or lower.sum() < fewest or counts[0] < counts.sum() / 2 or lower.mean() < even * upper.mean():
        return None
    return {"share": float(wrong), "right": float(counts[0] / counts.sum())}


def wrong_in_training(facts: Facts, *, share: float = 0.1, apart: float = 0.15, alpha: float = 1e-4) -> dict[str, float] | None:  # fmt: skip
    """Return how many targets of training rows a model predicts that never saw them, and how many of validation, where that is far more.

    Both are drawn from one population, as far as inputs and classes tell, and no validation row is in training: then a model that errs half
    as often there was fitted to targets of which many are wrong, at random or by a rule of their own.

    Args:
        share: of the targets by which the two differ at least (rule of thumb).
        apart: distance of the shares of classes from which on that alone moves an accuracy (rule of thumb).
        alpha: chance at which inputs are called different (rule of thumb).
    """
    found, shift = facts.get("yardsticks") or {}, facts.get("shift", {}).get("validation")
    carried, held = found.get("carried"), ((facts.get("overlap") or {}).get("splits") or {}).get("validation")
    if not (carried and shift and held and held["rows"] and found["classes"]) or facts.get("reading") != "fixed":
        return None
    own, theirs = max(found["score"].values()), carried["score"]
    spread = float(np.sqrt(own * (1 - own) * (1 / carried["rows"] + 1 / found["rows"])))
    inputs, targets = shift["inputs"], shift["targets"]
    differ = "reason" not in inputs and any(test["p"] * inputs["tests"] < alpha for test in inputs["worst"])
    if differ or targets.get("distance", 1.0) >= apart or held["exact"] + held["near"] > 0.01 * held["rows"]:
        return None
    if theirs - own < max(share, 6 * spread) or 1 - theirs > (1 - own) / 2:
        return None
    return {"predicted": own, "validation": theirs, "share": 1 - own / theirs}
