"""Update rules: golden trajectories of the source's formulas, and torch's own optimizers as twins (F7)."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.config import OPTIMIZERS, TrainConfig
from workbench.train.update_rules import RULES, UpdateRule

GOLDEN = {
    ("sgd", "playbook", 1e-8): (0.900000000000, 0.810000000000, 0.769500000000),
    ("momentum", "playbook", 1e-8): (0.900000000000, 0.720000000000, 0.603000000000),
    ("nesterov", "playbook", 1e-8): (0.810000000000, 0.575100000000, 0.451210500000),
    ("rmsprop", "playbook", 1e-2): (0.900496280979, 0.720489404357, 0.521423100162),
    ("rmsprop", "torch", 1e-2): (0.693465699683, 0.235860880228, -0.001905280723),
    ("adam", "playbook", 1e-2): (0.924025307335, 0.843107540915, 0.801702918889),
    ("adam", "torch", 1e-2): (0.900990099010, 0.802432156283, 0.753550708999),
    ("adam", "playbook", 1e-8): (0.900000031623, 0.800412282526, 0.750999314131),
    ("adam", "torch", 1e-8): (0.900000001000, 0.800412229712, 0.750999252108),
    ("nadam", "playbook", 1e-8): (0.810000060083, 0.674130053912, 0.615479654353),
    ("nadam", "torch", 1e-8): (0.894354823221, 0.819973071532, 0.786351169574),
}
"""f = theta^2 / 2 from theta = 1 with lr 0.1, 0.1, 0.05; gamma = rho = beta1 = 0.9, beta2 = 0.999."""


def config(**changes: object) -> TrainConfig:
    return TrainConfig.from_dict({"peak_lr": 0.1, "total_steps": 100, "batch_size": 1} | changes)


def follow(rule: UpdateRule, lrs: list[float], theta: torch.Tensor) -> list[torch.Tensor]:
    path = []
    for step, lr in enumerate(lrs):
        theta = theta - rule.update(theta, theta.clone(), torch.full((theta.shape[0], 1), lr, dtype=theta.dtype), step)
        path.append(theta)
    return path


@pytest.mark.parametrize(("name", "form", "eps"), GOLDEN)
def test_golden_trajectory(name: str, form: str, eps: float) -> None:
    theta = torch.ones(1, 1, dtype=torch.float64)
    path = follow(UpdateRule([config(optimizer=name, rules=form, eps=eps)], theta), [0.1, 0.1, 0.05], theta)
    assert [float(t) for t in path] == pytest.approx(GOLDEN[name, form, eps], abs=1e-11)


def test_every_rule_has_a_golden_trajectory_but_adamw() -> None:
    assert {key for key in RULES if key[0] != "adamw"} == {key[:2] for key in GOLDEN}
    assert {name for name, _ in RULES} == set(OPTIMIZERS)


TWINS = {
    "sgd": lambda p, c: torch.optim.SGD(p, lr=c.peak_lr, weight_decay=c.weight_decay),
    "momentum": lambda p, c: torch.optim.SGD(p, lr=c.peak_lr, momentum=0.9, weight_decay=c.weight_decay),
    "nesterov": lambda p, c: torch.optim.SGD(p, lr=c.peak_lr, momentum=0.9, nesterov=True, weight_decay=c.weight_decay),
    "rmsprop": lambda p, c: torch.optim.RMSprop(
        p, lr=c.peak_lr, alpha=0.9, momentum=0.9, eps=c.eps, weight_decay=c.weight_decay
    ),
    "adam": lambda p, c: torch.optim.Adam(p, lr=c.peak_lr, eps=c.eps, weight_decay=c.weight_decay),
    "nadam": lambda p, c: torch.optim.NAdam(p, lr=c.peak_lr, eps=c.eps, weight_decay=c.weight_decay),
    "adamw": lambda p, c: torch.optim.AdamW(p, lr=c.peak_lr, eps=c.eps, weight_decay=c.weight_decay),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_form_equals_torch_over_100_steps_with_a_changing_lr(name: str, weight_decay: float) -> None:
    c = config(optimizer=name, weight_decay=weight_decay, peak_lr=1e-2)
    torch.manual_seed(0)
    start = torch.randn(1, 7, dtype=torch.float64)
    curvature = torch.linspace(0.1, 2.0, 7, dtype=torch.float64)
    twin = torch.nn.Parameter(start[0].clone())
    optimizer = TWINS[name]([twin], c)
    rule, theta = UpdateRule([c], start), start.clone()
    for step in range(100):
        lr = 1e-2 * (step + 1) / 50 if step < 50 else 1e-2 * (1 - (step - 50) / 60)
        optimizer.param_groups[0]["lr"] = lr
        twin.grad = curvature * twin.detach() + math.sin(step)
        optimizer.step()
        grad = curvature * theta + math.sin(step)
        theta = theta - rule.update(theta, grad, torch.tensor([[lr]], dtype=torch.float64), step)
        torch.testing.assert_close(theta[0], twin.detach(), rtol=1e-6, atol=1e-9)


def test_playbook_rmsprop_keeps_moving_after_the_lr_drops_to_zero() -> None:
    """The lr sits inside the momentum buffer there, outside of it in torch (F7, difference c)."""
    grad = torch.ones(1, 1, dtype=torch.float64)
    moved = {}
    for form in ("playbook", "torch"):
        rule = UpdateRule([config(optimizer="rmsprop", rules=form)], grad)
        for step in range(25):
            rule.update(grad, grad, torch.tensor([[0.1]], dtype=torch.float64), step)
        moved[form] = float(rule.update(grad, grad, torch.zeros(1, 1, dtype=torch.float64), 25))
    assert moved["torch"] == 0.0
    assert moved["playbook"] == pytest.approx(0.835, abs=1e-3)
