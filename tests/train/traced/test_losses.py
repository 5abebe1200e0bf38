"""Means and standard errors of lanes, against torch lane by lane."""

from __future__ import annotations

import pytest
import torch

from workbench.train.traced.losses import LaneLosses

CPU = torch.device("cpu")
ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHTS = torch.tensor([0.0, 1, 2, 3, 0, 1, 1, 5], dtype=torch.float64)


def filled(*, weighted: bool, dtype: torch.dtype = torch.float64) -> LaneLosses:
    """Two lanes in one call and one in another, in two micro-batches."""
    out = LaneLosses(3, 8, dtype, CPU, weighted=weighted)
    for first, last in ((0, 5), (5, 8)):
        weights = WEIGHTS[first:last].to(dtype) if weighted else None
        out.put(slice(0, 2), first, ROWS[:2, first:last].to(dtype), weights)
        out.put(slice(2, 3), first, ROWS[2, first:last].to(dtype), weights)
    return out


def test_plain_means() -> None:
    loss, squared_se, _ = filled(weighted=False).mean()
    torch.testing.assert_close(loss, ROWS.mean(1))
    torch.testing.assert_close(squared_se, ROWS.var(1) / 8)


def test_weighted_means() -> None:
    (loss, squared_se, _), total = filled(weighted=True).weighted()
    torch.testing.assert_close(loss, (ROWS * WEIGHTS).sum(1) / 13)
    torch.testing.assert_close(total, torch.full((3,), 13.0, dtype=torch.float64))
    ones = LaneLosses(3, 8, torch.float64, CPU, weighted=True)
    ones.put(slice(0, 3), 0, ROWS, None)
    (plain, plain_se, _), _ = ones.weighted()
    torch.testing.assert_close(plain, ROWS.mean(1))
    torch.testing.assert_close(plain_se, ROWS.var(1) / 8)
    assert (squared_se > 0).all()


def test_one_example_has_no_standard_error() -> None:
    for weighted in (False, True):
        out = LaneLosses(2, 1, torch.float64, CPU, weighted=weighted)
        out.put(slice(0, 2), 0, ROWS[:2, :1], None)
        loss, squared_se, _ = out.weighted()[0] if weighted else out.mean()
        torch.testing.assert_close(loss, ROWS[:2, 0])
        assert squared_se.isnan().all()


def test_means_of_half_precision_are_taken_in_float32() -> None:
    loss, squared_se, _ = filled(weighted=False, dtype=torch.bfloat16).mean()
    assert loss.dtype == squared_se.dtype == torch.float32
    torch.testing.assert_close(loss, ROWS.mean(1).float(), rtol=0, atol=0.01)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_lane_that_is_not_finite_stays_alone(weighted: bool) -> None:
    out = filled(weighted=weighted)
    out.losses[1, 3] = float("inf")
    loss, squared_se, _ = out.weighted()[0] if weighted else out.mean()
    assert loss.isfinite().tolist() == squared_se.isfinite().tolist() == [True, False, True]
