"""Does an evaluation weigh each example as it should, and count each once? Told from what it returned (P2.11).

A case is one call: the value that came back, and which examples the model saw in which batches. Each known fault predicts a
value from the values of the examples; the first prediction that is right names the fault, with its exact bias.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.findings.diagnosis import Finding

__all__ = ["EXACT", "NOBODY_LOOKED", "judge_cases", "predicted_values"]

NOBODY_LOOKED = "no evaluation was looked at; check_evaluation(evaluate, workload) looks at one"

Floats = NDArray[np.float64]

EXACT, BATCH_MEANS, ROWS, PADDING, UNWEIGHTED = (
    "exact",
    "mean of batch means",
    "rows seen",
    "counted padding",
    "weights ignored",
)
UNEXPLAINED = "unexplained"
SHORT = 100.0
_LITTLE = 0.01
"""Of the spread between examples, up to which the batch's part in the value of one is a warning: padding that reaches the outputs through a
recurrent layer, not a mean over the batch (rule of thumb)."""
_WEIGHTING = {BATCH_MEANS, PADDING, UNWEIGHTED, UNEXPLAINED}
_ADVICE = {
    BATCH_MEANS: "Sum the values of all examples and divide once by their number; the mean of batch means gives an example of a "
    "short last batch more than its share.",
    PADDING: "Give padding the weight zero: multiply by a mask before the sum, and divide by the sum of the mask.",
    UNWEIGHTED: "Divide the sum of weight times value by the sum of the weights.",
    UNEXPLAINED: "Hold its value for each example against the workload's own, on one batch: another metric, training mode, or "
    "a model that looks at the whole batch.",
}


def predicted_values(values: Floats, weights: Floats, batches: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the value that each kind of evaluation would give, the right one first.

    Args:
        values: of the examples, shape (examples,).
        weights: of the examples, same shape.
        batches: examples that the model saw, batch by batch; -1 is a row that is no example.
    """
    rows = [[i for i in batch if i >= 0] for batch in batches]
    seen = [i for batch in rows for i in batch]
    found = {EXACT: float((values * weights).sum() / weights.sum())}
    if seen and weights[seen].sum() > 0:
        found[ROWS] = float((values[seen] * weights[seen]).sum() / weights[seen].sum())
        found[UNWEIGHTED] = float(values[seen].mean())
        means = [np.average(values[batch], weights=weights[batch]) for batch in rows if weights[batch].sum() > 0]
        found[BATCH_MEANS] = float(np.mean(means))
        found[PADDING] = float(values[seen].sum() / sum(len(batch) for batch in batches))
    return found


def judge_cases(
    facts: Mapping[str, Any] | None, *, tolerance: float, missing: str = f"Not measured: {NOBODY_LOOKED}."
) -> tuple[Finding, Finding]:
    """Return `evaluation.weighting` and `evaluation.coverage`.

    Args:
        facts: values, weights, cases, and how much values differ between batch sizes; None where nobody looked.
        tolerance: difference between two equal values, as a share of the spread of the examples' values; a hundred times as much
            where they were computed in bfloat16, or on a device that may round as coarsely (rule of thumb).
        missing: what is said where there are no facts.
    """
    if not facts:
        return _none("evaluation.weighting", missing), _none("evaluation.coverage", missing)
    values, weights = (np.asarray(facts[name], dtype=np.float64) for name in ("values", "weights"))
    spread = float(values.max() - values.min())
    allowed = (
        (SHORT if facts.get("short_digits") else 1.0) * tolerance * max(spread, float(np.abs(values).max()) * 1e-2)
    )
    pads = _pads(facts, values)
    cases = [
        _case(case, values, weights, allowed=allowed, pad=pad) for case, pad in zip(facts["cases"], pads, strict=True)
    ]
    dependent = float(facts.get("batch_dependence", 0.0))
    because = _not_of_one_example(facts, allowed)
    weighting = _weighting(cases, facts, spread, dependent, allowed)
    if because is not None and facts.get("observed_batches", True):
        weighting = Finding(
            code=weighting.code, status="ok", clause="P2.11", summary=f"Does not apply: {because}.", evidence=weighting.evidence
        )  # fmt: skip
    return weighting, _coverage(cases, facts, values_tell=because is None)


def _not_of_one_example(facts: Mapping[str, Any], allowed: float) -> str | None:
    """Return why the value of an example is no number of its own; None where it is one."""
    metric = facts["metric"]
    if float(facts.get("random") or 0.0) > allowed:
        return (
            f"the {metric} is random in evaluation, and differs by {facts['random']:.3g} between two looks at one batch"
        )
    if facts.get("coupled"):
        return f"the {metric} of an example depends on the other examples of its batch, so that it has no weight of its own"
    return None


def _case(
    case: Mapping[str, Any], values: Floats, weights: Floats, *, allowed: float, pad: float | None
) -> dict[str, Any]:
    """Return one case with the fault that explains it, and its counts.

    Args:
        case: what was called, what came back, and which examples were in which batch.
        values: of the examples.
        weights: of the examples.
        allowed: difference between equal values.
        pad: what a row that is no example adds, as another case tells; None where none does.
    """
    batches = case["batches"]
    predicted = predicted_values(values, weights, batches)
    observed = math.nan if case["observed"] is None else float(case["observed"])
    counts = Counter(i for batch in batches for i in batch)
    strange = counts.pop(-1, 0)
    copies = sum(len(batch) - len(set(batch)) for batch in ([i for i in batch if i >= 0] for batch in batches))
    seen = sum(counts.values())
    if strange and pad is not None and seen:
        predicted[PADDING] = (predicted[PADDING] * (seen + strange) + strange * pad) / (seen + strange)
    fault = next((name for name, value in predicted.items() if abs(value - observed) <= allowed), UNEXPLAINED)
    repeated = seen - len(counts)
    if not seen and not math.isfinite(observed):
        fault = ROWS
    elif fault == ROWS and repeated and repeated == copies:  # copies beside their originals fill up a batch
        predicted[PADDING], fault = predicted[ROWS], PADDING
    expected = predicted[EXACT]
    dropped = len(values) - len(counts)
    if fault == EXACT and strange >= dropped:  # the model was given these examples in another form, and each counts
        strange, dropped = strange - dropped, 0
    return {
        "batch_size": case["batch_size"],
        "hosts": case["hosts"],
        "observed": observed,
        "expected": expected,
        "bias": observed - expected,
        "predicted_bias": predicted[fault] - expected if fault in predicted else math.nan,
        "fault": fault,
        "dropped": dropped,
        "repeated": repeated - copies,
        "padding": strange + copies,
        "by_order": bool(case.get("by_order")),
        "recognised": fault != UNEXPLAINED or not (case.get("by_order") or (strange and dropped)),
        "error": case.get("error"),
    }


def _pads(facts: Mapping[str, Any], values: Floats) -> list[float | None]:
    """Return for each case what a row that is no example adds to the sum, if padding is counted, as another case tells.

    None where there are more such rows than fill up a batch: they are something else, such as a second look at each example.
    """
    told: list[tuple[int, float] | None] = []
    for case in facts["cases"]:
        rows = [i for batch in case["batches"] for i in batch]
        strange = rows.count(-1)
        known = float(values[[i for i in rows if i >= 0]].sum()) if len(rows) > strange else 0.0
        told.append(
            (strange, (float(case["observed"]) * len(rows) - known) / strange)
            if 0 < strange < case["batch_size"] * case["hosts"]
            and case["observed"] is not None  # it fills up one batch
            else None
        )
    pads: list[float | None] = []
    for place in range(len(told)):
        others = [t for i, t in enumerate(told) if i != place and t is not None]
        pads.append(max(others)[1] if others and told[place] is not None else None)
    return pads


def _weighting(
    cases: Sequence[dict[str, Any]], facts: Mapping[str, Any], spread: float, dependent: float, allowed: float
) -> Finding:
    code, evidence = (
        "evaluation.weighting",
        {"metric": facts["metric"], "cases": list(cases), "batch_dependence": dependent},
    )
    if dependent > allowed:
        same = ", and all examples of a batch have the same" if not spread > allowed else ""
        averaged = f"Return the {facts['metric']} of each example: no mean over the batch, expanded or not."
        looks = "Look for a norm that uses the batch's own statistics in evaluation, and for a metric that looks at the whole batch."
        little = (
            ""
            if same or dependent > _LITTLE * spread
            else f", {dependent / spread:.2%} of what it differs by between examples"
        )
        return Finding(
            code=code, status="ok" if little else "fail", value=dependent, unit=facts["metric"], threshold=allowed, evidence=evidence,
            clause="P2.11", summary=f"The {facts['metric']} of one and the same example differs by {dependent:.3g} between batch sizes{same or little}.",
            advice=[] if little else [averaged if same else looks],
        )  # fmt: skip
    if not spread > allowed:
        return _none(
            code, f"Not measured: all examples have the same {facts['metric']}, so no weighting shows.", evidence
        )
    wrong = [case for case in cases if case["fault"] in _WEIGHTING]
    if not wrong:
        largest = (
            max(abs(case["bias"]) for case in cases if case["fault"] == EXACT)
            if any(c["fault"] == EXACT for c in cases)
            else 0.0
        )
        said = f"Each example has its weight in the {facts['metric']}, at {_shown(cases)}."
        return Finding(
            code=code,
            status="ok",
            summary=said,
            value=largest,
            unit=facts["metric"],
            threshold=allowed,
            evidence=evidence,
            clause="P2.11",
        )
    worst = max(wrong, key=lambda case: abs(case["bias"]) if math.isfinite(case["bias"]) else math.inf)
    said = f"{worst['fault'].capitalize()}: {facts['metric']} {worst['observed']:.6g} instead of {worst['expected']:.6g} at {_shown([worst])}"
    if worst["fault"] != UNEXPLAINED:
        said += f"; the fault predicts a bias of {worst['predicted_bias']:+.6g}, found is {worst['bias']:+.6g}"
    return Finding(
        code=code, status="fail", value=abs(worst["bias"]), unit=facts["metric"], threshold=allowed, evidence=evidence,
        summary=f"{said}.", advice=[_ADVICE[worst["fault"]]], clause="P2.11",
    )  # fmt: skip


def _coverage(cases: Sequence[dict[str, Any]], facts: Mapping[str, Any], *, values_tell: bool = True) -> Finding:
    code, count = "evaluation.coverage", len(facts["values"])
    evidence = {"metric": facts["metric"], "cases": list(cases), "examples": count}
    if not facts.get("observed_batches", True):
        return _none(
            code, "Not measured: the evaluation never called the model, so nobody saw which examples it took.", evidence
        )
    known = [case for case in cases if case["recognised"] or not values_tell]
    dropped = [case for case in known if case["dropped"]]
    counted = [case for case in known if case["repeated"] and case["fault"] != EXACT and values_tell]
    if not dropped and not counted:
        if len(known) < len(cases):
            return _none(
                code,
                f"Not measured: at {_shown([case for case in cases if not case['recognised']])} the model was given inputs that are "
                "none of the examples as the workload's forward gives them, so nobody saw which examples they are.",
                evidence,
            )
        return Finding(
            code=code, status="ok", value=0.0, unit="examples", threshold=0.0, evidence=evidence, clause="P2.11",
            summary=f"Each of {count} examples counts once, at {_shown(cases)}.",
        )  # fmt: skip
    worst = max(dropped + counted, key=lambda case: (case["error"] is None, case["dropped"] + case["repeated"]))
    parts, advice = [], []
    if worst["dropped"]:
        parts.append(f"{worst['dropped']} of {count} examples are never evaluated")
        advice.append("Look for drop_last=True: in evaluation the last batch may be smaller.")
    if worst["repeated"]:
        parts.append(f"{worst['repeated']} examples are counted twice")
        advice.append(
            "Look for a sampler that pads, such as DistributedSampler: give every host its own examples without padding, or "
            "weigh the repeated ones zero, and join sums instead of means."
        )
    error = f" ({worst['error']})" if worst["error"] else ""
    bias = f"; the {facts['metric']} is off by {worst['bias']:+.6g}" if math.isfinite(worst["bias"]) else ""
    if bias and worst["fault"] == ROWS:
        bias += f", as predicted ({worst['predicted_bias']:+.6g})"
    return Finding(
        code=code, status="fail", value=float(worst["dropped"] + worst["repeated"]), unit="examples", threshold=0.0,
        summary=f"{' and '.join(parts)} at {_shown([worst])}{error}{bias}.", evidence=evidence, advice=advice, clause="P2.11",
    )  # fmt: skip


def _shown(cases: Sequence[Mapping[str, Any]]) -> str:
    sizes = sorted({case["batch_size"] for case in cases})
    hosts = sorted({case["hosts"] for case in cases})
    said = f"batch size {', '.join(map(str, sizes))}"
    return said if hosts == [1] else f"{said} on {', '.join(map(str, hosts))} hosts"


def _none(code: str, summary: str, evidence: Mapping[str, Any] | None = None) -> Finding:
    return Finding(code=code, status="not_measured", summary=summary, evidence=evidence or {}, clause="P2.11")
