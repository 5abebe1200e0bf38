"""`diagnose_evaluation`: is the model measured often enough, cheaply enough, exactly, and on what counts? (P2)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.trial_curves import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.record.read import periodic_rows
from workbench.record.roles import Role
from workbench.topics.evaluation.proxy import judge_proxy

CODES = Codes({
    "evaluation.interval": "P2.8", "evaluation.batch_size": "P2.7", "evaluation.weighting": "P2.11", "evaluation.coverage": "P2.11",
})  # fmt: skip
TOLERANCE = 1e-4
"""Rule of thumb: float32 values of the same examples in other batches differ by less than this share of their spread."""
SHORT = 100.0
"""So many times the tolerance for values of bfloat16, or of a device that may round as coarsely (rule of thumb)."""
LITTLE = 0.01
"""Of the spread between examples, up to which the batch's part in the value of one is no failure: padding that reaches the outputs
through a recurrent layer, not a mean over the batch (rule of thumb)."""
NOBODY_LOOKED = "no evaluation was checked; wb.evaluation.check(evaluate, workload) checks one"
EXACT, ROWS, UNEXPLAINED = "exact", "rows seen", "unexplained"
BATCH_MEANS, PADDING, UNWEIGHTED = "mean of batch means", "counted padding", "weights ignored"
_ADVICE = {
    BATCH_MEANS: "Sum the values of all examples and divide once by their number; the mean of batch means gives an example of a "
    "short last batch more than its share.",
    PADDING: "Give padding the weight zero: multiply by a mask before the sum, and divide by the sum of the mask.",
    UNWEIGHTED: "Divide the sum of weight times value by the sum of the weights.",
    UNEXPLAINED: "Compare its value for each example with the workload's own, on one batch: another metric, training mode, or "
    "a model that looks at the whole batch.",
}
"""The faults of weighting, and what to do."""
Floats = NDArray[np.float64]
Facts = Mapping[str, Any]


def diagnose_evaluation(
    record: RecordLike,
    *,
    min_evaluations: int = 5,
    max_time_frac: float = 0.3,
    min_seconds: float = 5.0,
    offline_split: str | None = None,
    min_correlation: float = 0.8,
    min_checkpoints: int = 8,
    confidence: float = 0.95,
    resolution: float = 0.02,
    tolerance: float = TOLERANCE,
) -> Diagnosis:
    """Judge how a study evaluates while it trains.

    Args:
        record: a study; what it says of its first trial of the baseline's config, or else of its first trial.
        min_evaluations: after the initial one, for retrospective selection to have something to choose from (rule of thumb).
        max_time_frac: share of a trial's time that evaluation may take (rule of thumb).
        min_seconds: a trial that evaluates for less than this in all is not told to save time (rule of thumb).
        offline_split: whose offline rows the periodic ones are held against; None is the split that selection compares.
        min_correlation: Spearman's correlation that a proxy should have with the offline metric (rule of thumb).
        min_checkpoints: fewer say nothing (rule of thumb).
        resolution: checkpoints whose metric differs by less than this share of its range over the run are as good as equal: on a
            plateau the ranks are noise, whatever the proxy (rule of thumb).

    Returns:
        `evaluation.interval`, `.batch_size`, `.weighting`, `.coverage`, `.bad_proxy`, once each.
    """
    missing = why_missing(record.facts, "evaluation", NOBODY_LOOKED)
    proxy = judge_proxy(
        record, offline_split=offline_split, min_correlation=min_correlation, min_checkpoints=min_checkpoints,
        confidence=confidence, resolution=resolution,
    )  # fmt: skip
    findings = _interval(record, min_evaluations, max_time_frac, min_seconds), _batch_size(record)
    return Diagnosis.of(record, [*findings, *_judge_cases(record.facts.get("evaluation"), tolerance, missing), proxy])


def diagnose_evaluation_cases(facts: Facts, *, workload: str | None = None, tolerance: float = TOLERANCE) -> Diagnosis:
    """Judge what `collect_cases` saw of an evaluation function: `evaluation.weighting` and `evaluation.coverage`.

    A case is one call: the value that came back, and which examples the model saw in which batches. Each known fault predicts a value
    from the values of the examples; the first prediction that is right names the fault, with its exact bias. Two values are the same
    within the share `tolerance` of the spread of the examples' values (rule of thumb).
    """
    return Diagnosis(findings=_judge_cases(facts, tolerance, f"Not measured: {NOBODY_LOOKED}."), workload=workload)


def _interval(record: RecordLike, min_evaluations: int, max_time_frac: float, min_seconds: float) -> Finding:
    code, trials, evals = "evaluation.interval", record.trials, record.evals
    rows = evals if evals.empty or not len(trials) else periodic_rows(evals)
    there = trials[trials["trial"].isin(rows["trial"])] if len(trials) and len(rows) else trials[:0]
    if there.empty:
        return CODES.not_measured(code, "no trial has been evaluated")
    baseline = there[there["stage"] == Role.BASELINE]
    trial: Facts = {str(k): v for k, v in (there if baseline.empty else baseline).iloc[0].items()}
    rows = rows[rows["trial"] == trial["trial"]]
    steps = np.unique(rows["step"].to_numpy(dtype=np.int64))
    gaps = np.diff(steps[:-1]) if len(steps) > 2 else np.empty(0)
    seconds = float(rows.drop_duplicates(["step", "split"])["seconds"].sum())
    whole = float(trial.get("seconds", math.nan))
    share = seconds / whole if whole > 0 else math.nan
    count = int((steps > 0).sum())
    evidence: dict[str, Any] = {"trial": int(trial["trial"]), "steps": steps[:50].tolist()}
    numbers = {"value": float(count), "unit": "evaluations", "threshold": float(min_evaluations), "evidence": evidence}
    if len(gaps) and gaps.min() != gaps.max():
        said = f"Evaluations are {gaps.min()} to {gaps.max()} steps apart: not every fixed number of steps."
        fix = "Evaluate every fixed number of steps, never of seconds: a pause of the machine then moves no point of the curve."
    elif count < min_evaluations and trial["state"] == "complete":
        said = f"{count} evaluations after the initial one leave retrospective selection little to choose from."
        fix = f"Set eval_every_steps so that a run has at least {min_evaluations} evaluations; None makes ten."
    elif share > max_time_frac and seconds > min_seconds:
        evidence |= {"evaluation_seconds": seconds, "trial_seconds": whole, "time_frac": share}
        said = f"Evaluation takes {share:.0%} of the trial's time."
        fix = "Evaluate less often, or on a named subset (periodic_subset), and check the subset by evaluate_offline."
    else:
        every = f"every {gaps[0]} steps" if len(gaps) else "at the ends"
        return CODES.finding(code, "ok", f"{count} evaluations after the initial one, {every}.", **numbers)
    return CODES.finding(code, "warn", said, advice=[fix], **numbers)


def _batch_size(record: RecordLike) -> Finding:
    code = "evaluation.batch_size"
    train, given = record.config.get("batch_size"), record.config.get("eval_batch_size")
    if not train:
        return CODES.not_measured(code, "the batch size is unknown")
    seen = record.facts.get("evaluation") or {}
    coupled = bool(seen.get("coupled"))
    own = int(train) // int(record.config.get("accumulate_steps") or 1)
    size = int(given or (own if coupled else 4 * train))
    memory = record.facts.get("memory") or {}
    evidence = {"batch_size": int(train), "eval_batch_size": size, "memory": memory}
    found = partial(CODES.finding, code, value=float(size), unit="examples", threshold=float(train), evidence=evidence)
    if coupled:
        said = "The loss of an example depends on the others in its batch"
        said = "The loss is one value per batch" if seen.get("unseen") else said
        said += f": evaluated in batches of {size}"
        if size == own:
            return found("ok", f"{said}, as in training.")
        fix = f"Set eval_batch_size={own}, or leave it out, so that training and validation loss can be compared."
        return found("warn", f"{said}, trained in batches of {own}, it is another loss.", advice=[fix])
    one, other = (memory.get(f"{name}_bytes_per_example") for name in ("training", "evaluation"))
    takes = f"; an example takes {one:,.0f} bytes in training and {other:,.0f} in evaluation" if one and other else ""
    if size < train:
        said = f"Evaluation batches of {size} are smaller than training batches of {train}{takes}."
        fix = f"Set eval_batch_size to at least {train}: no activations are kept, so a larger batch fits and takes less time."
        return found("warn", said, advice=[fix])
    return found("ok", f"Evaluation batches of {size} are at least the training batches of {train}{takes}.")


def _predicted(case: Facts, values: Floats, weights: Floats, pad: float | None) -> dict[str, float]:
    """Return the value that each kind of evaluation would give in a case, the right one first.

    An example -1 is a row that is none; it adds `pad` to a sum, as another case tells, or nothing where that is None.
    """
    batches, rows = [[i for i in batch if i >= 0] for batch in case["batches"]], sum(map(len, case["batches"]))
    seen = [i for batch in batches for i in batch]
    found = {EXACT: float(np.average(values, weights=weights))}
    if seen and weights[seen].sum() > 0:
        found[ROWS] = float(np.average(values[seen], weights=weights[seen]))
        found[UNWEIGHTED] = float(values[seen].mean())
        means = [np.average(values[batch], weights=weights[batch]) for batch in batches if weights[batch].sum() > 0]
        found[BATCH_MEANS] = float(np.mean(means))
        found[PADDING] = float(values[seen].sum() + (rows - len(seen)) * (pad or 0.0)) / rows
    return found


def _judge_cases(facts: Facts | None, tolerance: float, missing: str) -> tuple[Finding, Finding]:
    """Return `evaluation.weighting` and `evaluation.coverage`; `missing` is what is said where there are no facts."""
    if facts and "unseen" in facts:
        missing = f"Not measured: {facts['unseen']}."
    if not facts or "unseen" in facts:
        unknown = partial(CODES.finding, status="not_measured", summary=missing)
        return unknown("evaluation.weighting"), unknown("evaluation.coverage")
    values, weights = (np.asarray(facts[name], dtype=np.float64) for name in ("values", "weights"))
    spread, metric = float(values.max() - values.min()), facts["metric"]
    allowed = (SHORT if facts.get("short_digits") else 1.0) * tolerance
    allowed *= max(spread, float(np.abs(values).max()) * 1e-2)
    padded = zip(facts["cases"], _pads(facts, values), strict=True)
    predicted = [_predicted(case, values, weights, pad) for case, pad in padded]
    cases = _cases(facts["cases"], predicted, len(values), allowed)
    because = None
    if float(facts.get("random") or 0.0) > allowed:
        differs = f"differs by {facts['random']:.3g} between two passes over one batch"
        because = f"the {metric} is random in evaluation, and {differs}"
    elif facts.get("coupled"):
        because = f"the {metric} of an example depends on the other examples of its batch, so that it has no weight of its own"
    evidence = {"metric": metric, "cases": cases, "batch_dependence": float(facts.get("batch_dependence", 0.0))}
    if because is not None and facts.get("observed_batches", True):
        weighting = CODES.finding("evaluation.weighting", "ok", f"Does not apply: {because}.", evidence=evidence)
    else:
        weighting = _weighting(cases, metric, evidence, spread=spread, allowed=allowed)
    return weighting, _coverage(cases, facts, values_tell=because is None)


def _cases(
    cases: Sequence[Facts], predicted: Sequence[dict[str, float]], examples: int, allowed: float
) -> list[dict[str, Any]]:
    """Return each case with the fault that explains it; where padding was seen, of several the one that explains most cases."""
    found = [math.nan if case["observed"] is None else float(case["observed"]) for case in cases]
    fits = [
        [name for name, v in each.items() if abs(v - seen) <= allowed]
        for each, seen in zip(predicted, found, strict=True)
    ]
    often = Counter(name for each in fits for name in each)
    told = []
    for case, each, some in zip(cases, predicted, fits, strict=True):
        fault = some[0] if some else UNEXPLAINED
        if fault != EXACT and any(-1 in batch for batch in case["batches"]):
            fault = max(some, key=often.__getitem__, default=UNEXPLAINED)
        told.append(_case(case, each, examples, fault))
    return told


def _case(case: Facts, predicted: dict[str, float], examples: int, fault: str) -> dict[str, Any]:
    batches = case["batches"]
    observed = math.nan if case["observed"] is None else float(case["observed"])
    counts = Counter(i for batch in batches for i in batch)
    strange = counts.pop(-1, 0)
    copies = sum(len(batch) - len(set(batch)) for batch in ([i for i in batch if i >= 0] for batch in batches))
    seen = sum(counts.values())
    repeated = seen - len(counts)
    if not seen and not math.isfinite(observed):
        fault = ROWS
    elif fault == ROWS and repeated and repeated == copies:  # copies beside their originals fill up a batch
        predicted[PADDING], fault = predicted[ROWS], PADDING
    expected, dropped = predicted[EXACT], examples - len(counts)
    if fault == EXACT and strange >= dropped:  # the model was given these examples in another form, and each counts
        strange, dropped = strange - dropped, 0
    return {
        "batch_size": case["batch_size"], "hosts": case["hosts"],
        "observed": observed, "expected": expected, "bias": observed - expected,
        "predicted_bias": predicted[fault] - expected if fault in predicted else math.nan, "fault": fault,
        "dropped": dropped, "repeated": repeated - copies, "padding": strange + copies, "by_order": bool(case.get("by_order")),
        "recognised": fault != UNEXPLAINED or not (case.get("by_order") or (strange and dropped)), "error": case.get("error"),
    }  # fmt: skip


def _pads(facts: Facts, values: Floats) -> list[float | None]:
    """Return for each case what a row that is no example adds to the sum, as another case tells; None where such rows do not fill up a batch."""
    told: list[tuple[int, float] | None] = []
    for case in facts["cases"]:
        rows = [i for batch in case["batches"] for i in batch]
        strange = rows.count(-1)
        known = float(values[[i for i in rows if i >= 0]].sum()) if len(rows) > strange else 0.0
        fills_up = 0 < strange < case["batch_size"] * case["hosts"] and case["observed"] is not None
        told.append((strange, (float(case["observed"]) * len(rows) - known) / strange) if fills_up else None)
    others = [[t for i, t in enumerate(told) if i != place and t is not None] for place in range(len(told))]
    return [max(rest)[1] if rest and own is not None else None for own, rest in zip(told, others, strict=True)]


def _weighting(cases: Sequence[Facts], metric: str, evidence: Facts, *, spread: float, allowed: float) -> Finding:
    code, dependent = "evaluation.weighting", evidence["batch_dependence"]
    numbers: dict[str, Any] = {"unit": metric, "threshold": allowed, "evidence": evidence}
    if dependent > allowed:
        said, advice = f"The {metric} of one and the same example differs by {dependent:.3g} between batch sizes", []
        if not spread > allowed:
            said += ", and all examples of a batch have the same"
            advice = [f"Return the {metric} of each example: no mean over the batch, expanded or not."]
        elif dependent > LITTLE * spread:
            norm = "a norm that uses the batch's own statistics in evaluation"
            advice = [f"Look for {norm}, and for a metric that looks at the whole batch."]
        else:
            said += f", {dependent / spread:.2%} of what it differs by between examples"
        return CODES.finding(code, "fail" if advice else "ok", f"{said}.", value=dependent, advice=advice, **numbers)
    if not spread > allowed:
        said = f"all examples have the same {metric}, so the weighting cannot be seen"
        return CODES.not_measured(code, said, evidence=evidence)
    wrong = [case for case in cases if case["fault"] in _ADVICE]
    if not wrong:
        largest = max((abs(case["bias"]) for case in cases if case["fault"] == EXACT), default=0.0)
        said = f"Each example has its weight in the {metric}, at {_sizes_words(cases)}."
        return CODES.finding(code, "ok", said, value=largest, **numbers)
    worst = max(wrong, key=lambda case: abs(case["bias"]) if math.isfinite(case["bias"]) else math.inf)
    fault = worst["fault"]
    said = f"{fault.capitalize()}: {metric} {worst['observed']:.6g} instead of {worst['expected']:.6g} at {_sizes_words([worst])}"
    if fault != UNEXPLAINED:
        said += f"; the fault predicts a bias of {worst['predicted_bias']:+.6g}, found is {worst['bias']:+.6g}"
    return CODES.finding(code, "fail", f"{said}.", value=abs(worst["bias"]), advice=[_ADVICE[fault]], **numbers)


def _coverage(cases: Sequence[dict[str, Any]], facts: Facts, *, values_tell: bool) -> Finding:
    code, count, metric = "evaluation.coverage", len(facts["values"]), facts["metric"]
    evidence = {"metric": metric, "cases": list(cases), "examples": count}
    if not facts.get("observed_batches", True):
        said = "the evaluation never called the model, so which examples it used is unknown"
        return CODES.not_measured(code, said, evidence=evidence)
    known = [case for case in cases if case["recognised"] or not values_tell]
    wrong = [case for case in known if case["dropped"]]
    wrong += [case for case in known if case["repeated"] and case["fault"] != EXACT and values_tell]
    numbers: dict[str, Any] = {"unit": "examples", "threshold": 0.0, "evidence": evidence}
    if not wrong and len(known) < len(cases):
        return CODES.not_measured(
            code, f"at {_sizes_words([case for case in cases if not case['recognised']])} the model was given inputs that are "
            "none of the examples as the workload's forward gives them, so which examples they are is unknown", evidence=evidence,
        )  # fmt: skip
    if not wrong:
        said = f"Each of {count} examples counts once, at {_sizes_words(cases)}."
        return CODES.finding(code, "ok", said, value=0.0, **numbers)
    worst = max(wrong, key=lambda case: (case["error"] is None, case["dropped"] + case["repeated"]))
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
    bias = f"; the {metric} is off by {worst['bias']:+.6g}" if math.isfinite(worst["bias"]) else ""
    if bias and worst["fault"] == ROWS:
        bias += f", as predicted ({worst['predicted_bias']:+.6g})"
    return CODES.finding(
        code, "fail", f"{' and '.join(parts)} at {_sizes_words([worst])}{error}{bias}.", value=float(worst["dropped"] + worst["repeated"]),
        advice=advice, **numbers,
    )  # fmt: skip


def _sizes_words(cases: Sequence[Facts]) -> str:
    sizes, hosts = (sorted({case[name] for case in cases}) for name in ("batch_size", "hosts"))
    said = f"batch size {', '.join(map(str, sizes))}"
    return said if hosts == [1] else f"{said} on {', '.join(map(str, hosts))} hosts"
