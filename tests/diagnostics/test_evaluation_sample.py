"""The verdicts on an evaluation set: planted faults, healthy twins, and what cannot be told."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.records import MemoryRecord
from workbench.findings.diagnosis import Diagnosis
from workbench.record.json_values import dumps
from workbench.topics.evaluation.diagnose_sample import CODES, diagnose_evaluation_sample
from workbench.topics.evaluation.sample_size import (
    detectable_difference,
    evaluation_sizes,
    examples_needed,
    size_bounds,
)
from workbench.topics.evaluation.skew import skew_tests

TIMING = {"seconds_per_example": 1e-3, "start_s": 0.05, "batch_size": 64}
HEALTHY: dict[str, Any] = {
    "split": "validation", "metric": "accuracy", "examples": 2000, "num_classes": 2, "timing": TIMING,
    "asked": {"budget_s": 1.0, "smallest_difference": 0.05},
    "pair": {"values": [0.9, 0.91], "difference": 0.01, "difference_sd": 0.2, "disagreement": 0.04, "learned": 0.4},
    "classes": [{"class": 0, "total": 300, "correct": 270}, {"class": 1, "total": 650, "correct": 600}],
    "classes_before": [{"class": 0, "total": 300, "correct": 268}, {"class": 1, "total": 650, "correct": 600}],
}  # fmt: skip


def said(facts: dict[str, Any], **options: Any) -> Diagnosis:
    found = diagnose_evaluation_sample(facts, **options)
    assert tuple(f.code for f in found) == tuple(CODES)
    for finding in found:
        assert finding.clause
        assert finding.advice or finding.status in ("ok", "not_measured")
    return found


def record(facts: dict[str, Any]) -> MemoryRecord:
    empty = pd.DataFrame()
    return MemoryRecord(trials=empty, steps=empty, evals=empty, config={}, facts=facts, path=Path("x"))


def asked(**changes: Any) -> dict[str, Any]:
    return HEALTHY | {"asked": HEALTHY["asked"] | changes}


def skewed(biased: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    labels, rows = np.arange(2000) // 500, rng.normal(size=(2000, 3))
    chosen = np.arange(200) if biased else rng.choice(2000, 200, replace=False)
    mask = np.isin(np.arange(2000), chosen)
    tests = skew_tests(mask, labels=labels, features=rows, metrics={"accuracy": (rng.random(2000) < 0.9) * 1.0})
    return {"skew": {"tests": tests, "size": 200, "of": 2000}}


def test_healthy() -> None:
    found = said(HEALTHY | skewed(biased=False))
    assert found.verdict == "ok"
    assert "3 features" in found["evaluation.skew"].summary
    assert "accuracy is" in found["evaluation.skew"].summary
    bounds = found["evaluation.too_small"].evidence
    assert bounds["smallest"] == examples_needed(0.05, disagreement=0.04) <= bounds["largest"] == 950


def test_a_record_and_its_facts_say_the_same_also_after_json() -> None:
    facts = HEALTHY | skewed(biased=True)
    again = json.loads(dumps(facts))
    assert said(facts).to_dict()["findings"] == said(again).to_dict()["findings"]
    whole = diagnose_evaluation_sample(record({"evaluation_sample": again}))
    assert whole.to_dict()["findings"] == said(again).to_dict()["findings"]


@pytest.mark.parametrize("facts", [{}, {"preflight": {}}])
def test_without_facts_nothing_is_called_healthy(facts: dict[str, Any]) -> None:
    assert {f.status for f in diagnose_evaluation_sample(record(facts))} == {"not_measured"}
    assert {f.code for f in diagnose_evaluation_sample(record(facts))} == set(CODES)


def test_a_biased_sample_fails() -> None:
    finding = said(HEALTHY | skewed(biased=True))["evaluation.skew"]
    assert finding.status == "fail"
    assert "200 are of class 0, where 50.0 are expected" in finding.summary
    assert finding.value is not None
    assert finding.value < 0.01 == finding.threshold


def test_the_whole_set_is_never_skewed() -> None:
    assert said(HEALTHY)["evaluation.skew"].status == "ok"
    assert "all 2000 examples" in said(HEALTHY)["evaluation.skew"].summary
    full = HEALTHY | {"skew": {"tests": [], "size": 2000, "of": 2000}}
    assert said(full)["evaluation.skew"].summary == "The sample is the full set of 2000 examples."


def test_a_sample_that_cannot_be_compared_is_not_called_healthy() -> None:
    test = {"kind": "metric", "name": "loss", "p": None, "reason": "3 values of loss are not finite"}
    finding = said(HEALTHY | {"skew": {"tests": [test], "size": 20, "of": 2000}})["evaluation.skew"]
    assert (finding.status, finding.summary) == ("not_measured", "Not measured: 3 values of loss are not finite.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget_s": 0.2}, r"No size does: a difference of 0.05 takes 15\d examples, and 0.2 s allow 150 of them"),
        ({"smallest_difference": 0.005}, r"No size does: a difference of 0.005 takes \d+ examples, and 1 s allow 950 of them"),
        ({"smallest_difference": 0.005, "budget_s": None}, r"and there are 2000; 2000 examples show a difference of"),
        ({"budget_s": 0.05}, r"No size does: one batch of 64 examples takes 0.114 s, and the budget is 0.05 s"),
        ({"budget_s": 0.05, "smallest_difference": None}, r"No size does: one batch of 64"),
    ],
)  # fmt: skip
def test_no_size_does_with_the_numbers(changes: dict[str, Any], words: str) -> None:
    finding = said(asked(**changes))["evaluation.too_small"]
    assert finding.status == "warn"
    assert re.search(words, finding.summary), finding.summary


def test_a_sample_that_was_taken_too_small() -> None:
    finding = said(HEALTHY | {"sample": {"size": 60}})["evaluation.too_small"]
    assert finding.status == "warn"
    assert finding.summary.startswith("Too small: a sample of 60 was taken, and a difference of 0.05 takes ")
    assert said(HEALTHY | {"sample": {"size": 600}})["evaluation.too_small"].status == "ok"


def test_a_set_smaller_than_a_batch_is_one_batch() -> None:
    few = HEALTHY | {"examples": 30, "asked": {"budget_s": 0.09, "smallest_difference": 0.4}}
    assert size_bounds(few).largest == 30
    assert said(few)["evaluation.too_small"].status == "ok"


def test_label_noise_asks_for_more() -> None:
    clean, noisy = (size_bounds(asked(label_noise=noise)).smallest for noise in (0.0, 0.2))
    assert clean is not None
    assert noisy is not None
    assert noisy > 1.4 * clean
    finding = said(asked(label_noise=0.2, smallest_difference=0.02))["evaluation.too_small"]
    assert any("Correct labels" in line for line in finding.advice)


def test_without_a_difference_of_interest_a_quarter_of_what_was_learned_counts() -> None:
    free = HEALTHY | {"asked": {}, "metric": "loss"}
    pair = {"values": [0.1, 0.1], "difference": 0.0, "difference_sd": 0.5, "disagreement": None, "learned": 2.0}
    assert said(free | {"pair": pair})["evaluation.too_small"].status == "ok"
    for asked_for, status in (({}, "ok"), ({"budget_s": 1.0}, "warn")):
        wide = said(free | {"asked": asked_for, "pair": pair | {"difference_sd": 5.0}, "examples": 50})
        assert wide["evaluation.too_small"].status == status, "a set that nothing rests on is no trouble"
    tiny = said(free | {"pair": pair, "examples": 5})["evaluation.too_small"]
    assert (tiny.status, tiny.threshold) == ("warn", 0.5)
    assert tiny.value == pytest.approx(detectable_difference(5, sd=0.5))
    alike = pair | {"difference_sd": 1e-4}
    for examples, status in ((1, "warn"), (29, "warn"), (30, "ok")):
        few = said(free | {"pair": alike, "examples": examples})["evaluation.too_small"]
        assert few.status == status, "however alike they are: so few do not show how alike"
        assert ("not show how far two models differ" in few.summary) is (status == "warn")
    whole = said(free | {"pair": alike, "examples": 2, "is_train": True})["evaluation.too_small"]
    assert whole.status == "ok", "the training set itself is no sample"
    unknown = said(free | {"pair": pair | {"learned": None}})["evaluation.too_small"]
    assert (unknown.status, unknown.threshold) == ("ok", None)


def test_what_was_decided_has_to_stand_out_from_the_examples() -> None:
    pair = {"values": [0.10, 0.09], "difference": -0.01, "difference_sd": 0.3, "disagreement": None, "learned": 0.1}
    facts = HEALTHY | {"asked": {}, "metric": "loss", "pair": pair}
    assert said(facts)["evaluation.too_small"].status == "ok", "nothing was decided"
    finding = said(facts, adopted=True)["evaluation.too_small"]
    assert finding.status == "warn"
    assert finding.summary.endswith("; the decision was by 0.01.")
    assert finding.value == pytest.approx(1.96 * 0.3 / math.sqrt(2000), rel=1e-3)
    assert said(facts | {"examples": 20_000}, adopted=True)["evaluation.too_small"].status == "ok"
    small = facts | {"pair": pair | {"learned": 2.0}}
    assert said(small, adopted=True)["evaluation.too_small"].status == "ok", "by so little that it does not matter"


@pytest.mark.parametrize("pair", [None, {"values": [0.9]}, {"values": [math.nan]}])
def test_one_model_alone_does_not_say_what_can_be_told_apart(pair: Any) -> None:
    finding = said(HEALTHY | {"pair": pair})["evaluation.too_small"]
    assert finding.status == "not_measured"
    assert "two models" in finding.summary
    late = said(HEALTHY | {"pair": pair, "asked": {"budget_s": 0.01}})["evaluation.too_small"]
    assert late.status == "warn"
    assert late.summary.startswith("No size does: one batch of 64")


def test_a_rare_class_is_told_in_examples() -> None:
    rows = [{"class": 0, "total": 20, "correct": 16}, {"class": 1, "total": 400, "correct": 390}]
    before = [{"class": 0, "total": 20, "correct": 15}, {"class": 1, "total": 400, "correct": 390}]
    finding = said(HEALTHY | {"classes": rows, "classes_before": before})["evaluation.minority_counts"]
    assert (finding.status, finding.value, finding.threshold) == ("warn", 20.0, 20.0)
    assert "16 of 20 right" in finding.summary
    assert finding.summary.endswith(
        "one example is 0.05; between the two evaluations it changes by +0.05, which is 1 example."
    )
    assert finding.evidence["classes"][0]["delta_examples"] == "1 example"
    for metric, status in (("accuracy", "ok"), ("loss", "ok"), ("recall_of_0", "warn"), ("macro F1", "warn")):
        found = said(HEALTHY | {"asked": {}, "metric": metric, "classes": rows, "classes_before": before})
        assert found["evaluation.minority_counts"].status == status, "whether a decision rests on the class"
        assert "16 of 20 right" in found["evaluation.minority_counts"].summary
    more = [rows[0] | {"total": 21}, rows[1]]
    assert said(HEALTHY | {"classes": more, "classes_before": None})["evaluation.minority_counts"].status == "ok"


def test_an_empty_class_and_one_class_alone() -> None:
    rows = [{"class": 0, "total": 50, "correct": 40}, {"class": 1, "total": 0, "correct": 0}]
    finding = said(HEALTHY | {"classes": rows, "classes_before": None})["evaluation.minority_counts"]
    assert finding.status == "warn"
    assert "No example is of class 1: its recall cannot be measured" in finding.summary
    dumps(finding.to_dict())
    one = said(HEALTHY | {"classes": rows[:1], "classes_before": None})["evaluation.minority_counts"]
    assert one.status == "ok"


def test_without_classes_counts_are_not_measured() -> None:
    facts = {key: value for key, value in HEALTHY.items() if not key.startswith("classes")}
    assert said(facts)["evaluation.minority_counts"].status == "not_measured"
    why = said(facts | {"no_classes": "no metric of the workload is 0 or 1"})["evaluation.minority_counts"]
    assert "no metric of the workload" in why.summary
    none = said(facts | {"no_classes": "unknown", "classless": True})["evaluation.minority_counts"]
    assert (none.status, none.value) == ("ok", None), "numbers and tokens have no rare class"
    unasked = said(facts | {"asked": {}, "metric": "loss"})["evaluation.minority_counts"]
    assert (unasked.status, unasked.summary[:15]) == ("ok", "Does not apply:")


def test_the_table_of_sizes() -> None:
    table = evaluation_sizes(HEALTHY, [100, 950, 3000])
    assert table["seconds"].tolist() == pytest.approx([0.15, 1.0, 3.05])
    assert table["affordable"].tolist() == [True, True, False]
    cheap = evaluation_sizes(asked(budget_s=100.0), [100, 950, 3000])
    assert cheap["affordable"].tolist() == [True, True, True], "the budget's word, not that of the set"
    assert cheap["available"].tolist() == [True, True, False]
    assert table["available"].tolist() == [True, True, False]
    assert table["detectable"].tolist() == pytest.approx(
        [detectable_difference(n, disagreement=0.04) for n in (100, 950, 3000)]
    )
    assert (table["unpaired"] >= table["detectable"]).all()
    assert evaluation_sizes(record({})).empty
    assert 2000 in evaluation_sizes(HEALTHY)["examples"].to_list()
