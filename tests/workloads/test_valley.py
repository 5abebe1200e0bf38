"""The valley against its arithmetic: one factor a step, an edge at 2 / steepness, and no trace of the seed in the loss."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.errors import UsageError
from workbench.schedules import lr_values, prepend_warmup
from workbench.workloads.analytic import Valley, valley
from workbench.workloads.base import Workload


def descend(workload: Workload, lrs: list[float], *, seed: int = 0) -> list[float]:
    """Losses of gradient descent, by autograd."""
    torch.manual_seed(seed)
    model, losses = workload.build_model(), []
    for lr in lrs:
        loss = workload.loss(workload.forward(model, workload.train_data[:]), None).mean()
        losses.append(float(loss.detach()))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad)
    return losses


def arithmetic(
    lrs: list[float], *, steepness: float = 201.0, slow: float = 20.0, curvature: float = 0.1
) -> list[float]:
    wall, losses = 1.0, []
    for lr in lrs:
        losses.append(0.5 * wall**2 + 0.25 * (steepness - 1) * wall**4 + 0.5 * curvature * slow**2)
        wall *= 1 - lr * (1 + (steepness - 1) * wall**2)
        slow *= 1 - lr * curvature
    return losses


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("warmup", [0, 20])
def test_training_follows_the_arithmetic(warmup: int, seed: int) -> None:
    workload = valley()
    config = prepend_warmup(workload.config.replace(peak_lr=0.0995 if warmup else 0.0049), warmup)
    lrs = lr_values(config)[:100].tolist()
    assert descend(workload, lrs, seed=seed) == pytest.approx(arithmetic(lrs), rel=1e-9)


@pytest.mark.parametrize(("relative", "stable"), [(0.99, True), (1.01, False)])
def test_the_edge_at_the_start_is_two_over_the_steepness(relative: float, stable: bool) -> None:
    losses = descend(valley(steepness=50.0), [relative * 2 / 50.0] * 200)
    assert (math.isfinite(losses[-1]) and losses[-1] < losses[0]) == stable


def test_the_curvature_at_the_start_is_larger_along_the_wall_by_far() -> None:
    """Exact second derivatives: 1 + 3 (steepness - 1) along the wall, slow_curvature along the rest."""
    model = Valley(steepness=201.0, slow=20.0, slow_curvature=0.1)

    def loss(wall: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"wall": wall}, (torch.zeros(1, 1),)).sum()

    hessian = torch.autograd.functional.hessian(loss, torch.tensor(1.0, dtype=torch.float64))
    assert float(hessian) == pytest.approx(601.0)


@pytest.mark.parametrize("changes", [{"steepness": 1.0}, {"steepness": math.nan}, {"slow_curvature": -0.1}, {"slow_curvature": 2.0}])  # fmt: skip
def test_impossible_valleys_are_named(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        valley(**changes)
