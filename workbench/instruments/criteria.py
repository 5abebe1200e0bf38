"""`Criteria`: what a loop's loss functions are given, in its first updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.instruments.caller import own_line

MAX_CALLS = 20
_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss")


class Criteria:
    """Looks at the first calls of each loss function: probabilities where logits belong, and shapes that broadcast."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, Any]] = {}
        self._values: dict[str, list[Tensor]] = {}
        self.settled = False

    def compared(self, name: str, inputs: Any, target: Any) -> None:
        """Take in a call; only those that are trained on count."""
        if self.settled or not (isinstance(inputs, Tensor) and inputs.requires_grad):
            return
        row = self._calls.setdefault(name, {"calls": 0, "line": own_line(), "broadcast": None})
        row["calls"] += 1
        if row["calls"] > MAX_CALLS:
            return
        if name in _ELEMENTWISE and isinstance(target, Tensor) and inputs.shape != target.shape:
            both = torch.Size(torch.broadcast_shapes(inputs.shape, target.shape))  # type: ignore[no-untyped-call]
            if both.numel() > max(inputs.numel(), target.numel()):
                row["broadcast"] = [list(inputs.shape), list(target.shape)]
        if name == "binary_cross_entropy_with_logits" and inputs.numel() > 1 and inputs.is_floating_point():
            with torch.no_grad():
                least, most = inputs.detach().float().aminmax()
                unit = (least >= 0) & (most <= 1) & (least < most)
                self._values.setdefault(name, []).append(torch.stack([unit, torch.zeros_like(unit), unit]).float())
        if (
            name in ("cross_entropy", "nll_loss")
            and inputs.ndim >= 2
            and inputs.shape[1] > 1
            and inputs.is_floating_point()
        ):
            with torch.no_grad():
                values = inputs.detach().float()
                sums, least, most = values.sum(1), values.min(), values.max()
                probabilities = ((sums - 1).abs().max() < 1e-3) & (least >= 0)
                logs = (values.exp().sum(1) - 1).abs().max() < 1e-3
                self._values.setdefault(name, []).append(torch.stack([probabilities, logs, most <= 1]).float())

    def settle(self) -> None:
        """Look no more."""
        self.settled = True

    def to_dict(self) -> dict[str, Any]:
        """Return one row a loss function, as JSON values."""
        found = {}
        for name, row in self._calls.items():
            seen = (
                torch.stack(self._values[name]).cpu().all(0).tolist() if self._values.get(name) else [None, None, None]
            )
            found[name] = row | {"probabilities": seen[0], "log_probabilities": seen[1]}
        return found
