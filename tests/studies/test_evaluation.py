"""`EvaluationStudy`: a proxy beside the whole split, memory, and a pause that moves nothing (P2.4, P2.7, P2.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, UsageError
from workbench.plots.style import why_not_measured
from workbench.record.read import StudyRecord
from workbench.topics.evaluation.diagnose import diagnose_evaluation
from workbench.topics.evaluation.figures import plot_evaluation, plot_timed_evaluations
from workbench.topics.evaluation.study import EvaluationStudy
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload


def workload() -> Workload:
    """Learns sin of a sum; the last four of its 60 validation examples have the sign of their labels wrong."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(160, 3, generator=generator)
    y = torch.sin(x.sum(1)) + 0.05 * torch.randn(160, generator=generator)
    y[156:] = -torch.sin(x[156:].sum(1))
    return small_workload(
        train_data=TensorDataset(x[:100], y[:100]),
        validation_data=TensorDataset(x[100:], y[100:]),
        test_data=TensorDataset(x[:30], y[:30]),
        config={"peak_lr": 0.01, "momentum": 0.5, "total_steps": 120, "batch_size": 16},
    )


def ran(tmp_path: Path, **fields: Any) -> StudyRecord:
    return EvaluationStudy(**{"evaluations": 12} | fields).run(workload(), Trainer(track=2), out=tmp_path / "study")


def test_a_random_proxy_ranks_checkpoints_as_the_whole_split_does(tmp_path: Path) -> None:
    record = ran(tmp_path, examples=40, evaluations=24, pause_s=0.05)
    found = diagnose_evaluation(record)
    assert [f.status for f in found] == ["ok"] * 5, found
    assert found["evaluation.bad_proxy"].evidence["checkpoints"] == 25
    assert "(40 of 60 examples)" in found["evaluation.bad_proxy"].summary
    counts = record.evals[record.evals["metric"] == "loss"].groupby(["setting", "split", "num_examples"]).size()
    assert counts.to_dict() == {
        ("offline", "test", 30): 25,
        ("offline", "validation", 60): 25,
        ("periodic", "validation", 40): 50,
    }
    assert record.facts["subset"]["size"] == 40
    assert record.facts["memory"]["training_bytes_per_example"] > 0
    one, held_up = (
        record.evals[(record.evals["trial"] == n) & (record.evals["setting"] == "periodic")] for n in (0, 1)
    )
    assert one["step"].tolist() == held_up["step"].tolist()
    assert one["value"].tolist() == held_up["value"].tolist()
    assert record.steps["step_time_s"].max() > 0.05
    for draw in (plot_evaluation, plot_timed_evaluations):
        assert why_not_measured(draw(record)) is None


def test_a_proxy_of_wrong_labels_is_flagged(tmp_path: Path) -> None:
    found = diagnose_evaluation(ran(tmp_path, examples=[56, 57, 58, 59]))["evaluation.bad_proxy"]
    assert found.status == "warn"
    assert found.value < 0
    assert found.evidence["regret"] > 0


def test_too_few_checkpoints_say_nothing_and_the_whole_split_is_its_own_proxy(tmp_path: Path) -> None:
    few = diagnose_evaluation(ran(tmp_path / "few", examples=4, evaluations=3, steps=12))
    assert few["evaluation.bad_proxy"].status == "not_measured"
    assert few["evaluation.interval"].status == "warn"
    whole = ran(tmp_path / "whole", examples=None, steps=24)
    found = diagnose_evaluation(whole)["evaluation.bad_proxy"]
    assert found.value == pytest.approx(1.0)
    assert (whole.evals["subset"] == "").all()


def test_the_same_call_again_adds_nothing(tmp_path: Path) -> None:
    first, again = (ran(tmp_path, examples=8, steps=24) for _ in range(2))
    assert first.evals.equals(again.evals)


@pytest.mark.parametrize("field", [{"evaluations": 0}, {"seeds": True}, {"pause_s": -1}, {"pause_s": float("nan")}])
def test_fields_out_of_range_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(field))}="):
        EvaluationStudy(**field)


@pytest.mark.parametrize("examples", ["a", 0, ["x"]])
def test_examples_that_are_none_are_refused_before_anything_is_trained(examples: Any) -> None:
    with pytest.raises(UsageError, match=r"examples(=|\[)"):
        EvaluationStudy(examples=examples)


def test_an_example_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="examples holds 60"):
        ran(tmp_path, examples=[60])
