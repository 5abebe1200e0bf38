"""Size and sparsity of each layer's output, on a cadence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.record.read import StudyRecord, TrialRecord
from workbench.train.hooks.base import Hook, Run, Step
from workbench.train.hooks.norms import check_cadence

__all__ = ["Activations"]


class Activations(Hook):
    """Records `activation_rms/<module>` and `activation_zero_frac/<module>` for every leaf module.

    Healthy: sizes alike from layer to layer and over time. A size that grows with depth or time points to missing
    normalisation, a zero share near 1 to dead units. Attached at start and removed at the end; attaching twice is the
    same as once.

    Args:
        every: cadence in steps; the first step is always measured.
    """

    def __init__(self, every: int = 20) -> None:
        self.every = check_cadence(every)
        self._handles: list[RemovableHandle] = []
        self._values: dict[str, dict[int, Tensor]] = {}

    def on_start(self, run: Run) -> None:
        """Attach to the leaf modules."""
        self._detach()
        for trial, model in zip(run.trials, run.models, strict=True):
            for name, module in model.named_modules():
                if name and not list(module.children()):
                    self._handles.append(module.register_forward_hook(self._observer(run, trial, name)))

    def on_step(self, step: Step) -> None:
        """Store what the forward pass of this step showed."""
        for name, values in self._values.items():
            step.record(name, torch.stack([values[trial] for trial in step.trials]))
        self._values.clear()

    def on_end(self, record: TrialRecord | StudyRecord) -> None:  # noqa: ARG002
        """Detach."""
        self._detach()

    def _observer(self, run: Run, trial: int, name: str) -> Any:
        def observe(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            if run.step % self.every or not module.training or not isinstance(output, Tensor):
                return
            if output.is_floating_point():
                with torch.no_grad():
                    values = output.detach().float()
                    rms, zero_frac = values.square().mean().sqrt(), (values == 0).float().mean()
                    self._values.setdefault(f"activation_rms/{name}", {})[trial] = rms
                    self._values.setdefault(f"activation_zero_frac/{name}", {})[trial] = zero_frac

        return observe

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._values.clear()
