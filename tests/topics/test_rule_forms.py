"""Where the two forms of a rule part: held to torch's own optimizers, and to what the formulas give by hand (F7)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.test_update_rules import TWINS
from workbench.config import OPTIMIZERS, TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.schedules import lr_values
from workbench.topics.optimizers.rule_forms import explain_rule

GRADIENTS = 1e-2 * np.cos(np.arange(60)) + 3e-3


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.from_dict({"peak_lr": 0.1, "total_steps": 60, "batch_size": 1} | changes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_form_is_torchs_with_the_configs_schedule(name: str) -> None:
    c = config(optimizer=name, schedule="cosine", warmup_steps=10, eps=1e-4, rho=0.97, beta2=0.99, momentum=0.8)
    theta = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, moved = TWINS[name]([theta], c), []
    for lr, gradient in zip(lr_values(c), GRADIENTS, strict=True):
        before = float(theta.detach())
        optimizer.param_groups[0]["lr"] = lr
        theta.grad = torch.full_like(theta, gradient)
        optimizer.step()
        moved.append(before - float(theta.detach()))
    assert explain_rule(c, gradients=GRADIENTS).torch == pytest.approx(moved, rel=1e-6, abs=1e-12)


def by_the_source(name: str, c: TrainConfig, lrs: np.ndarray) -> list[float]:
    """Updates of the playbook's form, as the source writes it, for `GRADIENTS`."""
    m, v, found = 0.0, 1.0 if name == "rmsprop" else 0.0, []
    for t, (lr, g) in enumerate(zip(lrs, GRADIENTS, strict=True), start=1):
        if name == "rmsprop":
            v = c.rho * v + (1 - c.rho) * g**2
            m = c.momentum * m + lr * g / math.sqrt(v + c.eps)
            found.append(m)
            continue
        m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g**2
        b = math.sqrt(1 - c.beta2**t) / (1 - c.beta1**t)
        top = c.beta1 * m + (1 - c.beta1) * g if name == "nadam" else m
        found.append(lr * top / (math.sqrt(v) + c.eps) * b)
    return found


@pytest.mark.parametrize("name", ["rmsprop", "adam", "nadam", "adamw"])
def test_the_playbooks_form_is_that_of_the_source_on_a_recorded_trace(name: str) -> None:
    c, trace = config(optimizer=name, eps=1e-4), np.linspace(0.0, 0.3, 60) ** 2
    assert explain_rule(c, lrs=trace, gradients=GRADIENTS).playbook == pytest.approx(
        by_the_source(name, c, trace), rel=1e-9
    )


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_three_rules_are_the_same_whatever_the_schedule(name: str) -> None:
    forms = explain_rule(config(optimizer=name, schedule="linear", warmup_steps=7), gradients=GRADIENTS)
    assert (forms.first_step, forms.first_ratio, forms.why, forms.material_steps) == (None, None, (), 0)
    assert forms.way_ratio == pytest.approx(1.0)
    assert "the same updates" in repr(forms)


@pytest.mark.parametrize(("gradient", "ratio"), [(1.0, 10.0), (1e-3, 9.95e3)])
def test_the_first_step_of_rmsprop_shows_the_start_of_v(gradient: float, ratio: float) -> None:
    """1 / sqrt((1 - rho) g^2) against 1 / sqrt(rho + (1 - rho) g^2), without momentum and eps."""
    forms = explain_rule(config(optimizer="rmsprop", rho=0.99, momentum=0.0, eps=1e-12), gradients=gradient)
    exact = math.sqrt(0.99 + 0.01 * gradient**2) / (0.1 * gradient)
    assert exact == pytest.approx(ratio, rel=1e-3)
    assert forms.first_step == 0
    assert forms.first_ratio == pytest.approx(exact, rel=1e-6)


def test_rmsprop_follows_a_changed_lr_at_once_in_torchs_form_only() -> None:
    """Constant gradient 1, lr 0.1 set to 0 after 25 steps: the buffer of the playbook's form moves on by 0.835."""
    lrs = np.where(np.arange(26) < 25, 0.1, 0.0)
    forms = explain_rule(config(optimizer="rmsprop"), lrs=lrs)
    assert forms.torch[25] == 0.0
    assert forms.playbook[25] == pytest.approx(0.835, abs=1e-3)


def test_eps_of_adam_is_larger_by_the_root_of_the_bias_correction() -> None:
    """playbook(eps) = torch(eps / sqrt(1 - beta2^t)), so with a constant gradient the ratio is a formula."""
    forms = explain_rule(config(optimizer="adam", eps=1e-2), gradients=1e-3)
    inflated = 1e-2 / np.sqrt(1 - 0.999 ** np.arange(1, 61))
    assert forms.torch / forms.playbook == pytest.approx((1e-3 + inflated) / (1e-3 + 1e-2), rel=1e-9)


def test_the_first_step_of_nadam_is_nearly_twice_as_long_in_the_playbooks_form() -> None:
    """1.9 lr against 1.056 lr with torch's momentum schedule."""
    forms = explain_rule(config(optimizer="nadam", eps=1e-12), gradients=1.0)
    assert (forms.playbook[0], forms.torch[0]) == pytest.approx((0.19, 0.1056), rel=1e-3)
    assert "times the playbook's at step 0" in repr(forms)


@pytest.mark.parametrize(("given", "said"), [
    ({"lrs": [0.1, 0.1], "gradients": [1.0, 1.0, 1.0]}, "lrs holds 2 steps and gradients 3"),
    ({"lrs": []}, "at least one step"), ({"gradients": [1.0] * 59 + [math.nan]}, "finite numbers"),
    ({"lrs": [0.1, math.inf]}, "finite numbers"),
])  # fmt: skip
def test_what_cannot_be_fed_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        explain_rule(config(optimizer="adam"), **given)
    with pytest.raises(ConfigError, match="one form only"):
        explain_rule(config(optimizer=torch.optim.Adam))
