"""The config of a training that is not ours, as far as its optimizer and its rows tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.config import TrainConfig
from workbench.errors import ConfigError

_RULES = {"RMSprop": "rmsprop", "Adam": "adam", "NAdam": "nadam", "AdamW": "adamw"}
CONSTANTS = {"momentum": "momentum", "eps": "eps", "alpha": "rho", "weight_decay": "weight_decay"}
"""Name in a parameter group of torch -> field of `TrainConfig`; betas besides."""


def own_schedule(progress: float) -> float:  # noqa: ARG001
    """Stand for the program's own schedule, which a trial's lr is a factor on."""
    return 1.0


def own_optimizer(params: Any, lr: float) -> Any:
    """Stand for an optimizer that `TrainConfig` has no name for; nothing is ever built with it."""
    raise NotImplementedError(f"the program builds its optimizer itself ({len(list(params))} parameters, lr {lr:g})")


def own_threshold(loop: Mapping[str, Any]) -> float | None:
    """Return the threshold that a loop clips the norm of its gradients at, the one that it uses most; None where it clips none that a step uses."""
    orders = loop["order"].get("orders", {})
    if 2 * sum(count for text, count in orders.items() if clips_late(text.split())) > sum(orders.values()) > 0:
        return None
    limits = [key.split() for key in loop["order"]["limits"]]
    return next((float(limit) for kind, limit in limits if kind == "clip" and 0 < float(limit) < math.inf), None)


def plain_call(call: str) -> str:
    """Return a call of an update's order without its count and the parentheses of a group."""
    return call.strip("()").partition("*")[0].strip(")")


def clips_late(calls: Sequence[str]) -> bool:
    """Tell whether gradients are clipped first before any backward pass of an update: after the last step, or before there is a gradient."""
    names = [plain_call(call) for call in calls]
    before = names[: names.index("backward")] if "backward" in names else names
    return "clip" in before or "clip_value" in before


def own_config(
    optimizer: Mapping[str, Any],
    lrs: Sequence[float],
    *,
    updates: int,
    batch_size: int | None,
    other: Callable[..., Any] = own_optimizer,
    **fields: Any,
) -> TrainConfig:
    """Return the config of a run: its peak lr, updates, batch size, rule and constants; what only the run knows stays at its default.

    Constants that `TrainConfig` does not take, such as an eps of 0, stay at its defaults, too.

    Args:
        optimizer: what `described` says of the first one, whose first group counts.
        lrs: of that group, one an update; without any its present one.
        batch_size: None, where it is not known, is 1.
        other: stands for an optimizer that `TrainConfig` has no name for.
        fields: of the config, as they are.
    """
    first = optimizer["groups"][0]
    used = np.asarray(lrs if len(lrs) else [first["lr"] or 0.0], dtype=np.float64)
    used = used[np.isfinite(used) & (used > 0)]
    constants: dict[str, Any] = {field: first[name] for name, field in CONSTANTS.items() if first.get(name)}
    if len(first["betas"]) == 2:
        constants |= {"beta1": first["betas"][0], "beta2": first["betas"][1]}
    constants = {name: value for name, value in constants.items() if value is not None}
    known: dict[str, Any] = {
        "peak_lr": float(used.max()) if used.size else 1.0, "total_steps": max(updates, 1), "batch_size": int(batch_size or 1),
        "optimizer": _rule(str(optimizer["name"]), first, other), **fields,
    }  # fmt: skip
    try:
        return TrainConfig(**known, **constants)
    except ConfigError:
        return TrainConfig(**known)


def _rule(name: str, group: Mapping[str, Any], other: Callable[..., Any]) -> Any:
    if name == "SGD":
        return "nesterov" if group["nesterov"] else "momentum" if group["momentum"] else "sgd"
    return _RULES.get(name, other)
