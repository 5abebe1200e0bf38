"""The options of the deep network against closed forms: what each block passes on at step 0, and the identity path of F2.8."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from workbench.errors import UsageError
from workbench.workloads.registry import load_workload
from workbench.workloads.sklearn_data import deep_residual

PLACEMENTS = ("none", "branch", "after_add", "pre")


def build(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return deep_residual(**options).build_model()


def features(model: Any, images: torch.Tensor) -> list[torch.Tensor]:
    """What the first layer returns, and each block after it."""
    seen = [model.stem(images)]
    for block in model.blocks:
        seen.append(block(seen[-1]))
    return seen


@pytest.mark.parametrize(("residual", "norm"), [(False, "none"), (False, "branch"), (False, "pre"), *product([True], PLACEMENTS)])  # fmt: skip
def test_a_block_is_the_formula_that_the_option_names(residual: bool, norm: Any) -> None:
    block = build(depth=1, residual=residual, norm=norm).blocks[0]
    x = 3 * torch.randn(5, 32) + 1
    normalise = lambda h: F.layer_norm(h, (32,))  # noqa: E731
    before = normalise(x) if norm == "pre" else x
    branch = torch.relu(before @ block.inner.weight.T) @ block.outer.weight.T
    branch = normalise(branch) if norm == "branch" else branch
    expected = x + branch if residual else branch
    torch.testing.assert_close(block(x), normalise(expected) if norm == "after_add" else expected)


@pytest.mark.parametrize(
    ("options", "variance"),
    [
        ({"residual": False}, lambda depth: 1.0),
        ({}, lambda depth: 2.0**depth),
        ({"norm": "branch"}, lambda depth: 1.0 + depth),
        ({"norm": "pre"}, lambda depth: 1.0 + depth),
        ({"norm": "after_add"}, lambda depth: 1.0),
    ],
)
def test_the_variance_after_each_block_is_the_one_of_the_docstring(options: dict[str, Any], variance: Any) -> None:
    torch.manual_seed(1)
    seen = features(build(depth=6, width=2048, **options), torch.randn(64, 64))
    for depth in (1, 3, 6):
        assert float(seen[depth].var().detach()) == pytest.approx(variance(depth), rel=0.25)


@pytest.mark.parametrize("norm", PLACEMENTS)
def test_branches_of_zero_leave_the_identity_path(norm: Any) -> None:
    """F2.8: at step 0 the network is its first layer and its classifier, with the norms that lie on the way."""
    model = build(depth=4, norm=norm, zero_init=True)
    images = torch.randn(7, 64)
    first = model.stem(images)
    expected = first
    for _ in range(4 if norm == "after_add" else norm == "pre"):
        expected = F.layer_norm(expected, (32,))
    logits = model(images)
    if norm in ("none", "branch"):
        assert torch.equal(logits, model.classifier(first))
    torch.testing.assert_close(logits, model.classifier(expected))


def test_without_zero_init_it_is_not_the_identity_path() -> None:
    model, images = build(depth=4, norm="branch"), torch.randn(7, 64)
    assert not torch.allclose(model(images), model.classifier(model.stem(images)), rtol=0.1)


@pytest.mark.parametrize("norm", PLACEMENTS)
def test_a_branch_of_zero_learns(norm: Any) -> None:
    """What ends the branch gets a gradient in the first step, and everything in it after one update."""
    workload = deep_residual(depth=3, norm=norm, zero_init=True)
    torch.manual_seed(0)
    model = workload.build_model()
    batch = workload.train_data[:32]
    for _ in range(2):
        model.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        ends = [block.norm.weight if norm == "branch" else block.outer.weight for block in model.blocks]
        assert all(bool(end.grad.any()) for end in ends)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    assert all(bool(block.inner.weight.grad.any()) for block in model.blocks)


@pytest.mark.parametrize(("residual", "scale"), [(False, 10.0), (True, 2.0)])
def test_init_scale_multiplies_every_weight_matrix(residual: bool, scale: float) -> None:
    usual = build(depth=2, residual=residual).state_dict()
    scaled = build(depth=2, residual=residual, init_scale=scale).state_dict()
    for name, value in scaled.items():
        torch.testing.assert_close(value, scale * usual[name])


def test_an_mlp_with_weights_ten_times_too_large_is_confidently_wrong() -> None:
    """Its logits are 10 to the number of weight layers times as large; the healthy one starts at chance."""
    workload = deep_residual(depth=1, residual=False, init_scale=10.0)
    torch.manual_seed(0)
    batch = workload.train_data[:64]
    losses = [
        float(w.loss(w.forward(w.build_model(), batch), batch).mean().detach())
        for w in (workload, deep_residual(depth=1, residual=False))
    ]
    assert losses[0] > 100 * math.log(10)
    assert losses[1] == pytest.approx(math.log(10), rel=0.05)


def test_names_tell_the_variants_apart() -> None:
    assert deep_residual().name == load_workload("deep_residual").name == "deep_residual"
    assert deep_residual(depth=24, norm="after_add").name == "deep_residual_depth24_after_add"
    assert deep_residual(residual=False, init_scale=10.0).name == "deep_residual_plain_scale10"
    assert deep_residual(norm="branch", zero_init=True, width=16).name == "deep_residual_width16_branch_zero"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 0}, "depth=0 must be an integer of at least 1"),
        ({"width": 2.5}, "width=2.5 must be an integer"),
        ({"depth": True}, "depth=True"),
        ({"norm": "post"}, "norm='post' is not known.*Allowed: after_add, branch, none, pre"),
        ({"init_scale": 0.0}, "init_scale=0.0 must be a finite number above 0"),
        ({"init_scale": math.nan}, "init_scale=nan"),
        ({"residual": False, "zero_init": True}, "zero_init=True needs residual=True"),
        ({"residual": False, "norm": "after_add"}, "norm='after_add' needs residual=True"),
    ],
)
def test_options_that_make_no_network_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deep_residual(**options)
