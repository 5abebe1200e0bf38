"""`diagnose_data`: copies, order, signal, shifts between the splits, classes, scale and workers (P2.9, P3.2, F1.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from workbench.curves.class_counts import wilson
from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.topics.data.diagnose_rows import CODES, answer_among, duplicates, leakage, unshuffled, weak_shuffle
from workbench.topics.data.diagnose_shift import label_shift, no_signal, train_validation_shift
from workbench.topics.evaluation.diagnose_generalisation import gap_of

Facts = Mapping[str, Any]
_STANDARDISE = (
    "Standardise the inputs by the mean and deviation of the training split, and every other split by the same two."
)


def scale_finding(
    facts: Facts, *, largest: float = 10.0, smallest: float = 0.01, feature_ratio: float = 1000.0, target: float = 300.0,
    output_ratio: float = 100.0, far_ratio: float = 100.0, far_share: float = 0.02,
) -> Finding:  # fmt: skip
    """Judge the size of inputs and targets; the arguments are those of `diagnose_data`."""
    found, say = facts["scale"], partial(CODES.finding, "data.scale")
    single = _code(facts.get("codes")) or _far(facts.get("far") or {}, far_ratio, far_share)
    if single is not None:
        return single
    targets = _targets(found.get("targets"), target, output_ratio)
    if "size" not in found:
        return targets or say("ok", f"Does not apply: {found.get('reason', 'nothing was read')}.")
    size, median, top = found["size"], found["median"], found["largest"]
    where = ""
    if found["layer"]:
        name, kind = found["layer"]
        where = f" where they reach the first layer ({name or 'the model'}, {kind})"
    value, limit, said, least = size, largest, "", f"feature {found['largest_at']} is {top:.3g}"
    if size > largest:
        far = f"; {least}, half of the features less than {median:.3g}" if top > feature_ratio**0.5 * median else ""
        said = f"Inputs are of size {size:.3g}{where}, far from 1{far}: gradients of the first layer are as many times too large, and the loss is steeper by the square."
    elif median < smallest and size < 100 * smallest:
        value, limit = median, smallest
        said = f"Half of the inputs are smaller than {median:.2g}{where}: the first layer hardly sees them beside its bias."
    elif found["quarter"] * feature_ratio < top:
        said = f"A quarter of the features is smaller than {found['quarter']:.2g}{where}, and {least}: a model sees little but the large ones."
    numbers: dict[str, Any] = {"value": value, "unit": "input", "threshold": limit, "evidence": dict(found)}
    if said:
        return say("warn", said, advice=(_STANDARDISE,), **numbers)
    ratio = top / found["smallest"]
    return targets or say("ok", f"Inputs are of size {size:.3g}{where}; no feature is more than {ratio:.3g} times another.", **numbers)  # fmt: skip


def _code(codes: Sequence[Facts] | None) -> Finding | None:
    """Return the finding on values that stand for missing ones, if there are some."""
    if not codes:
        return None
    first, columns = codes[0], codes[0]["columns"]
    where = f" of {columns} column{'s' if columns > 1 else ''} of the inputs" if columns else " of the inputs"
    others = ", ".join(f"{code['value']:g}" for code in codes[1:4])
    more = f"; {others} too" if others else ""
    return CODES.finding(
        "data.scale", "warn", f"{first['value']:g} fills {first['share']:.1%} of the cells{where}, {first['deviations']:.3g} standard deviations from "
        f"the other values, with none in between: a code for a missing value{more}. A model takes it for a number.",
        value=first["deviations"], unit="deviations", evidence={"codes": list(codes)},
        advice=("Replace it by the mean of the training split, and add a column that flags it as missing, before anything is standardised.",),
    )  # fmt: skip


def _far(facts: Facts, ratio: float, share: float) -> Finding | None:
    """Return the finding on single rows that lie far from all others, if there are some."""
    for kind, known in facts.items():
        far = [(place, away) for place, away in known["far"] if away > ratio]
        if far and len(far) <= max(1, share * known["rows"]):
            return CODES.finding(
                "data.scale", "warn", f"{len(far)} of {known['rows']:,} training examples that were looked at have {kind} more than {ratio:g} times as "
                f"far from the centre as the median example, example {far[0][0]} {far[0][1]:.3g} times as far. Each causes a spike of the gradient.",
                value=far[0][1], unit="times the median", threshold=ratio, evidence={kind: far},
                advice=("Look at these examples for wrong units and codes of missing values; drop or clip them before training.",),
            )  # fmt: skip
    return None


def _targets(found: Facts | None, limit: float, output_ratio: float) -> Finding | None:
    """Return the finding on targets that are far from unit size and from what the model says before training, if they are."""
    if not found or "size" not in found:
        return None
    size, outputs = found["size"], found["outputs"]
    large = size > limit and size > output_ratio * outputs
    if not large and not (size < 1 / limit and outputs > output_ratio * size):
        return None
    effect = "the loss and its gradients start at the square of it"
    effect = effect if large else "any error that matters is lost in the loss"
    return CODES.finding(
        "data.scale", "warn", f"Targets are of size {size:.3g}, the outputs of the untrained model of size {outputs:.2g}: {effect}.", value=size,
        unit="target", threshold=limit if large else 1 / limit, evidence=dict(found),
        advice=("Standardise the targets by their mean and deviation over the training split, and undo it for predictions.",),
    )  # fmt: skip


def diagnose_data(
    record: Audited,
    *,
    leaked_share: float = 0.01,
    repeated_share: float = 0.8,
    blank_share: float = 0.05,
    few_rows: int = 32,
    alpha: float = 1e-4,
    small_shift: float = 0.15,
    large_shift: float = 0.3,
    class_ratio: float = 10.0,
    largest_scale: float = 10.0,
    smallest_scale: float = 0.01,
    feature_ratio: float = 1000.0,
    target_scale: float = 300.0,
    output_ratio: float = 100.0,
    far_ratio: float = 100.0,
    far_share: float = 0.02,
) -> Diagnosis:
    """Judge the facts that were collected about the data, and where a study trained on them, by what came of it.

    Args:
        record: a study whose facts hold "data", or what `audit_data` returns.
        leaked_share: of a validation or test split that may be in the training split without an alarm (rule of thumb: a
            hundredth moves an accuracy by a hundredth at most).
        repeated_share: of a split that may have been there before (rule of thumb: each example five times; oversampling repeats less).
        blank_share: of a split that may be one and the same input (rule of thumb).
        few_rows: distinct training rows below which rows are alike by nature (rule of thumb).
        alpha: chance at which a random order, a random split or a random copy is called none (rule of thumb).
        small_shift: distance between the splits, from which on a gap of the trained model is put down to it (rule of thumb: half
            a deviation makes 0.2).
        large_shift: distance from which on it is an alarm though nothing was trained (rule of thumb).
        class_ratio: the most common class over the rarest, where imbalance begins (rule of thumb).
        largest_scale: of the inputs (rule of thumb: the loss is a hundred times steeper then than for inputs of size 1).
        smallest_scale: of the inputs (rule of thumb).
        feature_ratio: the largest feature over the smaller ones, where these are invisible (rule of thumb).
        target_scale: of targets that are numbers (rule of thumb).
        output_ratio: of the size of targets to that of the untrained model's outputs, for that to matter (rule of thumb).
        far_ratio: a training example this many times as far from the middle as the median one is an outlier (rule of thumb: of
            log-normal rows of deviation 1, one of a million is).
        far_share: of the examples that may be outliers; more are another kind of example (rule of thumb).

    Returns:
        `data.leakage`, `.duplicates`, `.unshuffled`, `.weak_shuffle`, `.no_signal`, `.label_shift`, `.train_validation_shift`,
        `.scale`, `.imbalance`, `.worker_rng`, once each.
    """
    facts = record.facts.get("data")
    if not facts:
        otherwise = "the data were not examined; `workbench diagnose` and `wb.data.audit` do that"
        return Diagnosis.of(record, CODES.missing(record.facts, "data", otherwise))
    order, gap = unshuffled(facts, alpha), gap_of(record.facts)
    leaked = leakage(facts, limit=leaked_share, few_rows=few_rows, alpha=alpha)
    sample = record.facts.get("evaluation_sample") or ({} if "preflight" in record.facts else None)
    findings = (
        leaked if leaked.status == "fail" else answer_among(facts) or leaked,
        duplicates(facts, limit=repeated_share, blank=blank_share),
        order,
        weak_shuffle(facts, alpha, order),
        no_signal(facts, record.facts.get("generalisation")),
        label_shift(facts, gap, alpha=10 * alpha, small=small_shift, large=large_shift),
        train_validation_shift(facts, gap, alpha=alpha, small=small_shift, large=large_shift),
        scale_finding(
            facts, largest=largest_scale, smallest=smallest_scale, feature_ratio=feature_ratio, target=target_scale,
            output_ratio=output_ratio, far_ratio=far_ratio, far_share=far_share,
        ),
        imbalance(facts, sample, limit=class_ratio),
        worker_rng_finding(facts),
    )  # fmt: skip
    return Diagnosis.of(record, findings)


def imbalance(facts: Facts, sample: Facts | None, *, limit: float = 10.0, where: str = "on validation") -> Finding:
    """Judge the ratio of classes; where a model was trained, by whether the rare ones are found in `sample`, what is known of validation, or of `where` it was seen."""
    counts, say = facts["classes"], partial(CODES.finding, "data.imbalance")
    if not counts or len(counts) < 2:
        return say("ok", "Does not apply: the labels are no classes, or there is only one.")
    common, rare = next(iter(counts)), list(counts)[-1]
    ratio = counts[common] / counts[rare]
    evidence = {"classes": len(counts), "counts": dict(list(counts.items())[:50])}
    say = partial(say, value=ratio, unit="times", threshold=limit, evidence=evidence)
    said = f"The most common of {len(counts)} classes has {ratio:.3g} times as many examples as the rarest ({counts[common]:,} and {counts[rare]:,})"
    if ratio < limit:
        return say("ok", f"{said}.")
    if sample is not None:
        rows = {str(row["class"]): row for row in sample.get("classes") or ()}
        recall = rows[common]["correct"] / rows[common]["total"] if rows.get(common, {}).get("total") else 0.0
        suffers = (
            row for name, row in rows.items()
            if counts.get(name, counts[common]) * limit <= counts[common] and wilson(row["correct"], row["total"])[1] < 0.6 * recall
        )  # fmt: skip
        missed = next(suffers, None)
        if missed is None:
            return say("ok", f"{said}; {where} no rare class does visibly worse.")
        said += f"; of class {missed['class']} {missed['correct']} of {missed['total']} are right {where}"
    return say(
        "warn", f"{said}: accuracy hides the rare ones.",
        advice=(
            "Look at each class by itself: recall with its counts, not accuracy alone.",
            "Weight the loss or sample the rare classes more often only if that metric asks for it.",
        ),
    )  # fmt: skip


def worker_rng_finding(facts: Facts, *, alpha: float = 1e-4) -> Finding:
    """Return `data.worker_rng`: whether worker processes draw random numbers of their own; "workers" is None where nobody could ask them."""
    workers, say = facts["workers"], partial(CODES.finding, "data.worker_rng")
    if workers is None:
        return CODES.not_measured("data.worker_rng", "a stream cannot return an example twice")
    if not workers["workers"]:
        return say(
            "ok", "Data are loaded in the training process: there are no workers whose random draws could coincide."
        )
    if not workers["random"]:
        return say("ok", "Examples are the same each time: workers have nothing to draw.", evidence=dict(workers))
    said, fix = [], []
    if workers["same_in_workers"] and workers["p"] < alpha:
        said.append("worker processes make the same random draws")
        fix.append("Give each worker a generator of its own: worker_init_fn that seeds from torch.initial_seed(), or draw from torch.")  # fmt: skip
    if workers["same_in_epochs"] and workers["p"] < alpha:
        said.append("every epoch repeats the draws of the first")
        fix.append("Do not make the generator once in __init__, nor seed it with a constant: workers start from a copy each epoch.")  # fmt: skip
    say = partial(say, value=workers["p"], unit="p", threshold=alpha, evidence=dict(workers))
    if not said:
        return say("ok", "Workers draw random numbers of their own, anew each epoch.")
    text = " and ".join(said)
    return say("warn", f"{text[0].upper()}{text[1:]}: augmentation varies less than it seems.", advice=tuple(fix))
