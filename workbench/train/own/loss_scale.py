"""`LossScale`: the loss of float16 is multiplied before its gradient is taken, as by `torch.amp.GradScaler` with its defaults.

A gradient that overflows makes no update and halves the scale; 2,000 in a row that do not double it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # defaults of `torch.amp.GradScaler`


class _Updater(Protocol):
    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: Any = None, *, out: Tensor | None = None
    ) -> Tensor: ...

    def skip(self, lane: int) -> None: ...


class LossScale:
    """The scale of one lane, and how many updates have been made since it changed."""

    def __init__(self) -> None:
        self.value, self._since = FIRST, 0

    def differentiate(self, value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the unscaled gradients of a loss, None where it does not depend on a parameter."""
        scaled = value * torch.tensor(self.value, device=value.device)
        grads = torch.autograd.grad(scaled, parameters, allow_unused=True)
        return [None if g is None else g / self.value for g in grads]

    def settle(self) -> bool:
        """Make the scale smaller, for who wants a gradient and trains nothing; tell whether it could be."""
        above = self.value > 1.0
        self.value = max(1.0, self.value / 16)
        return above

    def advance(self, *, finite: bool) -> None:
        """Go on from a step whose gradient was finite or not."""
        self._since = self._since + 1 if finite else 0
        if not finite:
            self.value *= BACKOFF
        elif self._since == INTERVAL:
            self.value, self._since = self.value * GROWTH, 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {"loss_scale": [self.value, self._since]}

    def load(self, stored: dict[str, Any]) -> None:
        """Go back to what a checkpoint keeps."""
        self.value, self._since = float(stored["loss_scale"][0]), int(stored["loss_scale"][1])


def update_unless_overflown(
    scale: LossScale | None, updater: _Updater, params: Tensor, grad: Tensor, *how: Any
) -> tuple[Tensor, dict[str, float]]:
    """Return the update, zero where a scaled gradient overflowed, and what is recorded of the scale; nothing without one."""
    if scale is None:
        return updater.update(params, grad, *how), {}
    finite = bool(torch.isfinite(grad).all())
    recorded = {"loss_scale": scale.value, "skipped": float(not finite)}
    scale.advance(finite=finite)
    if finite:
        return updater.update(params, grad, *how), recorded
    updater.skip(0)
    return torch.zeros_like(params), recorded
