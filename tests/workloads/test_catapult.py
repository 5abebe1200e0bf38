"""The catapult against exact formulas: its curvature, and two recursions that replace the whole network."""

import itertools
import math
from typing import Any

import pytest
import torch

from workbench.errors import UsageError
from workbench.workloads.analytic import Catapult, catapult
from workbench.workloads.base import Workload


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


@pytest.mark.parametrize(("curvature", "output"), [(1.0, 1.0), (1.0, 0.0), (4.0, -2.0), (0.5, 1.7)])
@pytest.mark.parametrize("seed", [0, 1])
def test_initial_output_and_curvature_are_exact(curvature: float, output: float, seed: int) -> None:
    torch.manual_seed(seed)
    workload = catapult(width=50, curvature=curvature, output=output)
    model = workload.build_model()
    assert isinstance(model, Catapult)
    assert float(workload.forward(model, workload.train_data[:])[0].detach()) == pytest.approx(output, abs=1e-12)
    assert float((model.u.square().sum() + model.v.square().sum()).detach()) / 50 == pytest.approx(curvature)


@pytest.mark.parametrize(("curvature", "output"), [(1.0, 1.0), (1.0, 0.0), (4.0, -2.0)])
def test_largest_hessian_eigenvalue_is_the_exact_formula(curvature: float, output: float) -> None:
    width = 20
    torch.manual_seed(0)
    model = Catapult(width=width, curvature=curvature, output=output)

    def loss(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((u * v).sum() / math.sqrt(width)) ** 2

    (uu, uv), (vu, vv) = torch.autograd.functional.hessian(loss, (model.u.detach(), model.v.detach()))
    hessian = torch.cat([torch.cat([uu, uv], 1), torch.cat([vu, vv], 1)])
    largest = float(torch.linalg.eigvalsh(hessian)[-1])
    # H = g g' + f/sqrt(n) swap; on the plane of g's symmetric and antisymmetric part: trace c, determinant -3 f^2/n
    assert largest == pytest.approx((curvature + math.sqrt(curvature**2 + 12 * output**2 / width)) / 2, rel=1e-9)
    if output == 0:
        assert largest == pytest.approx(curvature)


@pytest.mark.parametrize("lr", [1.0, 2.5, 3.5])
def test_training_follows_the_recursion(lr: float) -> None:
    expected = recursion(lr=lr, width=1000, curvature=1.0, output=1.0, steps=60)
    measured = simulate(catapult(peak_lr=lr), 60)
    for row, (f, c) in zip(measured, expected, strict=True):
        assert row == pytest.approx((f, c), rel=1e-6, abs=1e-9)


def test_below_two_the_loss_only_falls() -> None:
    sizes = [abs(f) for f, _ in simulate(catapult(peak_lr=1.8), 30)]
    assert all(later < earlier for earlier, later in itertools.pairwise(sizes))


def test_between_two_and_four_it_rises_and_settles_where_it_is_flatter() -> None:
    workload = catapult()
    rows = simulate(workload, workload.config.total_steps)
    sizes = [abs(f) for f, _ in rows]
    assert max(sizes) > 3 * sizes[0]
    assert sizes[-1] < 1e-6
    assert workload.config.peak_lr * rows[0][1] == pytest.approx(2.5)
    assert workload.config.peak_lr * rows[-1][1] < 2


def test_above_four_it_diverges() -> None:
    assert not math.isfinite(simulate(catapult(peak_lr=4.5), 100)[-1][0])


@pytest.mark.parametrize("changes", [{"width": 1}, {"curvature": 0.0}, {"output": 16.0}, {"output": float("nan")}])
def test_impossible_starts_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        catapult(**changes)
