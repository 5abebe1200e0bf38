"""Plain autograd: weights are checked where they could go wrong, and read from the device only once."""

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


def first_update(workload: Workload) -> tuple[LoopGradients, list[Any]]:
    stack = LaneStack(workload, [workload.config], CPU)
    return LoopGradients(workload, stack), [next(train_batches(workload, workload.config, CPU))]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda batch: torch.ones(len(batch[1]), 1), r"weights\(batch\) has shape \(8, 1\).*squeeze"),
        (lambda batch: torch.tensor(1.0), r"weights\(batch\) has shape \(\)"),
        (lambda batch: 1.0, r"weights\(batch\) returned float"),
        (lambda batch: 0 * batch[1], "weights.batch. gives 0 to all 8 examples of the first batch of the train split"),
        (lambda batch: -1 - batch[1].abs(), r"weights\(batch\).*finite and at least 0"),
        (lambda batch: batch[1] / 0 * 0, r"weights\(batch\).*finite and at least 0"),
    ],
)
def test_wrong_weights_are_explained(tmp_path: Path, weights: Callable[[Any], Any], said: str) -> None:
    compute, chunk = first_update(small_workload(weights=weights))
    with pytest.raises(WorkloadError, match=said):
        compute(chunk)
    with pytest.raises(WorkloadError, match=r"weights\(batch\)"):
        Trainer().run(small_workload(weights=weights), out=tmp_path / "run")


def test_weighted_loss_gradient_and_error_in_micro_batches() -> None:
    weights = lambda batch: batch[1].abs()  # noqa: E731
    whole, chunk = first_update(small_workload(weights=weights, config={"accumulate_steps": 4}))
    found = whole(chunk)
    stack = whole._stack
    x, y = (torch.cat([batch[k] for batch, _ in chunk[0]]) for k in (0, 1))
    losses, w = (stack.models[0](x).squeeze(-1) - y) ** 2, y.abs()
    mean = (w * losses).sum() / w.sum()
    torch.testing.assert_close(found.loss[0], mean.detach())
    spread = ((w * (losses - mean)) ** 2).sum() / w.sum() ** 2 * (8 / 7)
    torch.testing.assert_close(found.squared_se[0], spread.detach())
    grads = torch.autograd.grad(mean, stack.parameters[0])
    torch.testing.assert_close(stack.grad[0], torch.cat([g.reshape(-1) for g in grads]))


def test_values_are_read_once_and_one_micro_batch_may_weigh_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(gradients, "check_weights", lambda weights, **_: read.append(weights))
    given = iter([0.0, 0.0, 1.0, 0.0, *[1.0] * 8])
    late: list[int] = []

    def weights(batch: Any) -> Tensor:
        late.append(0)
        return torch.full((2,), next(given)) if len(late) <= 12 else torch.ones(2, 1)

    compute, chunk = first_update(small_workload(weights=weights, config={"accumulate_steps": 4}))
    assert all(torch.isfinite(compute(chunk).loss) for _ in range(3))
    assert len(read) == 1
    with pytest.raises(WorkloadError, match=r"has shape \(2, 1\)"):
        compute(chunk)
