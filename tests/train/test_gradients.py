"""The gradient of one update: weights are checked where they could go wrong, and read from the device only once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.workloads import small_workload
from workbench.errors import WorkloadError
from workbench.train import gradients
from workbench.train.batches import train_batches
from workbench.train.gradients import LoopGradients
from workbench.train.lane_stack import LaneStack
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

CPU = torch.device("cpu")
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "column": (lambda batch: torch.ones(len(batch[1]), 1), r"weights\(batch\) has shape \(8, 1\).*squeeze"),
    "scalar": (lambda batch: torch.tensor(1.0), r"weights\(batch\) has shape \(\)"),
    "float": (lambda batch: 1.0, r"weights\(batch\) returned float"),
    "zero": (lambda batch: 0 * batch[1], "gives 0 to all 8 examples of the first batch of the train split"),
    "negative": (lambda batch: -1 - batch[1].abs(), "finite and at least 0"),
    "nan": (lambda batch: batch[1] / 0 * 0, "finite and at least 0"),
}


def first_update(workload: Workload) -> tuple[LoopGradients, list[Any]]:
    stack = LaneStack(workload, [workload.config], CPU)
    return LoopGradients(workload, stack), [next(train_batches(workload, workload.config, CPU))]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_are_explained(case: str) -> None:
    weights, said = WRONG[case]
    compute, chunk = first_update(small_workload(weights=weights))
    with pytest.raises(WorkloadError, match=said):
        compute(chunk)


@pytest.mark.parametrize("case", WRONG)
def test_the_trainer_refuses_them(tmp_path: Path, case: str) -> None:
    with pytest.raises(WorkloadError, match=r"weights\(batch\)"):
        Trainer().run(small_workload(weights=WRONG[case][0]), out=tmp_path / "run")


def test_one_micro_batch_may_weigh_nothing() -> None:
    workload = small_workload(weights=lambda batch: (torch.arange(2) == 7).double(), config={"accumulate_steps": 4})
    compute, chunk = first_update(workload)
    with pytest.raises(WorkloadError, match="gives 0 to all 8 examples"):
        compute(chunk)
    calls = iter([0.0, 0.0, 1.0, 0.0])
    workload = small_workload(weights=lambda batch: torch.full((2,), next(calls)), config={"accumulate_steps": 4})
    compute, chunk = first_update(workload)
    assert torch.isfinite(compute(chunk).loss)


def test_the_values_are_read_once_and_the_shape_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(gradients, "check_weights", lambda weights, **_: read.append(weights))
    late: list[int] = []

    def weights(batch: Any) -> Tensor:
        late.append(0)
        return torch.ones(8) if len(late) < 4 else torch.ones(8, 1)

    compute, chunk = first_update(small_workload(weights=weights))
    for _ in range(3):
        compute(chunk)
    assert len(read) == 1
    with pytest.raises(WorkloadError, match=r"has shape \(8, 1\)"):
        compute(chunk)
