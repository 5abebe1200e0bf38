"""The set that is evaluated during training: skew, size, counts behind rare classes, and the study that proposes a sample (P3)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.utils.data import Dataset

import workbench as wb
from tests.helpers.records import MemoryRecord
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import ConfigError, DataError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.json_values import dumps
from workbench.record.read import StudyRecord
from workbench.topics.evaluation.collect import collect_validation_set, compared_pairs, measure_evaluation, pair_facts
from workbench.topics.evaluation.diagnose_sample import CODES
from workbench.topics.evaluation.sample_size import selection_gap
from workbench.topics.evaluation.skew import skew_tests, worst_skew
from workbench.train.example_values import ExampleValues
from workbench.workloads.base import Workload

BUNCH = load_breast_cancer()
ROWS, LABELS = BUNCH.data[:, :6], np.sort(BUNCH.target)
SIZE = len(LABELS)
LOSSES = np.random.default_rng(0).exponential(size=SIZE) ** 3
KNOWN: dict[str, Any] = {
    "labels": LABELS,
    "features": np.random.default_rng(1).permutation(ROWS),
    "metrics": {"loss": LOSSES},
}


def taken(indices: Any, size: int = SIZE) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[indices] = True
    return mask


TAKEN = {
    "at random": taken(np.random.default_rng(3).choice(SIZE, 200, replace=False)),
    "its beginning": taken(range(200)),
}
TIMING = {"seconds_per_example": 1e-3, "start_s": 0.05, "batch_size": 64}


HEALTHY: dict[str, Any] = {
    "split": "validation", "metric": "accuracy", "examples": 2000, "num_classes": 2, "timing": TIMING,
    "asked": {"budget_s": 1.0, "smallest_difference": 0.05},
    "pair": {"values": [0.9, 0.91], "difference": 0.01, "difference_sd": 0.2, "disagreement": 0.04, "learned": 0.4},
    "classes": [{"class": 0, "total": 300, "correct": 270}, {"class": 1, "total": 650, "correct": 600}],
    "classes_before": [{"class": 0, "total": 300, "correct": 268}, {"class": 1, "total": 650, "correct": 600}],
}  # fmt: skip


def said(facts: dict[str, Any], **options: Any) -> Diagnosis:
    found = wb.evaluation.diagnose_sample(facts, **options)
    assert tuple(f.code for f in found) == tuple(CODES)
    for finding in found:
        assert finding.clause
        assert finding.advice or finding.status in ("ok", "not_measured")
    return found


def facts_only(facts: dict[str, Any]) -> MemoryRecord:
    empty = pd.DataFrame()
    return MemoryRecord(trials=empty, steps=empty, evals=empty, config={}, facts=facts, path=Path("x"))


def asked(**changes: Any) -> dict[str, Any]:
    return HEALTHY | {"asked": HEALTHY["asked"] | changes}


def test_what_a_healthy_set_is_found_to_be_also_after_json() -> None:
    for planted, verdict in (("at random", "ok"), ("its beginning", "fail")):
        facts = HEALTHY | {"skew": {"tests": skew_tests(TAKEN[planted], **KNOWN), "size": 200, "of": 569}}
        found, again = said(facts), json.loads(dumps(facts))
        assert found.verdict == verdict
        assert found.to_dict()["findings"] == said(again).to_dict()["findings"]
        whole = wb.evaluation.diagnose_sample(facts_only({"evaluation_sample": again}))
        assert whole.to_dict()["findings"] == found.to_dict()["findings"]
    skew = found["evaluation.skew"]
    assert "200 are of class 0, where 74.5 are expected" in skew.summary
    assert skew.value < 0.01 == skew.threshold
    bounds = found["evaluation.too_small"].evidence
    assert bounds["smallest"] == wb.evaluation.examples_needed(0.05, disagreement=0.04) <= bounds["largest"] == 950
    test = {"kind": "metric", "name": "loss", "p": None, "reason": "3 values of loss are not finite"}
    untold = said(HEALTHY | {"skew": {"tests": [test], "size": 20, "of": 2000}})["evaluation.skew"]
    assert (untold.status, untold.summary) == ("not_measured", "Not measured: 3 values of loss are not finite.")
    assert {f.status for f in wb.evaluation.diagnose_sample(facts_only({}))} == {"not_measured"}


FREE: dict[str, Any] = {"asked": {}, "metric": "loss"}
LOSS = {"values": [0.1, 0.09], "difference": -0.01, "difference_sd": 0.5, "disagreement": None, "learned": 2.0}
ALIKE, CLOSE = (
    FREE | {"pair": LOSS | {"difference_sd": 1e-4}},
    FREE | {"pair": LOSS | {"difference_sd": 0.3, "learned": 0.1}},
)
FEW = {"pair": None, "examples": 20, "timing": TIMING | {"batch_size": 8}, "asked": {"budget_s": 0.06}}


def pair(**changes: Any) -> dict[str, Any]:
    return FREE | {"pair": LOSS | changes}


@pytest.mark.parametrize(
    ("changes", "adopted", "status", "words"),
    [
        (pair(), False, "ok", "; 0.5 would be 25% of what training gains."),
        (pair(difference_sd=5.0) | {"examples": 50}, False, "ok", ""),  # nothing rests on it
        (pair(difference_sd=5.0) | {"examples": 50, "asked": {"budget_s": 1.0}}, False, "warn", ""),
        (pair() | {"examples": 5}, False, "warn", "5 examples do not show how far two models differ by chance"),
        (ALIKE | {"examples": 29}, False, "warn", "29 examples do not show how far two models differ by chance"),
        (ALIKE | {"examples": 30}, False, "ok", "30 examples show a difference of"),
        (ALIKE | {"examples": 2, "is_train": True}, False, "ok", ""),  # the training set itself is no sample
        (pair(learned=None), False, "ok", ""),
        (CLOSE, False, "ok", ""),  # nothing was decided
        (CLOSE, True, "warn", "differs by 0.0131 or more; the decision was by 0.01."),  # 1.96 * 0.3 / sqrt(2000)
        (CLOSE | {"examples": 20_000}, True, "ok", ""),
        (pair(difference_sd=0.3), True, "ok", ""),  # by so little that it does not matter
        (asked(budget_s=0.2), False, "warn", r"No size does: a difference of 0.05 takes 15\d examples, and 0.2 s allow 150 of them"),
        (asked(smallest_difference=0.005, budget_s=None), False, "warn", r"and there are 2000; 2000 examples show a difference of"),
        (asked(budget_s=0.05), False, "warn", r"No size does: one batch of 64 examples takes 0.114 s, and the budget is 0.05 s"),
        ({"pair": {"values": [0.9]}}, False, "not_measured", "two models"),
        ({"asked": {"budget_s": 0.01}, "pair": None}, False, "warn", "No size does: one batch of 64"),
        (FEW, False, "warn", "too few for any comparison"),
    ],
)  # fmt: skip
def test_how_large_a_set_has_to_be(changes: dict[str, Any], adopted: bool, status: str, words: str) -> None:
    finding = said(HEALTHY | changes, adopted=adopted)["evaluation.too_small"]
    assert (finding.status, bool(re.search(words, finding.summary))) == (status, True), finding


RARE = [{"class": 0, "total": 20, "correct": 16}, {"class": 1, "total": 400, "correct": 390}]
BEFORE = [RARE[0] | {"correct": 15}, RARE[1]]
CHANGED = "one error moves its recall by 0.05; between the two evaluations it changes by +0.05, which is 1 example."


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"classes_before": BEFORE}, "warn", CHANGED),
        ({"classes_before": BEFORE, "asked": {}}, "ok", CHANGED[:-1]),  # no decision rests on the class
        ({"asked": {}, "metric": "recall_of_0"}, "warn", "16 of 20 right"),
        ({"asked": {}, "metric": "macro F1"}, "warn", "16 of 20 right"),
        ({"classes": [*RARE, {"class": 2, "total": 0, "correct": 0}]}, "warn", "No example is of class 2"),
        ({"classes": [RARE[0] | {"total": 21}, RARE[1]]}, "ok", "16 of 21 right"),
    ],
)
def test_a_rare_class_is_told_in_examples(changes: dict[str, Any], status: str, words: str) -> None:
    found = said(HEALTHY | {"classes": RARE, "classes_before": None} | changes)["evaluation.minority_counts"]
    assert (found.status, words in found.summary) == (status, True), found


def test_the_table_of_sizes() -> None:
    sizes = [100, 950, 3000]
    table = wb.evaluation.sizes(HEALTHY, sizes)
    assert table["seconds"].tolist() == pytest.approx([0.15, 1.0, 3.05])
    assert (table["affordable"].tolist(), table["available"].tolist()) == ([True, True, False], [True, True, False])
    assert wb.evaluation.sizes(asked(budget_s=100.0), sizes)["affordable"].all()
    expected = [wb.evaluation.detectable_difference(n, disagreement=0.04) for n in sizes]
    assert table["detectable"].tolist() == pytest.approx(expected)
    assert (table["unpaired"] >= table["detectable"]).all()
    assert wb.evaluation.sizes(facts_only({})).empty


REPEATS = 4000


def mcnemar(n: int, better: float, worse: float, both_wrong: float, *, noise: float, classes: int) -> float:
    """Share of simulated pairs of models that McNemar's test tells apart; labels are flipped one by one.

    The true class is 0. `better`: only the second model is right; `worse`: only the first; `both_wrong`: they are wrong in
    different ways; otherwise they are both right.
    """
    rng = np.random.default_rng(5)
    kind = rng.choice(4, size=(REPEATS, n), p=[better, worse, both_wrong, 1 - better - worse - both_wrong])
    first = np.choose(kind, [1, 0, 1, 0])
    second = np.choose(kind, [0, 1, 2, 0])
    flipped = rng.random((REPEATS, n)) < noise
    labels = np.where(flipped, rng.integers(1, classes, size=(REPEATS, n)), 0)
    won = ((second == labels) & (first != labels)).sum(1)
    lost = ((first == labels) & (second != labels)).sum(1)
    z = (won - lost) / np.sqrt(np.maximum(won + lost, 1))
    return float((np.abs(z) > stats.norm.isf(0.025)).mean())


@pytest.mark.parametrize(("noise", "classes"), [(0.0, 10), (0.3, 10)])
def test_flipped_labels_are_found_with_the_power_that_is_promised(noise: float, classes: int) -> None:
    n, disagreement, both_wrong = 600, 0.14, 0.05
    seen = disagreement * (1 - noise + noise / (classes - 1)) + both_wrong * 2 * noise / (classes - 1)
    difference = wb.evaluation.detectable_difference(n, disagreement=seen, label_noise=noise, classes=classes)
    better, worse = (disagreement + difference) / 2, (disagreement - difference) / 2
    assert worse > 0
    assert mcnemar(n, better, worse, both_wrong, noise=noise, classes=classes) == pytest.approx(0.8, abs=0.03)
    equal = mcnemar(n, disagreement / 2, disagreement / 2, both_wrong, noise=noise, classes=classes)
    assert equal == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize(
    "how",
    [
        {"disagreement": 0.1}, {"disagreement": 0.0}, {"accuracy": 0.7}, {"accuracy": 1.0}, {"sd": 0.3},
        {"disagreement": 0.05, "label_noise": 0.1, "classes": 10}, {"accuracy": 0.9, "label_noise": 0.2},
    ],
)  # fmt: skip
@pytest.mark.parametrize("n", [10_000])
def test_the_number_of_examples_is_the_inverse(how: dict[str, Any], n: int) -> None:
    assert wb.evaluation.examples_needed(wb.evaluation.detectable_difference(n, **how), **how) == n


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "give one of disagreement, accuracy and sd, not none"),
        ({"disagreement": 1.1}, "disagreement=1.1 must be finite and at least 0, and at most 1"),
        ({"accuracy": 0.5, "label_noise": 0.5}, "must be at least 0 and below 0.5"),
        ({"sd": 0.5, "label_noise": 0.1}, "for a metric of zeros and ones"),
        ({"sd": 0.5, "power": 1.0}, "power=1.0"),
    ],
)
def test_bad_input_is_explained(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wb.evaluation.detectable_difference(10, **how)
    with pytest.raises(ConfigError, match="must be above 0, and at most 1"):
        wb.evaluation.examples_needed(1.5, disagreement=0.1)
    assert wb.evaluation.detectable_difference(3, disagreement=0.3) == math.inf


def test_the_best_of_many_flatters_itself_by_the_closed_form() -> None:
    """Simulated: 30 models that are right on an example with probability 0.9, each on 5 % of them by itself, the best of them taken (P3.5)."""
    rng, accuracy, disagreement, spread = np.random.default_rng(1), 0.9, 0.05, 0.02
    own = 1 - math.sqrt(1 - disagreement / (2 * accuracy * (1 - accuracy)))
    gaps = []
    for _ in range(300):
        truths = np.clip(accuracy + spread / own * rng.standard_normal(30), 0, 1)
        scores = [
            np.where(rng.random((30, n)) < own, rng.random((30, n)) < truths[:, None], rng.random(n) < accuracy).mean(1)
            for n in (300, 500)
        ]
        best = int(np.argmax(scores[0]))
        gaps.append(scores[0][best] - scores[1][best])
    expected = selection_gap(300, 30, sd=math.sqrt(disagreement / 2), spread=spread)
    assert np.mean(gaps) == pytest.approx(expected, abs=4 * np.std(gaps) / math.sqrt(300) + 0.05 * expected)


def test_two_classes_exactly_as_the_hypergeometric_distribution_says() -> None:
    mask = taken([0, 1, 2, 3, 4, 30, 31, 32, 33, 34], 40)
    found, law = skew_tests(mask, labels=np.arange(40) < 6)[0], stats.hypergeom(40, 6, 10)
    far = [k for k in range(7) if abs(k - 1.5) >= abs(5 - 1.5) - 1e-9]
    assert (found["test"], found["p"]) == ("exact", pytest.approx(law.pmf(far).sum(), abs=2e-3))


def test_the_interval_of_the_metric_covers_and_knows_that_the_set_is_finite() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=60)
    masks = [taken(rng.choice(60, 45, replace=False), 60) for _ in range(300)]
    found = [skew_tests(mask, metrics={"m": values})[0] for mask in masks]
    truth = values.std(ddof=1) / math.sqrt(45) * math.sqrt(1 - 45 / 60)
    assert found[0]["se"] == pytest.approx(truth)
    assert np.std([t["difference"] for t in found]) == pytest.approx(truth, rel=0.12)
    assert np.mean([t["low"] <= 0 <= t["high"] for t in found]) == pytest.approx(0.95, abs=0.035)
    assert np.mean([t["p"] < 0.2 for t in found]) == pytest.approx(0.2, abs=0.07)


def test_planted_skew_is_found_and_named_after_holm_and_bonferroni() -> None:
    tests = [{"kind": "feature", "name": str(i), "p": p} for i, p in enumerate((0.5, 0.01, 0.03))]
    found = worst_skew([*tests, {"kind": "metric", "name": "m", "p": 0.02}])
    adjusted = [(t["name"], round(t["p_adjusted"], 6)) for t in found]
    assert adjusted == [("m", 0.04), ("1", 0.06), ("2", 0.12), ("0", 1.0)]
    by_value = skew_tests(taken(np.argsort(ROWS[:, 4])[:150]), features=ROWS)
    worst = worst_skew(by_value)[0]
    assert (worst["kind"], worst["name"], worst["p_adjusted"] < 1e-6) == ("feature", "4", True)
    worst = worst_skew(skew_tests(taken(np.argsort(LOSSES)[:400]), **KNOWN))[0]
    assert (worst["kind"], worst["high"] < 0) == ("metric", True)
    assert worst_skew(skew_tests(np.ones(SIZE, dtype=bool), **KNOWN))[0]["p_adjusted"] == 1.0
    with pytest.raises(UsageError, match="the sample has 0 examples"):
        skew_tests(np.zeros(5, dtype=bool))
    with pytest.raises(DataError, match=r"must be \(examples, features\)"):
        skew_tests(np.ones(5, dtype=bool), features=np.zeros((5, 2, 2)))


class Slow(Dataset[Any]):
    """Time passes by 2 ms an item, by 0.3 s at each pass over the data, and by 100 s more at the first one, which warms up."""

    now, last, passes = 0.0, math.inf, 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index <= self.last:  # samples are read in order, so this begins a pass
            self.now += 100.3 if not self.passes else 0.3
            self.passes += 1
        self.last, self.now = index, self.now + 0.002
        return torch.full((3,), float(index), dtype=torch.float64), torch.tensor(float(index), dtype=torch.float64)


def test_seconds_are_those_of_the_data_without_the_warm_up() -> None:
    data = Slow()
    found = measure_evaluation(
        small_workload(validation_data=data), small_net().double(), batch_size=16, device=CPU, precision="float64", clock=lambda: data.now
    )  # fmt: skip
    assert (found["seconds_per_example"], found["start_s"]) == pytest.approx((0.002, 0.3))
    assert (found["batch_size"], found["rounds"], found["batches"]) == (16, 5, 20)


CPU = torch.device("cpu")
NOTHING = {"candidate": None}


def breast_cancer(**config: Any) -> Workload:
    workload = wb.load_workload("breast_cancer")
    return workload.replace(config=workload.config.replace(**{"total_steps": 40, "peak_lr": 0.02, **config}))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    study = wb.evaluation.SampleStudy(size=50, smallest_difference=0.3, budget_s=60.0, how="stratified")
    return study.run(breast_cancer(), wb.Trainer(device="cpu"), out=tmp_path_factory.mktemp("sample") / "s")


def test_the_study_measures_draws_and_tests(record: StudyRecord) -> None:
    facts = record.facts["evaluation_sample"]
    assert facts["examples"] == 86
    assert facts["metric"] == "accuracy"
    assert facts["timing"]["seconds_per_example"] > 0
    assert facts["sample"]["size"] == 50
    assert facts["sample"]["how"] == "stratified"
    assert [row["total"] for row in facts["classes"]] == [19, 31]
    assert {test["kind"] for test in facts["skew"]["tests"]} == {"class", "feature", "metric"}
    assert [t["name"] for t in facts["skew"]["tests"] if t["kind"] == "metric"] == ["accuracy", "loss"]
    found = wb.evaluation.diagnose_sample(record)
    assert found["evaluation.skew"].status == "ok"
    assert found["evaluation.too_small"].status == "ok"
    assert found["evaluation.minority_counts"].status == "warn", "19 malignant examples"
    assert found.workload == "breast_cancer"


def values(loss: Any, accuracy: Any, weights: Any = None) -> ExampleValues:
    columns = {"loss": np.asarray(loss, float), "accuracy": np.asarray(accuracy, float)}
    return ExampleValues(
        columns, np.ones(len(loss)) if weights is None else np.asarray(weights, float), None, None, None
    )


def test_how_far_two_models_differ() -> None:
    one, other = values([1, 2, 3, 4], [1, 1, 0, 0]), values([1, 1, 3, 3], [1, 0, 1, 0])
    loss = pair_facts([(one, other)], metric="loss")
    assert loss["values"] == [2.5, 2.0]
    assert loss["difference"] == -0.5
    assert loss["difference_sd"] == pytest.approx(np.std([0, -1, 0, -1], ddof=1))
    assert loss["disagreement"] is None
    assert pair_facts([(one, other)], metric="accuracy")["disagreement"] == 0.5
    both = pair_facts([(one, other), (other, one)], metric="loss")
    assert both["difference"] == both["difference_sd"] == 0.0
    assert set(pair_facts([(one, None)], metric="loss")) == {"values"}
    assert set(pair_facts([(one, values([1, math.nan, 1, 1], [1, 1, 1, 1]))], metric="loss")) == {"values"}


def test_what_joins_a_diagnosis_by_all_of_the_set_or_a_part(
    record: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collected(workload: Workload, **changes: Any) -> dict[str, Any]:
        known = {
            "path": record.path,
            "facts": record.facts,
            "evals": record.evals,
            "trials": record.trials.assign(**changes),
        }
        given = SimpleNamespace(config=record.config, **known)
        session: Any = SimpleNamespace(record=given, workload=workload, config=workload.config, device=CPU)
        return collect_validation_set(session, NOTHING)

    facts = collected(breast_cancer())
    assert (facts["compared"], facts["metric"], "skew" in facts) == ("the baseline under two seeds", "loss", False)
    assert [row["total"] for row in facts["classes"]] == [32, 54]
    assert facts["pair"]["learned"] > 0
    found = wb.evaluation.diagnose_sample(collected(breast_cancer(), best_step=math.nan))
    assert "no trial of the baseline has a selected checkpoint" in found["evaluation.too_small"].summary
    rows = [(0, 0, 0.1), (1, 7, 0.1), (2, 8, 0.1), (3, 0, 0.4), (4, 7, 0.4), (5, 9, 0.4)]
    trials = record.trials.iloc[[0] * 6].reset_index(drop=True)
    trials = trials.assign(trial=[r[0] for r in rows], seed=[r[1] for r in rows], peak_lr=[r[2] for r in rows])
    chosen = {"candidate": "lr 0.4", "recommended": {"trials": [3]}}
    swept = trials.iloc[[0, 3]].assign(stage=["baseline", "lr_sweep"], best_value=[0.3, 0.2])
    for given, found, pairs in (
        (trials, chosen, [(1, 4)]), (trials[trials["seed"] == 0], chosen, [(0, 3)]), (trials[trials["seed"] == 0], NOTHING, [(0, None)]),
        (swept, NOTHING, [(0, 3)]), (trials.iloc[:3], NOTHING, [(0, 1)]), (trials.iloc[:0], NOTHING, []),
    ):  # fmt: skip
        study: Any = SimpleNamespace(trials=given, config=record.config | {"peak_lr": 0.1})
        assert compared_pairs(study, found)[1] == pairs, "of equal seeds, and fresh where there are any"
    monkeypatch.setattr("workbench.topics.evaluation.collect.LEAST_EXAMPLES", 60)
    part = collected(breast_cancer(total_steps=1, batch_size=2))
    assert part["examples"] == 86
    assert part["pair"]["difference_sd"] > 0
    assert "more than 2 % of a baseline run" in part["no_classes"]
