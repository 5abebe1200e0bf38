"""The study of an evaluation sample: what it measures, proposes and draws; and what joins a diagnosis."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from workbench.train.example_values import ExampleValues

import workbench as wb
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import ConfigError, DataError, RecordError, UnknownNameError, UsageError
from workbench.record.read import StudyRecord
from workbench.topics.evaluation.collect import (
    class_facts,
    collect_validation_set,
    compared_pairs,
    measure_evaluation,
    pair_facts,
)
from workbench.topics.evaluation.study import EvaluationSampleStudy
from workbench.workloads.base import Workload
from workbench.workloads.losses import SquaredError

CPU = torch.device("cpu")
NOTHING = {"candidate": None}


class Clock:
    """Time that passes only where it is said to: per item, and once for each pass over the data."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset[Any]):
    def __init__(self, clock: Clock, *, size: int, item_s: float, start_s: float = 0.0) -> None:
        self.clock, self.size, self.item_s, self.start_s, self.passes = clock, size, item_s, start_s, 0
        self.last = math.inf

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index <= self.last:  # samples are read in order, so this begins a pass
            self.passes += 1
            self.clock.now += self.start_s + (100.0 if self.passes == 1 else 0.0)  # the first one warms up
        self.last = index
        self.clock.now += self.item_s
        return torch.full((3,), float(index), dtype=torch.float64), torch.tensor(float(index), dtype=torch.float64)


def measured(size: int, batch: int, **times: float) -> dict[str, Any]:
    clock = Clock()
    workload = small_workload(validation_data=Slow(clock, size=size, **times))
    return measure_evaluation(
        workload, small_net().double(), batch_size=batch, device=CPU, precision="float64", clock=clock
    )


def test_seconds_are_those_of_the_data_without_the_warm_up() -> None:
    found = measured(100, 16, item_s=0.002, start_s=0.3)
    assert found["seconds_per_example"] == pytest.approx(0.002)
    assert found["start_s"] == pytest.approx(0.3)
    assert (found["batch_size"], found["rounds"], found["batches"]) == (16, 5, 20)


def test_a_set_smaller_than_a_batch_is_measured_whole() -> None:
    found = measured(5, 64, item_s=0.01, start_s=0.05)
    assert found["seconds_per_example"] == pytest.approx((5 * 0.01 + 0.05) / 5)
    assert found["start_s"] == 0.0


def breast_cancer(**config: Any) -> Workload:
    workload = wb.load_workload("breast_cancer")
    return workload.replace(config=workload.config.replace(**{"total_steps": 40, "peak_lr": 0.02, **config}))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    study = EvaluationSampleStudy(size=50, smallest_difference=0.3, budget_s=60.0, how="stratified")
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
    found = wb.diagnose_evaluation_sample(record)
    assert found["evaluation.skew"].status == "ok"
    assert found["evaluation.too_small"].status == "ok"
    assert found["evaluation.minority_counts"].status == "warn", "19 malignant examples"
    assert found.workload == "breast_cancer"


def test_the_sample_can_be_drawn_again_by_what_the_record_says(record: StudyRecord) -> None:
    said = record.facts["evaluation_sample"]["sample"]
    data = breast_cancer().validation_data
    again = wb.draw_sample(data, said["size"], how=said["how"], labels=data.tensors[1].numpy(), seed=said["seed"])
    assert again.id == said["id"]


def test_its_values_are_those_that_training_logged(record: StudyRecord) -> None:
    facts = record.facts["evaluation_sample"]
    evals = record.evals
    for trial, value in zip(facts["pair"]["trials"][0], facts["pair"]["values"], strict=True):
        step = record.trial(trial).best().step
        row = evals[(evals["trial"] == trial) & (evals["step"] == step) & (evals["metric"] == "accuracy")]
        assert row["value"].iloc[0] == pytest.approx(value, abs=1e-9)


def test_the_same_call_answers_from_disk(record: StudyRecord) -> None:
    study = EvaluationSampleStudy(size=50, smallest_difference=0.3, budget_s=60.0, how="stratified")
    again = study.run(breast_cancer(), wb.Trainer(device="cpu"), out=record.path)
    assert again.facts == record.facts
    assert len(again.trials) == 2


def test_a_budget_too_short_for_one_batch_and_a_regression(tmp_path: Path) -> None:
    study = EvaluationSampleStudy(budget_s=1e-9, smallest_difference=0.1)
    done = study.run(small_workload(), wb.Trainer(device="cpu"), out=tmp_path / "s")
    found = wb.diagnose_evaluation_sample(done)
    assert found["evaluation.too_small"].summary.startswith("No size does: one batch of 13 examples takes")
    assert found["evaluation.minority_counts"].status == "not_measured"
    assert "sample" not in done.facts["evaluation_sample"]


def test_missing_values_in_the_inputs_do_not_stop_the_study(tmp_path: Path) -> None:
    workload = small_workload()
    x, y = workload.validation_data.tensors
    bad = x.clone()
    bad[3] = math.nan
    done = EvaluationSampleStudy(size=8, metric="loss").run(
        workload.replace(validation_data=TensorDataset(bad, y), config=workload.config.replace(select="train/loss")),
        wb.Trainer(device="cpu"), out=tmp_path / "s",
    )  # fmt: skip
    with pytest.raises(RecordError, match="no evaluation of it was finite: look for NaN in the validation set"):
        EvaluationSampleStudy().run(workload.replace(validation_data=TensorDataset(bad, y)), out=tmp_path / "t")
    found = wb.diagnose_evaluation_sample(done)
    assert found["evaluation.too_small"].status == "warn", "13 examples are too few, whatever was evaluated on them"
    assert found["evaluation.skew"].evidence["not_tested"][0]["reason"] == "1 values of loss are not finite"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"budget_s": 0.0}, "budget_s=0.0 must be a finite number above 0"),
        ({"budget_s": -1.0}, "budget_s=-1.0"),
        ({"smallest_difference": 0.0}, "smallest_difference=0.0"),
        ({"smallest_difference": math.nan}, "smallest_difference=nan"),
        ({"size": 0}, "size=0 must be an integer of at least 1"),
        ({"how": "first"}, "how='first' is no way to draw a sample"),
        ({"label_noise": 1.5}, "label_noise=1.5"),
    ],
)
def test_fields_out_of_range(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EvaluationSampleStudy(**fields)


def test_more_than_there_is_and_a_metric_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="size=87 is more than the 86 examples"):
        EvaluationSampleStudy(size=87).run(breast_cancer(), out=tmp_path / "a")
    assert not (tmp_path / "a" / "trials").exists(), "nothing was trained"
    with pytest.raises(UnknownNameError, match=r"no metric 'acuracy'. Did you mean 'accuracy'"):
        EvaluationSampleStudy(metric="acuracy").run(breast_cancer(), out=tmp_path / "b")
    assert not (tmp_path / "b" / "trials").exists(), "nothing was trained"


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


def test_weights_enter_the_spread_as_they_enter_the_mean() -> None:
    rng = np.random.default_rng(0)
    weights, differences = rng.integers(1, 9, 400), rng.normal(size=400)
    found = pair_facts(
        [(values(0 * weights, 0 * weights, weights), values(differences, 0 * weights, weights))], metric="loss"
    )
    means = []
    for _ in range(2000):
        drawn = rng.integers(0, 400, 400)
        means.append(np.average(differences[drawn], weights=weights[drawn]))
    assert found["difference_sd"] / 20 == pytest.approx(np.std(means), rel=0.08)


def session(record: StudyRecord, workload: Workload, facts: dict[str, Any] | None = None) -> Any:
    known = SimpleNamespace(
        path=record.path, config=record.config, facts=facts or record.facts, trials=record.trials, evals=record.evals
    )
    return SimpleNamespace(record=known, workload=workload, config=workload.config, device=CPU)


def test_what_joins_a_diagnosis(record: StudyRecord) -> None:
    facts = collect_validation_set(session(record, breast_cancer()), NOTHING)
    assert facts["compared"] == "the baseline under two seeds"
    assert facts["metric"] == "loss"
    assert "skew" not in facts
    assert [row["total"] for row in facts["classes"]] == [32, 54]
    assert facts["pair"]["learned"] > 0
    found = wb.diagnose_evaluation_sample(facts)
    assert found.verdict == "ok"


def test_without_a_checkpoint_nothing_is_called_healthy(record: StudyRecord) -> None:
    broken = session(record, breast_cancer())
    broken.record.trials = record.trials.assign(best_step=math.nan)
    found = wb.diagnose_evaluation_sample(collect_validation_set(broken, NOTHING))
    assert found["evaluation.too_small"].status == "not_measured"
    assert "no trial of the baseline has a selected checkpoint" in found["evaluation.too_small"].summary


def test_a_large_set_is_looked_at_in_part(record: StudyRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.topics.evaluation.collect.LEAST_EXAMPLES", 60)
    facts = collect_validation_set(session(record, breast_cancer(total_steps=1, batch_size=2)), NOTHING)
    assert facts["examples"] == 86
    assert facts["pair"]["difference_sd"] > 0
    assert "more than 2 % of a baseline run" in facts["no_classes"]


class Stream(IterableDataset[Any]):
    """Read in its own order: there is no index to draw a part by."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        return iter(self.data[i] for i in range(len(self.data)))


def test_a_set_that_is_read_in_its_own_order(
    record: StudyRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = breast_cancer(total_steps=1, batch_size=2)
    stream = workload.replace(validation_data=Stream(workload.validation_data))
    monkeypatch.setattr("workbench.topics.evaluation.collect.LEAST_EXAMPLES", 60)
    facts = collect_validation_set(session(record, stream), NOTHING)
    assert [row["total"] for row in facts["classes"]] == [32, 54], "all of it was read"
    with pytest.raises(DataError, match="Stream has no index to draw a sample by"):
        EvaluationSampleStudy().run(stream, out=tmp_path / "s")
    assert not (tmp_path / "s" / "trials").exists(), "nothing was trained"


def test_pairs_are_of_equal_seeds_and_fresh_where_there_are_any(record: StudyRecord) -> None:
    rows = [(0, 0, 0.1), (1, 7, 0.1), (2, 8, 0.1), (3, 0, 0.4), (4, 7, 0.4), (5, 9, 0.4)]
    trials = (
        record.trials.iloc[[0] * 6].reset_index(drop=True).assign(trial=[r[0] for r in rows], seed=[r[1] for r in rows])
    )
    trials = trials.assign(peak_lr=[r[2] for r in rows])
    study = SimpleNamespace(trials=trials, config=record.config | {"peak_lr": 0.1})
    chosen = {"candidate": "lr 0.4", "recommended": {"trials": [3]}}
    assert compared_pairs(study, chosen) == ("baseline and lr 0.4", [(1, 4)])
    study.trials = trials[trials["seed"] == 0]
    assert compared_pairs(study, chosen)[1] == [(0, 3)]
    assert compared_pairs(study, NOTHING)[1] == [(0, None)]
    study.trials = study.trials.assign(stage=["baseline", "lr_sweep"], best_value=[0.3, 0.2])
    assert compared_pairs(study, NOTHING) == ("the baseline and the next best lr of its sweep", [(0, 3)])
    study.trials = trials.iloc[:3]
    assert compared_pairs(study, NOTHING)[1] == [(0, 1)]
    study.trials = trials.iloc[:0]
    assert compared_pairs(study, NOTHING)[1] == []


def test_what_has_no_classes_is_told_from_what_may_have_some() -> None:
    one = values([1, 2], [0, 1])
    assert class_facts(small_workload(), one, None)["classless"] is False
    assert class_facts(small_workload(loss=SquaredError()), one, None)["classless"] is True
    labelled = one._replace(labels=np.array([0, 1]), classes=2)
    assert class_facts(small_workload(), labelled, None)["classes"] == [
        {"class": 0, "total": 1, "correct": 0},
        {"class": 1, "total": 1, "correct": 1},
    ]
    shares = labelled._replace(columns={"loss": np.ones(2), "iou": np.array([0.5, 1.0])})
    assert "no metric of the workload is 0 or 1" in class_facts(small_workload(), shares, None)["no_classes"]


def test_planted_faults_on_a_trained_classifier(tmp_path: Path) -> None:
    """Six validation examples of one class: too few, and a class without any."""
    workload = breast_cancer()
    x, y = workload.validation_data.tensors
    few = torch.nonzero(y == 1).flatten()[:6]
    tiny = workload.replace(validation_data=TensorDataset(x[few], y[few]))
    done = EvaluationSampleStudy(smallest_difference=0.1).run(tiny, wb.Trainer(device="cpu"), out=tmp_path / "s")
    found = wb.diagnose_evaluation_sample(done)
    assert found["evaluation.too_small"].status == "warn"
    assert found["evaluation.minority_counts"].status == "warn"
    assert "No example is of class 0" in found["evaluation.minority_counts"].summary
    assert isinstance(workload.build_model(), nn.Module)
