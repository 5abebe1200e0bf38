"""The oracle against its closed form."""

from typing import Any

import pytest
import torch

from workbench.errors import UsageError
from workbench.workloads.analytic import eigenvalues, quadratic
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


def test_gradient_is_curvature_times_distance() -> None:
    workload, theta = quadratic(noise=0.5), torch.randn(50).double().requires_grad_()
    (gradient,) = torch.autograd.grad(mean_loss(workload, theta), theta)
    torch.testing.assert_close(gradient, eigenvalues() * theta)


def test_without_noise_all_examples_are_equal_and_make_one_batch() -> None:
    workload = quadratic()
    assert len(workload.train_data) == workload.config.batch_size == 2
    losses = workload.loss(workload.forward(workload.build_model(), workload.train_data[:]), None)
    assert losses[0] == losses[1] > 0
    assert losses.dtype == torch.float64


@pytest.mark.parametrize("loss_scale", [1.0, 100.0])
def test_noise_is_the_deviation_of_one_examples_gradient(loss_scale: float) -> None:
    workload = quadratic(dimension=4, noise=0.7, loss_scale=loss_scale)
    theta = torch.randn(4).double()
    rows = workload.train_data.tensors[0]
    gradients = eigenvalues(dimension=4, loss_scale=loss_scale) * (theta - rows)
    torch.testing.assert_close(
        gradients.std(0, correction=0) / loss_scale, torch.full((4,), 0.7, dtype=torch.float64), rtol=1e-9, atol=0
    )
    outputs = torch.func.functional_call(workload.build_model(), {"theta": theta}, (rows[:3],))
    per_example = torch.autograd.functional.jacobian(
        lambda t: workload.loss(torch.func.functional_call(workload.build_model(), {"theta": t}, (rows[:3],)), None),
        theta,
    )
    torch.testing.assert_close(per_example, gradients[:3])
    assert outputs.shape == (3, 4)


def test_noise_depends_on_the_seed_alone() -> None:
    first, again, other = (quadratic(noise=1.0, seed=seed).train_data.tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_gradient_descent_follows_the_closed_form() -> None:
    workload = quadratic(peak_lr=1.5)
    start, end = train(workload, 100)
    torch.testing.assert_close(end, start * (1 - 1.5 * eigenvalues()) ** 100)


@pytest.mark.parametrize(("relative_lr", "stable"), [(0.98, True), (1.02, False)])
def test_the_edge_of_gradient_descent_is_two_over_the_largest_eigenvalue(relative_lr: float, stable: bool) -> None:
    workload = quadratic(loss_scale=7.0, peak_lr=relative_lr * 2 / 7.0)
    start, end = train(workload, 300)
    assert bool(mean_loss(workload, end) < mean_loss(workload, start)) is stable


def test_defaults_of_the_config_follow_the_rule() -> None:
    assert quadratic(loss_scale=10.0).config.peak_lr == pytest.approx(0.1)
    assert quadratic(optimizer="adam").config.peak_lr == pytest.approx(0.01)
    assert quadratic(noise=1.0).config.batch_size == 32
    assert quadratic(num_examples=6).config.batch_size == 6
    assert quadratic(peak_lr=0.3, total_steps=7, batch_size=1).config.total_steps == 7


@pytest.mark.parametrize(
    "changes", [{"dimension": 0}, {"condition": 0.5}, {"loss_scale": 0.0}, {"noise": -1.0}, {"num_examples": 0}]
)
def test_numbers_out_of_range_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        quadratic(**changes)


def test_zero_is_not_taken_for_the_default() -> None:
    with pytest.raises(UsageError, match="peak_lr"):
        quadratic(peak_lr=0.0)
    with pytest.raises(UsageError, match="batch_size"):
        quadratic(batch_size=0)


def test_one_dimension_has_the_largest_eigenvalue() -> None:
    assert eigenvalues(dimension=1, loss_scale=3.0).tolist() == [3.0]
