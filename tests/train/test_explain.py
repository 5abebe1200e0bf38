"""Errors of a person's own code: the workload, the place and what to do are named; code or data that changed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_net, small_workload, squared
from workbench.errors import ConfigError, DataError, RecordError, WorkbenchError, WorkloadError
from workbench.train.forward import explained
from workbench.train.trainer import Trainer


def raised(error: BaseException) -> BaseException:
    kind = WorkbenchError if isinstance(error, Exception) else type(error)
    with pytest.raises(kind) as caught, explained(small_workload(), "at step 3"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("mat1 and mat2"), r"^workload 'small', at step 3: .* RuntimeError: mat1 and mat2 \(test_explain\.py, line \d+: raise error\)\. Ch"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (64x5 and 7x3)"), r"A layer takes 7 features and is given 5: the last"),
        (KeyError("x"), "forward or loss raised KeyError: 'x'"),
        (ValueError(), "raised ValueError: no message"),
        (RuntimeError("CUDA out of memory. Tried\nmore"), r"memory\. Tried \(.*\)\. Take a smaller batch_size.*accumulate_steps"),
        (RuntimeError("element 0 of tensors does not require grad"), r"autograd\.grad .*requires_grad_\(\)"),
    ],
)  # fmt: skip
def test_a_foreign_error_is_explained_and_kept_as_the_cause(error: Exception, said: str) -> None:
    explanation = raised(error)
    assert type(explanation) is WorkloadError
    with pytest.raises(WorkloadError, match=said):
        raise explanation
    assert explanation.__cause__ is error


def test_an_error_of_this_package_gets_the_place_once() -> None:
    explanation = raised(DataError("target 4 is out of range"))
    assert type(explanation) is DataError
    assert str(explanation) == "workload 'small', at step 3: target 4 is out of range"
    assert str(raised(explanation)) == str(explanation)
    refused = ConfigError("k=3")
    assert raised(refused) is refused


def test_a_forward_that_fails_late_names_the_step(tmp_path: Path) -> None:
    calls: list[int] = []

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            calls.append(0)
        if len(calls) == 8:
            raise IndexError("planted")
        out: torch.Tensor = model(batch[0])
        return out

    with pytest.raises(
        WorkloadError, match=r"^workload 'small', at step 7: forward or loss raised IndexError: planted"
    ):
        Trainer(gradients="loop").run(small_workload(forward=forward), out=tmp_path / "run")


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
    Trainer().run(small_workload(), out=tmp_path / "s")
    before = (tmp_path / "s" / "study.json").read_bytes()
    with pytest.raises(RecordError, match=rf"has changed since .* was begun \({key}: .*Give a new folder"):
        Trainer().run(small_workload(**changes), out=tmp_path / "s")
    assert (tmp_path / "s" / "study.json").read_bytes() == before
