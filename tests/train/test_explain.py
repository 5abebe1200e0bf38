"""Errors of a person's own code: the workload, the place and what to do are named; the original is the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, DataError, WorkbenchError, WorkloadError
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
