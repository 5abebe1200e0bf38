"""`digits_mlp`: a 64-32-32-10 ReLU network on the digits."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.workloads.base import Workload
from workbench.workloads.digits_data import digits_data
from workbench.workloads.helpers import classification

__all__ = ["build_model", "digits_mlp"]


def build_model(*, init_scale: float = 1.0) -> nn.Module:
    """Return a fresh 64-32-32-10 network, its weights `init_scale` times as large as torch makes them."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    if init_scale != 1.0:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("weight"):
                    parameter.mul_(init_scale)
    return model


def digits_mlp(*, init_scale: float = 1.0) -> Workload:
    """Return the workload; a run takes about a second.

    Args:
        init_scale: all weights are this many times as large at the start; at 10 the untrained model is confidently wrong.

    Raises:
        UsageError: `init_scale` is not a finite number above 0.
    """
    if not (init_scale > 0 and math.isfinite(init_scale)):
        raise UsageError(f"init_scale={init_scale!r} must be a finite number above 0; 1 is the healthy size.")
    data = digits_data(flat=True)
    return classification(
        name="digits_mlp" if init_scale == 1 else f"digits_mlp_scale{init_scale:g}",
        build_model=build_model if init_scale == 1 else partial(build_model, init_scale=init_scale),
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        config=TrainConfig(peak_lr=0.05, total_steps=2000, batch_size=64),
    )
