"""The facts of an audit: of the model that would be trained, on its first batch, with the reason where there are none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.workloads import small_workload
from workbench.errors import WorkloadError
from workbench.topics.architecture.study import collect_architecture
from workbench.train.rng import capture_rng
from workbench.workloads.base import Workload

CPU = torch.device("cpu")


def workload_of(build_model: Callable[[], nn.Module]) -> Workload:
    return small_workload().replace(build_model=build_model)


def inputs() -> int:
    return int(small_workload().train_data[0][0].numel())


class Dropped(nn.Module):
    """A branch that is dropped as a whole in training, by chance."""

    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(inputs(), inputs()), nn.Linear(inputs(), 4)
        self.scale = nn.Parameter(torch.zeros(()) if zero else torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        kept = 0.0 if self.training else 1.0
        out: Tensor = self.head(x + kept * self.scale * self.one(x))
        return out


@pytest.mark.parametrize("zero", [True, False])
def test_a_branch_that_was_dropped_by_chance_does_not_begin_at_zero(zero: bool) -> None:
    workload = workload_of(lambda: Dropped(zero=zero))
    (join,) = collect_architecture(workload, workload.config, CPU)["joins"]
    assert (join["branch_rms"] == 0) == zero
    assert join["zero_parameters"] == (("scale",) if zero else ())


class Untraceable(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.one, self.error = nn.Linear(3, 4), error

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        torch.rand(1)
        raise self.error("cannot be told\nin one line")


def test_an_error_of_the_model_is_the_reason() -> None:
    workload = workload_of(lambda: Untraceable(RuntimeError))
    facts = collect_architecture(workload, workload.config, CPU)
    assert facts["reason"] == "the forward pass cannot be traced (RuntimeError: cannot be told)"


class Numpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(inputs(), 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(torch.from_numpy(x.flatten(1).numpy().copy()))
        return out


def test_a_way_past_the_tensors_is_told() -> None:
    workload = workload_of(Numpy)
    assert "by a way that is no operation on them" in collect_architecture(workload, workload.config, CPU)["reason"]


def test_norms_of_the_tree_that_did_not_run_are_named() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm = nn.Linear(inputs(), 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x.flatten(1))
            return out

    workload = workload_of(Forgotten)
    facts = collect_architecture(workload, workload.config, CPU)
    assert facts["norm_modules"] == ["norm"]
    assert facts["norms"] == []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_random_state_is_left_as_it_was(error: type[BaseException] | None) -> None:
    workload = small_workload() if error is None else workload_of(lambda: Untraceable(error))
    before = capture_rng()
    if error is None:
        collect_architecture(workload, workload.config, CPU)
    else:
        with pytest.raises(error):
            collect_architecture(workload, workload.config, CPU)
    after = capture_rng()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_that_cannot_be_built_is_an_error() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such layer")

    workload = workload_of(broken)
    with pytest.raises(WorkloadError, match="no such layer"):
        collect_architecture(workload, workload.config, CPU)
