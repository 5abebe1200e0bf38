"""The models that lanes are measured on, and learning rates for them."""

from __future__ import annotations

import numpy as np
import torch

import workbench as wb


def wide_mlp() -> torch.nn.Module:
    """Return a fresh 64-128-128-10 network."""
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def load(name: str) -> wb.Workload:
    """Return the workload of a model's name."""
    if name == "digits_mlp_128":
        return wb.load_workload("digits_mlp").replace(name=name, build_model=wide_mlp)
    return wb.load_workload(name)


def learning_rates(workload: wb.Workload, lanes: int, *, diverging: bool = False) -> list[float]:
    """Return an eighth of the baseline's lr up to the lr itself, which all train; or make every second one overflow."""
    top = workload.config.peak_lr
    lrs = [top] if lanes == 1 else np.geomspace(top / 8, top, lanes).tolist()
    return [lr * 1e20 if diverging and k % 2 else lr for k, lr in enumerate(lrs)]
