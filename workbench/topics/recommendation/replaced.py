"""`collect_replaced`: the baseline once more for each setting of it that is far from usual, with the usual value (`topics/recommendation/suspects.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from workbench.config import TrainConfig
from workbench.curves.trials import read_curves
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.lr_sweep.rounds import Asked, run_round
from workbench.topics.recommendation.suspects import DECOUPLED, Suspect, constants_of, suspects
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng

__all__ = ["STAGE", "collect_replaced", "torch_constants"]

STAGE = Role.REPLACED
_NAMES: dict[str, tuple[str, int | None]] = {
    "momentum": ("momentum", None), "rho": ("alpha", None), "beta1": ("betas", 0), "beta2": ("betas", 1), "eps": ("eps", None),
    "weight_decay": ("weight_decay", None),
}  # fmt: skip
"""Field of `TrainConfig` -> its name in a parameter group of `torch.optim`, and the place in it."""


def collect_replaced(session: Session) -> None:
    """Train the baseline again for each suspect setting, and store which trials to compare.

    Most configs have none, and nothing is trained.
    """
    session.collect("replaced", lambda: _replaced(session))


def _replaced(session: Session) -> dict[str, Any]:
    config = session.config
    baseline = session.trial(config, stage=Role.BASELINE).number
    record, constants = session.record, _constants(session)
    curve = next((c for c in read_curves(record) if c.trial == baseline), None)
    scales = [float(row["value"]) for row in record.facts.get("noise_scale") or () if row["value"] is not None]
    found = [] if curve is None else suspects(curve, constants, noise_scale=max(scales, default=None))
    trials = run_round(session, [Asked(STAGE, _with(config, suspect)) for suspect in found])
    rows = [s._asdict() | {"baseline": baseline, "trial": t.number} for s, t in zip(found, trials, strict=True)]
    return {"constants": constants, "rows": rows}


def _constants(session: Session) -> dict[str, float]:
    factory = session.config.optimizer
    if not callable(factory):
        return constants_of(session.config.to_dict())
    with isolated_rng():
        model = build_model(session.workload, session.config, session.device)
        optimizer = factory([p for p in model.parameters() if p.requires_grad], session.config.peak_lr)
    return torch_constants(optimizer)


def torch_constants(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return what an optimizer's parameter groups hold, the largest where they differ, by the names of `TrainConfig`."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        for name, (key, place) in _NAMES.items():
            value: Any = group.get(key)
            value = value[place] if place is not None and isinstance(value, (tuple, list)) else value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[name] = max(float(value), found.get(name, 0.0))
    if found.get("momentum") == 0.0:
        del found["momentum"]
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        g.get("decoupled_weight_decay") for g in optimizer.param_groups
    )
    return found | {DECOUPLED: float(decoupled)}


def _with(config: TrainConfig, suspect: Suspect) -> TrainConfig:
    """Return the baseline with the usual value."""
    if callable(config.optimizer) and suspect.field in _NAMES:
        return config.replace(optimizer=partial(_changed, config.optimizer, suspect.field, suspect.usual))
    kind = int if isinstance(getattr(config, suspect.field), int) else float
    change: dict[str, Any] = {suspect.field: kind(suspect.usual)}
    if suspect.field == "batch_size":
        change["eval_batch_size"] = None
    return config.replace(**change)


def _changed(factory: Callable[..., Any], field: str, value: float, params: Sequence[Any], lr: float) -> Any:
    """Return a person's optimizer with one constant of every group replaced."""
    optimizer = factory(params, lr)
    key, place = _NAMES[field]
    for group in optimizer.param_groups:
        if place is not None and key in group:
            group[key] = tuple(value if i == place else each for i, each in enumerate(group[key]))
        elif key in group:
            group[key] = value
    return optimizer
