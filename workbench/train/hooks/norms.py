"""Norms of the update and of the parameters, on a cadence."""

from __future__ import annotations

import torch

from workbench.errors import ConfigError
from workbench.train.hooks.base import Hook, Step

__all__ = ["Norms", "check_cadence"]


def check_cadence(every: int) -> int:
    """Return `every`; raise `ConfigError` unless it is a positive integer."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every={every!r} must be an integer of at least 1: measure at every n-th step.")
    return every


class Norms(Hook):
    """Records `update_norm` and `param_norm`; the gradient's norm is recorded by the trainer at every step.

    Healthy: the update is 1e-4 to 1e-2 of the parameters (rule of thumb) and both change slowly.

    Args:
        every: cadence in steps; the first step is always measured.
    """

    def __init__(self, every: int = 20) -> None:
        self.every = check_cadence(every)

    def on_step(self, step: Step) -> None:
        """Measure on the cadence."""
        if step.index % self.every == 0:
            step.record("update_norm", torch.linalg.vector_norm(step.update, dim=1))
            step.record("param_norm", torch.linalg.vector_norm(step.params, dim=1))
