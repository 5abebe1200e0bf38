"""Offline rows beside the periodic ones, and checkpoints that give their metric in another process (P2.1 to P2.3, P2.13)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.workloads import small_workload
from workbench.errors import RecordError, UnknownNameError, UsageError, WorkloadError
from workbench.record.folder import lock
from workbench.record.read import TrialRecord, periodic_rows
from workbench.topics.evaluation.offline import evaluate_offline, load_trained
from workbench.train.evaluation import evaluate
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.subsets import periodic_subset


@pytest.fixture(scope="module")
def workload() -> Workload:
    return small_workload(config={"total_steps": 20, "eval_every_steps": 5, "keep_best": 9})


@pytest.fixture(scope="module")
def trained(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> TrialRecord:
    return Trainer(track=0).run(
        periodic_subset(workload, [0, 3, 7, 9]), out=tmp_path_factory.mktemp("offline") / "study"
    )


@pytest.fixture
def trial(trained: TrialRecord, tmp_path: Path) -> TrialRecord:
    import shutil

    shutil.copytree(trained.path, tmp_path / "study")
    return TrialRecord(tmp_path / "study", 0)


def test_every_checkpoint_is_evaluated_on_the_whole_split_once(trial: TrialRecord, workload: Workload) -> None:
    before, best = len(trial.evals), trial.best()
    record = evaluate_offline(workload, trial)
    assert isinstance(record, TrialRecord)
    offline = record.evals[record.evals["setting"] == "offline"]
    assert offline[offline["metric"] == "loss"]["step"].tolist() == [0, 5, 10, 15, 20]
    assert set(offline["num_examples"]) == {13}
    assert (offline["subset"] == "").all()
    assert (offline["seconds"] > 0).all()
    for path in record.checkpoints:
        model = load_trained(workload, path)
        (loss, _) = evaluate(workload, model, batch_size=4, precision="float64")
        row = offline[(offline["step"] == int(path.name[-8:])) & (offline["metric"] == "loss")]
        assert row["value"].item() == pytest.approx(loss.value, rel=1e-12)
    assert record.best() == best, "selection looks at periodic rows alone"
    periodic = periodic_rows(record.evals)
    assert len(periodic) == before
    assert periodic["subset"].str.fullmatch("chosen-[0-9a-f]{8}").all()
    again = evaluate_offline(workload.replace(test_data=workload.train_data), record.path)
    counted = again.evals.query("setting == 'offline'")["split"].value_counts().to_dict()
    assert counted == {"validation": 10, "test": 10}, "each split once"


def test_what_cannot_be_evaluated_offline_says_why(trial: TrialRecord, workload: Workload) -> None:
    with pytest.raises(UnknownNameError, match="no split 'test'"):
        evaluate_offline(workload, trial, splits=["test"])
    with pytest.raises(RecordError, match="study of 'small', not of 'other'"):
        evaluate_offline(workload.replace(name="other"), trial)
    with pytest.raises(UsageError, match="batch_size=0"):
        evaluate_offline(workload, trial, batch_size=0)
    with lock(trial.path), pytest.raises(RecordError, match="another process is writing"):
        evaluate_offline(workload, trial)
    for path in trial.checkpoints:
        __import__("shutil").rmtree(path)
    with pytest.raises(RecordError, match="no checkpoint is there in trials 0"):
        evaluate_offline(workload, trial)


def test_a_metric_that_is_nan_before_training_is_refused(tmp_path: Path) -> None:
    broken = small_workload(metrics={"ratio": lambda outputs, batch: 0 * batch[1] / 0})
    for gradients in ("loop", "vmap"):
        with pytest.raises(WorkloadError, match="metric 'ratio' is NaN on the validation split before training"):
            Trainer(gradients=gradients).run(broken, out=tmp_path / gradients)
