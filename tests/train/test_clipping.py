"""The clipping rule of F4.6, against its formula and torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.train.clipping import clip_by_norm, global_norm


def test_norm_is_that_of_the_concatenated_gradient() -> None:
    parts = [torch.randn(3, 4), torch.randn(5)]
    flat = torch.cat([p.reshape(-1) for p in parts]).unsqueeze(0)
    expected = math.sqrt(sum(float((p**2).sum()) for p in parts))
    assert float(global_norm(flat)) == pytest.approx(expected, rel=1e-6)


def test_a_long_gradient_gets_the_threshold_as_norm_and_keeps_its_direction() -> None:
    grad = torch.tensor([[3.0, 4.0]])
    clipped, was = clip_by_norm(grad, global_norm(grad), 2.0)
    assert bool(was)
    assert float(global_norm(clipped)) == pytest.approx(2.0, rel=1e-6)
    torch.testing.assert_close(clipped / 2.0, grad / 5.0)


@pytest.mark.parametrize("threshold", [5.0, 7.0])
def test_a_gradient_up_to_the_threshold_is_untouched(threshold: float) -> None:
    grad = torch.tensor([[3.0, 4.0]])
    clipped, was = clip_by_norm(grad, global_norm(grad), threshold)
    assert not bool(was)
    assert torch.equal(clipped, grad)


def test_differs_from_torch_by_its_1e_6() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3e-3, 4e-3])
    torch.nn.utils.clip_grad_norm_([parameter], 1e-3)
    grad = torch.tensor([[3e-3, 4e-3]])
    ours, _ = clip_by_norm(grad, global_norm(grad), 1e-3)
    difference = float((ours[0] - parameter.grad).norm() / ours.norm())
    assert difference == pytest.approx(1e-6 / 5e-3, rel=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_stays_visible(bad: float) -> None:
    grad = torch.tensor([[bad, 1.0], [3.0, 4.0]])
    clipped, was = clip_by_norm(grad, global_norm(grad), 1.0)
    assert was.tolist() == [False, True]
    assert not torch.isfinite(clipped[0]).all()
    assert float(clipped[1].norm()) == pytest.approx(1.0, rel=1e-6)


def test_lanes_have_thresholds_of_their_own() -> None:
    grad = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    clipped, was = clip_by_norm(grad, global_norm(grad), torch.tensor([1.0, 10.0]))
    assert was.tolist() == [True, False]
    assert clipped.norm(dim=1).tolist() == pytest.approx([1.0, 5.0], rel=1e-6)
