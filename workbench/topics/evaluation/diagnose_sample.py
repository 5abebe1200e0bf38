"""`diagnose_evaluation_sample`: is the set that is evaluated during training like the full one, and large enough (P3)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.curves.class_counts import class_counts
from workbench.curves.proof import MIN_EXAMPLES
from workbench.curves.trials import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.evaluation.size import too_small
from workbench.topics.evaluation.skew import worst_skew

__all__ = ["CODES", "diagnose_evaluation_sample"]

CODES = ("evaluation.skew", "evaluation.too_small", "evaluation.minority_counts")
_SKEW, _SMALL, _COUNTS = CODES
_BY_CLASS = ("recall", "precision", "f1", "sensitivity", "balanced")
"""Metrics that rest on the examples of single classes have one of these words in their name."""
_CLAUSE = {_SKEW: "P3.2", _SMALL: "P3.3, P3.4, P3.5", _COUNTS: "P3.6, P3.7"}
Facts = Mapping[str, Any]


def diagnose_evaluation_sample(
    record: RecordLike | Facts,
    *,
    skew_false_alarm: float = 0.01,
    false_alarm: float = 0.05,
    power: float = 0.8,
    learned_frac: float = 0.25,
    one_example: float = 0.05,
    comparisons: int = 100,
    min_examples: int = MIN_EXAMPLES,
    material_frac: float = 0.05,
    adopted: bool = False,
) -> Diagnosis:
    """Judge the set that periodic evaluation reads: skew, size, and the counts behind its rare classes.

    A set that is small warns where something rests on it: a study was asked about its size, it is too small for anything, or a
    decision worth having was taken on it; rare classes where a study was asked, or checkpoints are selected by a metric of classes.

    Args:
        record: a study with "evaluation_sample" in its facts (`EvaluationSampleStudy`, `diagnose`), or these facts.
        skew_false_alarm: how often a sample drawn at random is called skewed, at most (rule of thumb).
        false_alarm: how often two equal models are called different (rule of thumb: 5 %, as is common).
        power: how often the smallest difference that is called detectable is found (rule of thumb: 80 %, as is common).
        learned_frac: without a smallest difference of interest, the set should show this share of what training improves
            the metric by (rule of thumb: a set that cannot show a quarter of it tells little but that there is learning).
        one_example: a class is rare where one example more moves its recall by at least this (P3.7: 0.05, one of 20).
        comparisons: models that are compared on the set, for the gap that choosing the best of them leaves (P3.5).
        min_examples: fewer are too few in any case: they do not even show how far two models differ by chance (rule of thumb).
        material_frac: a decision by less than this share of what training gains needs no more examples (rule of thumb).
        adopted: whether the measured pair of models decided something: then the set has to tell those two apart.

    Returns:
        `evaluation.skew`, `evaluation.too_small`, `evaluation.minority_counts`, once each.
    """
    about: dict[str, Any] = {}
    if isinstance(record, Mapping):
        facts = record
    else:
        facts = record.facts.get("evaluation_sample") or {}
        about = {"workload": record.workload, "command": record.command, "path": getattr(record, "path", None)}
    if not facts:
        otherwise = "this study did not look at its evaluation set; EvaluationSampleStudy and `workbench diagnose` do"
        known = {} if isinstance(record, Mapping) else record.facts
        reason = why_missing(known, "evaluation_sample", otherwise)
        findings = tuple(Finding(code=code, status="not_measured", summary=reason) for code in CODES)
    else:
        findings = (
            _skew(facts, skew_false_alarm),
            too_small(
                facts,
                false_alarm=false_alarm,
                power=power,
                learned_frac=learned_frac,
                comparisons=comparisons,
                min_examples=min_examples,
                material_frac=material_frac,
                adopted=adopted,
            ),
            _minority(facts, one_example),
        )
    return Diagnosis(findings=tuple(replace(f, clause=_CLAUSE[f.code]) for f in findings), **about)


def _skew(facts: Facts, false_alarm: float) -> Finding:
    skew = facts.get("skew")
    if skew is None:
        summary = f"Every evaluation reads all {facts['examples']} examples of the {facts['split']} set: no sample of it can be skewed."
        return Finding(code=_SKEW, status="ok", summary=summary, evidence={"examples": facts["examples"]})
    tests = worst_skew(skew["tests"])
    of = f"{skew['size']} of {skew['of']} examples"
    if skew["size"] == skew["of"]:
        summary = f"The sample is the full set of {skew['of']} examples."
        return Finding(code=_SKEW, status="ok", summary=summary, evidence={"examples": skew["of"]})
    evidence = {"size": skew["size"], "of": skew["of"], "tests": tests[:20], "num_tests": len(tests)}
    evidence["not_tested"] = [test for test in skew["tests"] if test["p"] is None]
    if not tests:
        reason = (
            "; ".join(str(test.get("reason")) for test in evidence["not_tested"]) or "there is nothing to compare by"
        )
        return Finding(code=_SKEW, status="not_measured", summary=f"Not measured: {reason}.", evidence=evidence)
    worst, p = tests[0], float(tests[0]["p_adjusted"])
    known: dict[str, Any] = {"value": p, "unit": "p", "threshold": false_alarm, "evidence": evidence}
    metric = next((_metric_words(test) for test in tests if test["kind"] == "metric"), "")
    if p >= false_alarm:
        kinds = [test["kind"] for test in tests]
        shown = [f"{kinds.count('feature')} features"] * ("feature" in kinds) + ["classes"] * ("class" in kinds)
        said = f" in {' and '.join(sorted(shown))}" if shown else ""
        return Finding(code=_SKEW, status="ok", summary=f"The {of} are like the rest{said}{metric}.", **known)
    return Finding(
        code=_SKEW, status="fail", summary=f"The {of} are not like the rest: {_skew_words(worst)}{metric}.",
        advice=[
            "Draw the sample anew, stratified or at random over the whole set, never its beginning: wb.draw_sample(data, size).",
            "Then look at what the set is ordered by: by class, by time, by source.",
        ], **known,
    )  # fmt: skip


def _metric_words(test: Facts) -> str:
    interval = f"{test['low']:+.3g} to {test['high']:+.3g}"
    return f"; {test['name']} is {test['sample']:.4g}, on all examples {test['full']:.4g} (95 % interval of the difference {interval})"


def _skew_words(test: Facts) -> str:
    if test["kind"] == "metric":
        return f"{test['name']} differs"
    if test["kind"] == "class":
        far = test["furthest"]
        return f"{far['count']} are of class {far['value']}, where {far['expected']:.1f} are expected"
    return f"feature {test['name']} is distributed in another way ({test['test']})"


def _minority(facts: Facts, one_example: float) -> Finding:
    rows = facts.get("classes")
    asked = facts.get("asked") or any(word in str(facts["metric"]).lower() for word in _BY_CLASS)
    if not rows and not asked:
        return Finding(
            code=_COUNTS, status="ok", summary="Does not apply: nothing rests on the counts of single classes."
        )
    if not rows:
        reason = facts.get("no_classes") or "the examples have no classes: the loss is not that of classification(...)"
        if facts.get("classless"):
            return Finding(
                code=_COUNTS, status="ok", summary="The examples have no classes, so no recall rests on a few of them."
            )
        return Finding(code=_COUNTS, status="not_measured", summary=f"Not measured: {reason}.")
    table = class_counts(rows, facts.get("classes_before"))
    rarest = table.iloc[0]
    shown = table.head(50).astype(object).where(table.head(50).notna(), None).to_dict("records")
    evidence = {"classes": shown, "num_classes": len(table), "compared": facts.get("compared")}
    rare = table[table["total"] <= 1 / one_example + 1e-9]
    known: dict[str, Any] = {
        "value": float(rarest["total"]),
        "unit": "examples",
        "threshold": 1 / one_example,
        "evidence": evidence,
    }
    said = _counts_words(rarest, facts.get("compared") or "the two evaluations")
    if rare.empty:
        return Finding(code=_COUNTS, status="ok", summary=f"The rarest class is {said}.", **known)
    empty = [int(k) for k in rare.loc[rare["total"] == 0, "class"]]
    head = f"{len(rare)} of {len(table)} classes have {1 / one_example:.0f} examples or fewer; the rarest is {said}"
    if empty:
        named = ", ".join(map(str, empty[:8]))
        head = f"No example is of class {named}: its recall cannot be measured. {len(rare)} of {len(table)} classes have {1 / one_example:.0f} examples or fewer"
    if not asked:
        return Finding(
            code=_COUNTS, status="ok", summary=f"{head}. Checkpoints are selected by {facts['metric']}, not by recalls.", **known
        )  # fmt: skip
    return Finding(
        code=_COUNTS, status="warn", summary=f"{head}.",
        advice=[
            "Log the number of correct predictions of a rare class beside its recall, and read differences in examples.",
            "Keep more examples of it for validation, or pool several evaluations and seeds.",
        ], **known,
    )  # fmt: skip


def _counts_words(row: Any, compared: str) -> str:
    total, correct = int(row["total"]), int(row["correct"])
    text = f"{int(row['class'])}: {correct} of {total} right, recall {row['recall']:.3g} (95 % interval {row['low']:.2g} to {row['high']:.2g})"
    if total:
        text += f"; one example is {1 / total:.2g}"
    if row["delta_examples"] is not None and math.isfinite(row["delta"]) and row["delta"]:
        text += f"; between {compared} it changes by {row['delta']:+.2g}, which is {row['delta_examples']}"
    return text
