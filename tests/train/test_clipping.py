"""The clipping rule of F4.6, against its formula and torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.config import TrainConfig
from workbench.train.update_rules import clip_by_norm, clip_thresholds, global_norm


def config(**changes: object) -> TrainConfig:
    return TrainConfig.from_dict({"peak_lr": 0.1, "total_steps": 100, "batch_size": 1} | changes)


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


def test_lanes_clip_as_they_would_alone() -> None:
    torch.manual_seed(0)
    configs = [config(max_grad_norm=threshold) for threshold in (None, 0.1, 3.0, 1e6)]
    grad = torch.randn(4, 30)
    thresholds = clip_thresholds(configs, grad)
    assert thresholds is not None
    assert thresholds.tolist() == [math.inf, pytest.approx(0.1), 3.0, 1e6]
    assert thresholds.dtype == grad.dtype
    clipped, was = clip_by_norm(grad, global_norm(grad), thresholds)
    assert was.tolist() == [False, True, True, False]
    assert torch.equal(clipped[0], grad[0])
    for lane, threshold in ((1, 0.1), (2, 3.0), (3, 1e6)):
        own = grad[lane : lane + 1]
        assert torch.equal(clipped[lane : lane + 1], clip_by_norm(own, global_norm(own), threshold)[0])


def test_no_lane_clips() -> None:
    assert clip_thresholds([config(), config()], torch.zeros(2, 3)) is None


def test_an_infinite_threshold_leaves_even_an_infinite_gradient_alone() -> None:
    grad = torch.tensor([[math.inf, 1.0], [1e30, 1e30], [math.nan, 0.0]])
    clipped, was = clip_by_norm(grad, global_norm(grad), torch.full((3,), math.inf))
    assert was.tolist() == [False, False, False]
    torch.testing.assert_close(clipped, grad, rtol=0, atol=0, equal_nan=True)


def test_the_gradient_can_be_clipped_in_place() -> None:
    grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    expected, _ = clip_by_norm(grad, global_norm(grad), 1.0)
    assert grad.tolist() == torch.tensor([[3.0, 4.0], [0.3, 0.4]]).tolist(), "without `out` it stays"
    clipped, _ = clip_by_norm(grad, global_norm(grad), 1.0, out=grad)
    assert clipped is grad
    assert torch.equal(grad, expected)
