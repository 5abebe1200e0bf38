"""The study of batch sizes: which trials it asks for, on a small network, and that it tunes what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.streams import Stream
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, UsageError
from workbench.record.read import StudyRecord
from workbench.topics.batch_size.arms import read_arms
from workbench.topics.batch_size.diagnose import diagnose_batch_size
from workbench.topics.batch_size.study import BatchSizeStudy
from workbench.train.trainer import Trainer

FAST = {"finalists": 1, "choosing_seeds": 2, "seeds": 2, "reach": 2, "memories": (0.5,), "weight_decays": (1e-2,)}


def run(out: Path, **settings: Any) -> StudyRecord:
    workload = small_workload(examples=96)
    config = workload.config.replace(optimizer="momentum", total_steps=40, batch_size=16, peak_lr=0.05, warmup_steps=8)
    return BatchSizeStudy(**settings).run(workload.replace(config=config), Trainer(device="cpu"), out=out)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    return run(tmp_path_factory.mktemp("batch_size") / "s", batch_sizes=[8, 32], **FAST)


def test_equal_steps_and_equal_examples_side_by_side(record: StudyRecord) -> None:
    """F6.7: the same number of updates, and the same number of examples."""
    found = {(arm.batch_size, arm.total_steps) for arm in read_arms(record)}
    assert found == {(16, 40), (8, 40), (8, 80), (32, 40), (32, 20)}
    shares = {row["warmup_steps"] / row["total_steps"] for row in record.trials.to_dict("records")}
    assert shares == {0.2}, "a warmup keeps its share of the run"


def test_lr_and_momentum_are_tuned_for_each(record: StudyRecord) -> None:
    for arm in read_arms(record):
        assert {p.memory for p in arm.points} == {0.9, 0.5}
        assert all(len({p.lr for p in arm.points if p.memory == m}) >= 3 for m in (0.9, 0.5))
        centred = [p.lr for p in arm.points if p.memory == 0.5]
        assert any(lr == pytest.approx(0.05 * 0.5 / 0.1) for lr in centred), "the grid keeps lr / (1 - momentum)"
        assert sorted(arm.fixed) == sorted(arm.tuned) == [2, 3]
        assert arm.best is not None
        assert arm.best.seeds == 2


def test_the_diagnosis_of_a_real_study(record: StudyRecord) -> None:
    found = diagnose_batch_size(record)
    assert all(f.status in ("ok", "warn") for f in found if f.code != "batch_size.equivalence"), found
    rows = record.facts["noise_scale"]
    assert rows[0]["step"] == 0
    assert len(rows) > 1
    decayed = record.trials[record.trials["weight_decay"] > 0]
    assert set(decayed["batch_size"]) == {8, 32}
    assert set(decayed["total_steps"]) == {40}


def test_the_same_call_again_trains_nothing(record: StudyRecord) -> None:
    again = run(record.path, batch_sizes=[8, 32], **FAST)
    assert len(again.trials) == len(record.trials)


def test_without_tuning_only_the_baseline_settings_are_trained(tmp_path: Path) -> None:
    found = run(tmp_path / "s", batch_sizes=[8], equal=("steps",), retune=False, **FAST)
    assert set(found.trials["peak_lr"]) == {0.05}
    assert diagnose_batch_size(found)["batch_size.tuned_directly"].status == "warn"


def test_by_default_a_quarter_and_four_times_as_far_as_the_data_reach(tmp_path: Path) -> None:
    found = run(tmp_path / "s", retune=False, equal=("examples",), seeds=1)
    sizes = set(found.trials["batch_size"])
    assert {4, 16} <= sizes <= {4, 16, 64}


def test_training_data_in_their_own_order_have_no_gap_and_no_error(tmp_path: Path) -> None:
    workload = small_workload(examples=96)
    workload = workload.replace(train_data=Stream(*workload.train_data.tensors))
    settings = {**FAST, "weight_decays": (), "reach": 1}
    record = BatchSizeStudy(batch_sizes=[4], equal=("steps",), **settings).run(workload, out=tmp_path / "s")
    assert "train_losses" not in record.facts
    assert diagnose_batch_size(record)["batch_size.regularisation"].status == "not_measured"


@pytest.mark.parametrize(("wrong", "match"), [
    ({"batch_sizes": [0]}, r"batch_sizes\[0\]=0"), ({"equal": "steps"}, "equal='steps'"), ({"equal": ("time",)}, "time"),
    ({"memories": [1.0]}, r"memories\[0\]"), ({"lr_ratio": 1.0}, "lr_ratio"), ({"seeds": 0}, "seeds=0"),
    ({"finalists": True}, "finalists"), ({"weight_decays": (0.0,)}, r"weight_decays\[0\]"),
])  # fmt: skip
def test_arguments_out_of_range(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        BatchSizeStudy(**wrong)


@pytest.mark.parametrize("sizes", [[100_000], [16], []])
def test_batch_sizes_that_leave_nothing_to_compare(tmp_path: Path, sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="batch size"):
        run(tmp_path / "s", batch_sizes=sizes, **FAST)
