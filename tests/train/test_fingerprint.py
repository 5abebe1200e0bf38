"""The fingerprint of a workload: equal for the same code and data, different when either changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_net, small_workload, squared
from workbench.errors import RecordError


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"build_model": lambda: nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))}, "parameters"),
        ({"loss": lambda outputs, batch: 2 * squared(outputs, batch)}, "first_loss"),
        (
            {"build_model": lambda: nn.Sequential(*list(small_net())[:1], nn.ReLU(), *list(small_net())[2:])},
            "first_loss",
        ),
        ({"validation_data": TensorDataset(torch.zeros(5, 3), torch.zeros(5))}, "examples"),
    ],
)
def test_another_model_loss_or_data_is_refused_in_the_same_folder(
    tmp_path: Path, changes: dict[str, object], key: str
) -> None:
    wb.Trainer().run(small_workload(), out=tmp_path / "s")
    before = (tmp_path / "s" / "study.json").read_bytes()
    with pytest.raises(RecordError, match=rf"has changed since .* was begun \({key}: .*Give a new folder"):
        wb.Trainer().run(small_workload(**changes), out=tmp_path / "s")
    assert (tmp_path / "s" / "study.json").read_bytes() == before
