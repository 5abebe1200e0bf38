"""The fields of a `TrainConfig` that describe a loop of somebody else's, as far as its optimizer and its rows tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.optim import Optimizer

from workbench.config import TrainConfig
from workbench.errors import ConfigError

_RULES = {"RMSprop": "rmsprop", "Adam": "adam", "NAdam": "nadam", "AdamW": "adamw"}


def config_fields(
    optimizer: Optimizer,
    *,
    updates: int | None,
    facts: Mapping[str, Any] | None = None,
    steps: pd.DataFrame | None = None,
) -> dict[str, Any]:
    """Return the fields of a config, as JSON values; what only the loop knows stays at its default.

    `peak_lr` is the largest lr of the first group that was used, or its present one. An optimizer that `TrainConfig` has no name
    for is given as its class. Constants that are no numbers, or none that `TrainConfig` takes, stay at its defaults.
    """
    first = optimizer.param_groups[0]
    lr = _number(first.get("lr")) or 1.0
    if steps is not None and "lr" in steps and (used := steps["lr"].dropna()).size:
        lr = float(np.max(used))
    batch = ((facts or {}).get("loaders") or {}).get("batch_size")
    constants: dict[str, Any] = {"weight_decay": _number(first.get("weight_decay")) or 0.0}
    betas = first.get("betas")
    if isinstance(betas, (list, tuple)) and len(betas) > 1 and None not in map(_number, betas[:2]):
        constants |= {"beta1": _number(betas[0]), "beta2": _number(betas[1])}
    constants |= {name: value for name in ("momentum", "eps") if (value := _number(first.get(name)))}
    limits = [key.split() for key in ((facts or {}).get("order") or {}).get("limits", {})]
    norms = [
        float(limit) for token, limit in limits if token == "clip" and math.isfinite(float(limit)) and float(limit) > 0
    ]
    if norms:
        constants["max_grad_norm"] = norms[0]
    known: dict[str, Any] = {
        "peak_lr": lr if lr > 0 and math.isfinite(lr) else 1.0, "total_steps": max(updates or 1, 1), "batch_size": int(batch or 1),
        "optimizer": _rule(optimizer), "select": "train/loss",
    }  # fmt: skip
    try:
        return TrainConfig(**known, **constants).to_dict()
    except ConfigError:
        return TrainConfig(**known).to_dict()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    return float(value) if not isinstance(value, Tensor) or value.numel() == 1 else None


def _rule(optimizer: Optimizer) -> Any:
    kind, first = type(optimizer), optimizer.param_groups[0]
    if kind is torch.optim.SGD:
        return "nesterov" if first.get("nesterov") else "momentum" if first.get("momentum") else "sgd"
    return _RULES.get(kind.__name__, kind) if kind.__module__.startswith("torch.optim") else kind
