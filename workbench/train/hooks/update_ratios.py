"""How far each parameter tensor moves in one step, relative to its size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.train.hooks.base import Hook, Run, Step
from workbench.train.hooks.norms import check_cadence

__all__ = ["UpdateRatios"]


class UpdateRatios(Hook):
    """Records `update_ratio/<parameter>`: norm of the update / norm of the tensor before it, lr included.

    Healthy: around 1e-3 (rule of thumb) and alike across layers. Much smaller: the layer hardly learns; near 1: it is
    overwritten in one step. A tensor of zeros gives inf.

    Args:
        every: cadence in steps; the first step is always measured.
    """

    def __init__(self, every: int = 20) -> None:
        self.every = check_cadence(every)
        self._slices: Mapping[str, slice] = {}

    def on_start(self, run: Run) -> None:
        """Learn where each parameter lies."""
        self._slices = run.parameter_slices

    def on_step(self, step: Step) -> None:
        """Measure on the cadence."""
        if step.index % self.every:
            return
        for name, where in self._slices.items():
            moved, size = (torch.linalg.vector_norm(t[:, where], dim=1) for t in (step.update, step.params))
            step.record(f"update_ratio/{name}", moved / size)
