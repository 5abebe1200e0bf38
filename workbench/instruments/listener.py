"""What is told of a loop (`Listener`), and what is changed at the boundary of its optimizer (`Intervention`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.examples.batches import Draws


class Listener(Protocol):
    """What is told of a loop, in the order in which it happens."""

    def backward_begins(self, losses: Any, *, retained: bool = False) -> None: ...  # noqa: D102
    def backward_ends(self) -> None: ...  # noqa: D102
    def step_enters(self, optimizer: Optimizer) -> None: ...  # noqa: D102  # with a closure that is about to make the gradients
    def step_begins(self, optimizer: Optimizer) -> None: ...  # noqa: D102
    def step_ends(self, optimizer: Optimizer) -> None: ...  # noqa: D102
    def zeroed(self, owner: Optimizer | nn.Module) -> None: ...  # noqa: D102
    def loads(self, module: nn.Module) -> None: ...  # noqa: D102
    def clipped(self, kind: str, limit: float, norm: Tensor | None, first: int) -> None: ...  # noqa: D102
    def scaled(self, loss: Any, result: Any, scale: Callable[[Tensor], Tensor]) -> None: ...  # noqa: D102
    def unscaled(self, optimizer: Optimizer) -> None: ...  # noqa: D102
    def scheduled(self, scheduler: Any) -> None: ...  # noqa: D102
    def loader_begins(self, loader: Any, states: Tensor | None) -> None: ...  # noqa: D102
    def drew(self, loader: Any, waited: float, draws: Draws, batch: Any) -> None: ...  # noqa: D102
    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None: ...  # noqa: D102
    def compared(self, name: str, inputs: Any, target: Any, loss: Any) -> None: ...  # noqa: D102
    def converted(self, tensor: Tensor, result: Tensor, seconds: float) -> None: ...  # noqa: D102


class Intervention(Protocol):
    """What is changed at the boundary of an optimizer, in this order."""

    max_grad_norm: float | None
    unclipped: bool

    def is_on(self) -> bool: ...  # noqa: D102  # of the training in progress
    def takes_over(self, optimizer: Optimizer) -> bool: ...  # noqa: D102  # where one that is new goes on for the first one

    def set_lr(self, optimizer: Optimizer, update: int) -> None:
        """Change the learning rates of an update that is about to be made."""

    def clip(self, gradients: Sequence[Tensor], scale: Tensor | None = None) -> Tensor | None:
        """Shorten the gradients, which are `scale` times the true ones, in place; return whether they were, None where nothing is clipped."""

    def reset_lr(self, optimizer: Optimizer) -> None:
        """Put the loop's own learning rates back."""

    def updated(self, updates: int) -> None:
        """Take in that so many updates were made; may end the program."""
