"""The study of checkpoints: seeds, a test split that decides nothing, and the facts of a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.helpers.streams import Stream
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints
from workbench.topics.checkpoints.study import CheckpointStudy
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import evaluate
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload


def with_test() -> Workload:
    x, y = small_workload().train_data.tensors
    return small_workload(test_data=TensorDataset(x[20:41], y[20:41]))


def test_every_seed_is_evaluated_on_both_splits(tmp_path: Path) -> None:
    record = CheckpointStudy(seeds=3, evaluations=8).run(with_test(), out=tmp_path / "s")
    assert record.trials["stage"].tolist() == ["checkpoints"] * 3
    assert record.trials["shared_seed"].tolist() == [0, 1, 2]
    counts = record.evals[record.evals["metric"] == "loss"].groupby(["trial", "split"]).size()
    assert counts.tolist() == [9] * 6
    found = diagnose_checkpoints(record)
    assert found["checkpoints.best_not_last"].evidence["runs_tested"] == 3
    assert found["checkpoints.resume_jump"].status == "ok"


def test_the_test_split_decides_nothing(tmp_path: Path) -> None:
    plain, tested = (
        CheckpointStudy(seeds=2, resume=False).run(w, out=tmp_path / n)
        for w, n in ((small_workload(), "a"), (with_test(), "b"))
    )
    assert plain.trials["best_step"].tolist() == tested.trials["best_step"].tolist()
    assert plain.steps["loss"].tolist() == tested.steps["loss"].tolist()
    assert diagnose_checkpoints(plain)["checkpoints.best_not_last"].evidence["split"] == "selected"


@pytest.mark.parametrize("gradients", ["loop", "vmap"])
def test_the_logged_test_loss_is_that_of_the_checkpoint(tmp_path: Path, gradients: str) -> None:
    workload = with_test()
    trainer = Trainer(gradients=gradients)  # type: ignore[arg-type]
    record = CheckpointStudy(seeds=2, resume=False).run(workload, trainer, out=tmp_path / "s")
    best = record.trial(1).best()
    assert best.checkpoint is not None
    model = load_model(workload.build_model().double(), best.checkpoint)
    loss = evaluate(workload, model, split="test", batch_size=21, device=torch.device("cpu"), precision="float64")[0]
    rows = record.trial(1).evals.query(f"split == 'test' and metric == 'loss' and step == {best.step}")
    assert rows["value"].tolist() == [pytest.approx(loss.value, rel=1e-12)]
    assert rows["num_examples"].tolist() == [21]


def test_data_in_their_own_order_have_no_index_to_take_a_part_by(tmp_path: Path) -> None:
    """torch's iterable datasets have a `__getitem__`, which raises."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    data = Stream(x, x.sum(1))
    workload = small_workload(train_data=data, validation_data=data)
    record = CheckpointStudy(seeds=1, evaluations=8).run(workload, out=tmp_path / "s")
    assert diagnose_checkpoints(record)["checkpoints.resume_jump"].status == "ok"


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no split 'test'; it has train, validation"):
        Trainer(evaluate_also=("test",)).run(small_workload(), out=tmp_path / "s")


@pytest.mark.parametrize(("field", "value"), [("seeds", 0), ("evaluations", 3), ("seeds", True), ("evaluations", 2.5)])
def test_fields_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}="):
        CheckpointStudy(**{field: value})  # type: ignore[arg-type]
