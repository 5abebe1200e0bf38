"""The workloads whose answer is known, against their closed forms and exact recursions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workbench.errors import UsageError
from workbench.schedules import lr_values, prepend_warmup
from workbench.workloads.analytic import Catapult, catapult, eigenvalues, quadratic, valley
from workbench.workloads.base import Workload


def mean_loss(workload: Workload, theta: torch.Tensor) -> torch.Tensor:
    model = workload.build_model()
    outputs = torch.func.functional_call(model, {"theta": theta}, (workload.train_data.tensors[0],))
    return workload.loss(outputs, None).mean()


def train(workload: Workload, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full-batch gradient descent in a plain loop: theta at the start and at the end."""
    torch.manual_seed(0)
    start = workload.build_model().theta.detach()
    assert isinstance(start, torch.Tensor)
    theta = start.clone()
    for _ in range(steps):
        theta.requires_grad_()
        (gradient,) = torch.autograd.grad(mean_loss(workload, theta), theta)
        theta = (theta - workload.config.peak_lr * gradient).detach()
    return start, theta


@pytest.mark.parametrize("loss_scale", [1e-2, 1.0, 1e4])
@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_hessian_has_the_stated_eigenvalues(condition: float, loss_scale: float) -> None:
    workload = quadratic(dimension=5, condition=condition, loss_scale=loss_scale, noise=0.3, num_examples=64)
    hessian = torch.autograd.functional.hessian(lambda theta: mean_loss(workload, theta), torch.randn(5).double())
    measured = torch.linalg.eigvalsh(hessian)
    torch.testing.assert_close(measured, eigenvalues(dimension=5, condition=condition, loss_scale=loss_scale))
    assert float(measured[-1]) == pytest.approx(loss_scale)
    assert float(measured[-1] / measured[0]) == pytest.approx(condition)
    torch.testing.assert_close(measured[1:] / measured[:-1], torch.full((4,), condition**0.25).double())


def test_gradient_descent_follows_the_closed_form() -> None:
    workload = quadratic(peak_lr=1.5)
    start, end = train(workload, 100)
    torch.testing.assert_close(end, start * (1 - 1.5 * eigenvalues()) ** 100)


def recursion(*, lr: float, width: int, curvature: float, output: float, steps: int) -> list[tuple[float, float]]:
    """Output and curvature after each step of gradient descent, without the network (2003.02218, equation 4)."""
    rows = [(output, curvature)]
    for _ in range(steps):
        f, c = rows[-1]
        rows.append((f * (1 - lr * c + lr**2 * f**2 / width), c + lr * f**2 / width * (lr * c - 4)))
    return rows


def simulate(workload: Workload, steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = workload.build_model()
    assert isinstance(model, Catapult)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.config.peak_lr)
    batch = workload.train_data[:]
    rows = []
    for _ in range(steps + 1):
        outputs = workload.forward(model, batch)
        curvature = (model.u.square().sum() + model.v.square().sum()) / len(model.u)
        rows.append((float(outputs[0].detach()), float(curvature.detach())))
        optimizer.zero_grad()
        workload.loss(outputs, batch).mean().backward()
        optimizer.step()
    return rows


@pytest.mark.parametrize("lr", [1.0, 2.5, 3.5])
def test_training_follows_the_recursion(lr: float) -> None:
    expected = recursion(lr=lr, width=1000, curvature=1.0, output=1.0, steps=60)
    measured = simulate(catapult(peak_lr=lr), 60)
    for row, (f, c) in zip(measured, expected, strict=True):
        assert row == pytest.approx((f, c), rel=1e-6, abs=1e-9)


def test_between_two_and_four_it_rises_and_settles_where_it_is_flatter() -> None:
    workload = catapult()
    rows = simulate(workload, workload.config.total_steps)
    sizes = [abs(f) for f, _ in rows]
    assert max(sizes) > 3 * sizes[0]
    assert sizes[-1] < 1e-6
    assert workload.config.peak_lr * rows[0][1] == pytest.approx(2.5)
    assert workload.config.peak_lr * rows[-1][1] < 2


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


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (quadratic, {"dimension": 0}),
        (quadratic, {"condition": 0.5}),
        (quadratic, {"num_examples": 0}),
        (valley, {"steepness": math.nan}),
    ],
)
def test_numbers_out_of_range_are_named(make: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        make(**changes)


@pytest.mark.parametrize("loss_scale", [1.0, 100.0])
def test_noise_is_the_deviation_of_one_examples_gradient(loss_scale: float) -> None:
    workload, theta = quadratic(dimension=4, noise=0.7, loss_scale=loss_scale), torch.randn(4).double()
    gradients = eigenvalues(dimension=4, loss_scale=loss_scale) * (theta - workload.train_data.tensors[0])
    expected = torch.full((4,), 0.7, dtype=torch.float64)
    torch.testing.assert_close(gradients.std(0, correction=0) / loss_scale, expected, rtol=1e-9, atol=0)
