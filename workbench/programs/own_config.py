"""The config that a program's unchanged run shows, as far as its optimizer and its rows tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.config import TrainConfig
from workbench.programs.command import Outcome

_RULES = {"RMSprop": "rmsprop", "Adam": "adam", "NAdam": "nadam", "AdamW": "adamw"}
_CONSTANTS = {"momentum": "momentum", "eps": "eps", "alpha": "rho", "weight_decay": "weight_decay"}


def own_schedule(progress: float) -> float:  # noqa: ARG001
    """Stand for the program's own schedule, which a trial's lr is a factor on."""
    return 1.0


def own_optimizer(params: Any, lr: float) -> Any:
    """Stand for an optimizer that `TrainConfig` has no name for; nothing is ever built with it."""
    raise NotImplementedError(f"the program builds its optimizer itself ({len(list(params))} parameters, lr {lr:g})")


def own_config(outcome: Outcome, *, select: str, select_mode: str) -> TrainConfig:
    """Return the config of a run: peak lr of the first group, updates, batch size, rule and constants.

    Batch size is the length of what the model is called with, 1 where that is not known.
    """
    loop: Mapping[str, Any] = outcome.facts["loop"]
    optimizer = loop["parameters"]["optimizers"]["0"]
    first = optimizer["groups"][0]
    lrs = np.asarray(outcome.columns["lr"], dtype=np.float64)
    peak = float(np.nanmax(lrs)) if np.isfinite(lrs).any() and np.nanmax(lrs) > 0 else 1.0
    constants: dict[str, Any] = {field: first[name] for name, field in _CONSTANTS.items() if first.get(name)}
    if len(first["betas"]) == 2:
        constants |= {"beta1": first["betas"][0], "beta2": first["betas"][1]}
    fields = {
        "peak_lr": peak, "total_steps": outcome.updates, "batch_size": int(loop["loaders"]["batch_size"] or 1), "optimizer": _rule(optimizer["name"], first),
        "schedule": "constant" if np.allclose(lrs, peak, rtol=1e-6, equal_nan=True) else own_schedule, "select": select, "select_mode": select_mode,
    }  # fmt: skip
    return TrainConfig(**fields, **constants)


def _rule(name: str, group: Mapping[str, Any]) -> Any:
    if name == "SGD":
        return "nesterov" if group["nesterov"] else "momentum" if group["momentum"] else "sgd"
    return _RULES.get(name, own_optimizer)
