"""Tracked predictions: what each evaluation says of the same few examples, for one trial and for lanes (P2.12)."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, UsageError
from workbench.record.read import TrialRecord, open_record
from workbench.record.write import StudyWriter
from workbench.train.checkpoint import load_model
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification, label_of, prediction_of
from workbench.workloads.subsets import periodic_subset

CLASSES = 4


def classes(examples: int = 23, **config: Any) -> Workload:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (64,), generator=generator)
    settings = {"precision": "float64", "total_steps": 12, "eval_every_steps": 4, "keep_best": 9, "eval_batch_size": 8}
    small = small_workload(config=settings | config)
    return classification(
        name="classes",
        build_model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        train_data=TensorDataset(x, y),
        validation_data=TensorDataset(x[:examples], y[:examples]),
        config=small.config,
    )


def expected(workload: Workload, record: TrialRecord, step: int, ids: list[int]) -> tuple[Any, Any, Any]:
    """What the checkpoint of that step says, by the formulas themselves."""
    model = load_model(workload.build_model().double(), record.folder / "checkpoints" / f"step-{step:08d}").eval()
    x, y = (t[ids] for t in workload.validation_data.tensors)
    with torch.no_grad():
        logits = model(x)
    losses = logits.logsumexp(1) - logits[torch.arange(len(ids)), y]
    return logits.max(1).indices.numpy(), y.numpy(), losses.numpy()


@pytest.mark.parametrize("gradients", ["loop", "vmap"])
def test_the_table_holds_what_each_checkpoint_says_lane_by_lane(tmp_path: Path, gradients: Any) -> None:
    workload, ids = classes(), [2, 7, 8, 22]  # 7 and 8 lie on two sides of a batch's border
    configs = [workload.config.replace(peak_lr=lr, total_steps=n) for lr, n in ((0.02, 12), (0.2, 8))]
    with closing(
        StudyWriter.open(tmp_path, kind="lanes", workload="classes", config=workload.config.to_dict())
    ) as study:
        Trainer(gradients=gradients, track=[22, 7, 2, 8]).run_trials(workload, configs, study, stage="lr_sweep")
    for number, last in ((0, 12), (1, 8)):
        record = TrialRecord(tmp_path, number)
        table = record.predictions
        assert list(table.columns) == ["trial", "step", "split", "example", "prediction", "label", "loss"]
        assert table.groupby("step")["example"].apply(list).to_dict() == dict.fromkeys(range(0, last + 1, 4), ids)
        for step, rows in table.groupby("step"):
            prediction, label, loss = expected(workload, record, int(step), ids)
            assert rows["prediction"].tolist() == prediction.tolist()
            assert rows["label"].tolist() == label.tolist()
            np.testing.assert_allclose(rows["loss"], loss, rtol=1e-9)
    alone = Trainer(gradients="loop", track=0).run(workload, configs[0], out=tmp_path / "alone")
    np.testing.assert_allclose(TrialRecord(tmp_path, 0).steps["loss"], alone.steps["loss"], rtol=1e-9)


def test_a_number_tracks_that_many_evenly_spaced_and_zero_none(tmp_path: Path) -> None:
    record = Trainer(track=4).run(classes(), out=tmp_path / "four")
    assert record.predictions["example"].unique().tolist() == [0, 5, 11, 17]
    assert Trainer(track=99).run(classes(), out=tmp_path / "all").predictions["example"].nunique() == 23
    none = Trainer(track=0).run(classes(), out=tmp_path / "none")
    assert none.predictions.empty
    assert list(none.predictions.columns) == list(record.predictions.columns)


@pytest.mark.parametrize("track", [-1, True, "3", 1.5, [1, "a"], None])
def test_what_is_no_number_and_no_list_of_ids_is_refused(track: Any) -> None:
    with pytest.raises(ConfigError, match=r"track=.* must be a number of examples"):
        Trainer(track=track)


def test_ids_of_a_subset_are_those_of_the_whole_split(tmp_path: Path) -> None:
    part = periodic_subset(classes(), [20, 3, 11])
    record = Trainer(track=[20, 3]).run(part, out=tmp_path / "study")
    last = record.predictions[record.predictions["step"] == 12].set_index("example")
    labels = classes().validation_data.tensors[1]
    assert sorted(last.index) == [3, 20]
    assert last["label"].to_dict() == {3: int(labels[3]), 20: int(labels[20])}
    with pytest.raises(
        UsageError, match=r"example 4, which is not evaluated.*part of a larger split, with ids 20, 3, 11"
    ):
        Trainer(track=[4]).run(part, out=tmp_path / "other")
    with pytest.raises(UsageError, match=r"example 23, which is not evaluated.*23 examples, with ids 0 to 22"):
        Trainer(track=[3, 23]).run(classes(), out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_resumed_trial_writes_each_evaluation_once(tmp_path: Path) -> None:
    whole = Trainer(gradients="loop").run(classes(), out=tmp_path / "whole").predictions
    workload = classes()
    study = StudyWriter.open(tmp_path / "cut", kind="trial", workload="classes", config=workload.config.to_dict())
    Trainer(gradients="loop").run_trials(workload, [workload.config], study, stage="trial")
    for late in sorted((study.path / "trials" / "0" / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(late)
    study.trial(workload.config.to_dict(), stage="trial", train_examples=64).event("ended", state="stopped")
    Trainer(gradients="loop").run_trials(workload, [workload.config], study, stage="trial")
    study.close()
    cut = open_record(tmp_path / "cut").predictions
    assert cut.drop(columns="loss").equals(whole.drop(columns="loss"))
    np.testing.assert_allclose(cut["loss"], whole["loss"])


class Plain:
    """A loss that knows nothing of targets."""


@pytest.mark.parametrize(
    ("outputs", "labels", "said"),
    [
        (torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([0, 0]), [1, 0]),
        (torch.tensor([[0.1], [0.8]]), torch.tensor([0.0, 1.0]), [0.1, 0.8]),
        (torch.tensor([[0.1], [0.8]]), torch.tensor([0, 1]), [0.1, 0.8]),
        (torch.tensor([0.1, 0.8]), torch.tensor([0.0, 1.0]), [0.1, 0.8]),
        (torch.tensor([[[1.0, 0, 5], [2, 0, 0]]]), torch.tensor([[1, 1, 0]]), [[1, 0, 0]]),  # classes on axis 1
        (torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.zeros(2, 2), [[0.1, 0.9], [0.8, 0.2]]),
    ],
)
def test_what_counts_as_a_prediction(outputs: Tensor, labels: Tensor, said: Any) -> None:
    known = label_of(Plain(), (None, labels), len(outputs))
    for rows in (None, [len(outputs) - 1]):
        found = prediction_of(outputs, known, len(outputs), rows)
        assert found is not None
        np.testing.assert_allclose(found.numpy(), np.array(said if rows is None else said[-1:]), rtol=1e-6)
