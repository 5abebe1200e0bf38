"""`diagnose_evaluation_sample`: is the set that is evaluated during training like the full one, and large enough (P3)?"""

import math
from collections.abc import Mapping
from typing import Any

from workbench.curves.class_counts import class_counts
from workbench.curves.seed_comparison import MIN_EXAMPLES
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.topics.evaluation.sample_size import (
    SizeBounds,
    detectable_difference,
    evaluation_sizes,
    how_models_differ,
    size_bounds,
)
from workbench.topics.evaluation.skew import worst_skew

CODES = Codes({
    "evaluation.skew": "P3.2", "evaluation.too_small": "P3.3, P3.4, P3.5", "evaluation.minority_counts": "P3.6, P3.7",
})  # fmt: skip
_SKEW, _SMALL, _COUNTS = CODES
_BY_CLASS = ("recall", "precision", "f1", "sensitivity", "balanced")
"""Metrics that rest on the examples of single classes have one of these words in their name."""
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
    facts, known, about = record, dict[str, Any](), dict[str, Any]()
    if not isinstance(record, Mapping):
        facts, known = record.facts.get("evaluation_sample") or {}, record.facts
        about = {"workload": record.workload, "command": record.command, "path": getattr(record, "path", None)}
    assert isinstance(facts, Mapping)
    if not facts:
        otherwise = (
            "this study did not examine its evaluation set; wb.evaluation.SampleStudy and `workbench diagnose` do"
        )
        return Diagnosis(findings=tuple(CODES.missing(known, "evaluation_sample", otherwise)), **about)
    level = {"false_alarm": false_alarm, "power": power}
    if how_models_differ(facts):
        small = _too_small(
            facts, level, learned_frac=learned_frac, comparisons=comparisons, min_examples=min_examples,
            material_frac=material_frac, adopted=adopted,
        )  # fmt: skip
    else:
        small = _one_model(facts, size_bounds(facts, **level), min_examples)
    return Diagnosis(findings=(_skew(facts, skew_false_alarm), small, _minority(facts, one_example)), **about)


def _skew(facts: Facts, false_alarm: float) -> Finding:
    skew = facts.get("skew")
    if skew is None:
        said = f"Every evaluation reads all {facts['examples']} examples of the {facts['split']} set: no sample of it can be skewed."
        return CODES.finding(_SKEW, "ok", said, evidence={"examples": facts["examples"]})
    if skew["size"] == skew["of"]:
        said = f"The sample is the full set of {skew['of']} examples."
        return CODES.finding(_SKEW, "ok", said, evidence={"examples": skew["of"]})
    tests, left_out = worst_skew(skew["tests"]), [test for test in skew["tests"] if test["p"] is None]
    known = {"size": skew["size"], "of": skew["of"]}
    evidence = known | {"tests": tests[:20], "num_tests": len(tests), "not_tested": left_out}
    if not tests:
        reason = "; ".join(str(test.get("reason")) for test in left_out) or "there is nothing to compare by"
        return CODES.not_measured(_SKEW, reason, evidence=evidence)
    of, worst, p = f"{skew['size']} of {skew['of']} examples", tests[0], float(tests[0]["p_adjusted"])
    numbers: dict[str, Any] = {"value": p, "unit": "p", "threshold": false_alarm, "evidence": evidence}
    metric, kinds = "", [test["kind"] for test in tests]
    if "metric" in kinds:
        test = tests[kinds.index("metric")]
        interval = f"95 % interval of the difference {test['low']:+.3g} to {test['high']:+.3g}"
        metric = f"; {test['name']} is {test['sample']:.4g}, on all examples {test['full']:.4g} ({interval})"
    if p >= false_alarm:
        shown = ["classes"] * ("class" in kinds) + [f"{kinds.count('feature')} features"] * ("feature" in kinds)
        said = f" in {' and '.join(sorted(shown))}" if shown else ""
        return CODES.finding(_SKEW, "ok", f"The {of} are like the rest{said}{metric}.", **numbers)
    said = f"feature {worst['name']} is distributed differently ({worst['test']})"
    if worst["kind"] == "metric":
        said = f"{worst['name']} differs"
    elif worst["kind"] == "class":
        far = worst["furthest"]
        said = f"{far['count']} are of class {far['value']}, where {far['expected']:.1f} are expected"
    return CODES.finding(
        _SKEW, "fail", f"The {of} are not like the rest: {said}{metric}.", **numbers,
        advice=[
            "Draw another sample, stratified or at random over the whole set instead of its beginning: wb.data.draw_sample(data, size).",
            "Then look at what the set is ordered by: by class, by time, by source.",
        ],
    )  # fmt: skip


def _too_small(
    facts: Facts, level: dict[str, float], *, learned_frac: float, comparisons: int, min_examples: int, material_frac: float,
    adopted: bool,
) -> Finding:  # fmt: skip
    asked, pair, bounds = facts.get("asked") or {}, facts["pair"], size_bounds(facts, **level)
    metric, learned = str(facts["metric"]), pair.get("learned")
    n = int((facts.get("sample") or {}).get("size") or bounds.proposed or bounds.available)
    row = evaluation_sizes(facts, [n], comparisons=comparisons, **level).iloc[0]
    numbers = {name: float(row[name]) for name in ("detectable", "unpaired", "seconds", "selection_gap")}
    shows_from = numbers["detectable"]
    shows = f"{n} examples show a difference of {_short(shows_from)} in {metric}"
    wanted, what, said = None, "unknown", f"{shows}."
    if asked.get("smallest_difference") is not None:
        wanted, what = float(asked["smallest_difference"]), "asked for"
    elif adopted and pair.get("difference") is not None:  # it was seen already: no chance of these examples is enough
        wanted, what = abs(float(pair["difference"])), "what was decided by"
        sd, false_alarm = float(pair["difference_sd"]), level["false_alarm"]
        shows_from = detectable_difference(n, sd=sd, false_alarm=false_alarm, power=0.5)
        tell = f"{n} examples tell these two models apart where their {metric} differs by {_short(shows_from)} or more"
        said = f"{tell}; the decision was by {_short(wanted)}."
    elif learned is not None and learned > 0:
        wanted, what = learned_frac * float(learned), f"{learned_frac:.0%} of what training gains"
        said = f"{shows}; {_short(wanted)} would be {what}."
    enough = wanted is None or shows_from <= wanted * (1 + 1e-9)
    if bounds.reason:
        said, enough = f"No size does: {bounds.reason}; {shows}.", False
    elif what == "asked for" and not enough:
        takes = f"a difference of {wanted:g} takes {bounds.smallest} examples"
        said = f"Too small: a sample of {n} was taken, and {takes}; {shows}."
    elif what == "asked for":
        cost = f", within {asked['budget_s']:g} s an evaluation" if asked.get("budget_s") is not None else ""
        said = f"{shows}{cost}: sizes from {bounds.smallest} to {bounds.largest or bounds.available} keep both bounds."
    evidence = bounds._asdict() | numbers | level | {
        "size": n, "comparisons": comparisons, "pair": dict(pair), "threshold_is": what, "shows_from": shows_from,
    }  # fmt: skip
    known: dict[str, Any] = {"value": shows_from, "unit": metric, "threshold": wanted, "evidence": evidence}
    matters = what == "what was decided by" and (wanted or 0.0) >= material_frac * (learned or 0.0)
    enough = enough or not (asked or matters)
    if enough and n < min_examples and not facts.get("is_train"):
        few = "1 example does" if n == 1 else f"{n} examples do"
        said = f"{few} not show how far two models differ by chance, so no difference on them is to be trusted."
        enough = False
    if enough:
        return CODES.finding(_SMALL, "ok", said, **known)
    return CODES.finding(_SMALL, "warn", said, advice=_advice(bounds, asked), **known)


def _one_model(facts: Facts, bounds: SizeBounds, min_examples: int) -> Finding:
    said = f"No size does: {bounds.reason}."
    if not bounds.reason and facts["examples"] < min_examples and not facts.get("is_train"):
        said = f"{facts['examples']} examples are too few for any comparison of two models to be trusted."
    elif not bounds.reason:
        usual = (
            "no two models with finite values were evaluated on the set, so it is unknown how far they differ by chance"
        )
        return CODES.not_measured(_SMALL, facts.get("reason") or usual, evidence=bounds._asdict())
    advice = _advice(bounds, facts.get("asked") or {})
    return CODES.finding(_SMALL, "warn", said, evidence=bounds._asdict(), advice=advice)


def _advice(bounds: SizeBounds, asked: Facts) -> list[str]:
    said = ["Keep more examples for validation, 30 or more, or decide by larger differences only."]
    if bounds.smallest is not None:
        said = [f"Keep {bounds.smallest} examples or more for validation, or ask for a larger difference."]
    if bounds.largest is not None and bounds.largest < bounds.available:
        more = f"Give an evaluation more than {asked['budget_s']:g} s"
        said.insert(0, f"{more}, evaluate less often, or take a larger evaluation batch.")
    said.append("Compare models on the same examples, and on a held-out set before a small gain is believed.")
    if asked.get("label_noise"):
        said.append("Correct labels: each wrong one shrinks the difference that is seen.")
    return said


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no size"


def _minority(facts: Facts, one_example: float) -> Finding:
    rows, fewest = facts.get("classes"), 1 / one_example
    asked = facts.get("asked") or any(word in str(facts["metric"]).lower() for word in _BY_CLASS)
    if not rows and not asked:
        return CODES.finding(_COUNTS, "ok", "Does not apply: no result rests on the counts of single classes.")
    if not rows and facts.get("classless"):
        return CODES.finding(_COUNTS, "ok", "The examples have no classes, so no recall rests on a few of them.")
    if not rows:
        reason = facts.get("no_classes") or "the examples have no classes: the loss is not that of classification(...)"
        return CODES.not_measured(_COUNTS, reason)
    table = class_counts(rows, facts.get("classes_before"))
    rarest = table.iloc[0]
    shown = table.head(50).astype(object).where(table.head(50).notna(), None).to_dict("records")
    known: dict[str, Any] = {
        "value": float(rarest["total"]), "unit": "examples", "threshold": fewest,
        "evidence": {"classes": shown, "num_classes": len(table), "compared": facts.get("compared")},
    }  # fmt: skip
    said = _counts_words(rarest, facts.get("compared") or "the two evaluations")
    rare = table[table["total"] <= fewest + 1e-9]
    if rare.empty:
        return CODES.finding(_COUNTS, "ok", f"The rarest class is {said}.", **known)
    few = f"{len(rare)} of {len(table)} classes have {fewest:.0f} examples or fewer"
    head = f"{few}; the rarest is {said}"
    if empty := [str(int(k)) for k in rare.loc[rare["total"] == 0, "class"]]:
        head = f"No example is of class {', '.join(empty[:8])}: its recall cannot be measured. {few}"
    if not asked:
        said = f"{head}. Checkpoints are selected by {facts['metric']}, not by recalls."
        return CODES.finding(_COUNTS, "ok", said, **known)
    return CODES.finding(
        _COUNTS, "warn", f"{head}.", **known,
        advice=[
            "Log the number of correct predictions of a rare class beside its recall, and read differences in examples.",
            "Keep more examples of it for validation, or pool several evaluations and seeds.",
        ],
    )  # fmt: skip


def _counts_words(row: Any, compared: str) -> str:
    total, correct = int(row["total"]), int(row["correct"])
    text = f"{int(row['class'])}: {correct} of {total} right, recall {row['recall']:.3g} (95 % interval {row['low']:.2g} to {row['high']:.2g})"
    if total:
        text += f"; one error moves its recall by {1 / total:.2g}"
    if row["delta_examples"] is not None and math.isfinite(row["delta"]) and row["delta"]:
        text += f"; between {compared} it changes by {row['delta']:+.2g}, which is {row['delta_examples']}"
    return text
