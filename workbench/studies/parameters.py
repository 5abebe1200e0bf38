"""`collect_parameters`: which parameters are trained at all, and whether the others hold anything."""

from __future__ import annotations

from typing import Any

import torch

from workbench.config import TrainConfig
from workbench.train.lanes import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload

__all__ = ["collect_parameters"]


def collect_parameters(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return JSON facts about parameters that stay as they begin: frozen ones, and those that the optimizer was not given.

    Whether they hold anything is told by a second model under another seed: what was loaded or set to a constant is equal in both.

    Args:
        workload: what is trained.
        config: the baseline's.
        device: where.
    """
    with isolated_rng():
        model = build_model(workload, config, device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        unowned = {}
        if callable(config.optimizer):
            optimizer = config.optimizer(list(trained.values()), config.peak_lr)
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            unowned = {name: p for name, p in trained.items() if id(p) not in owned}
        idle = frozen | unowned
        random: set[str] = set()
        if idle:
            other = dict(
                build_model(workload, config.replace(shared_seed=config.shared_seed + 1), device).named_parameters()
            )
            random = {name for name, p in idle.items() if name in other and not torch.equal(p, other[name])}
    return {
        "numbers": sum(p.numel() for p in model.parameters()),
        **{
            kind: [{"name": name, "numbers": p.numel(), "random": name in random} for name, p in each.items()]
            for kind, each in (("frozen", frozen), ("unowned", unowned))
        },
    }
