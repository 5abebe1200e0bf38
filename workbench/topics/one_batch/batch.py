"""`OneBatch`: a fresh model and one batch of training data, whose rows can be exchanged and whose forward pass leaves no trace."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from workbench.config import TrainConfig
from workbench.train.batches import train_batches
from workbench.train.forward import autocast, buffers_put_back
from workbench.train.rng import seed_all
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload

MOST_EXAMPLES = 128  # rule of thumb: enough to call a unit dead, little enough to run dozens of times
ENOUGH_EXAMPLES = 16  # rule of thumb: a smaller batch of small examples is filled up to this
SMALL_NUMBERS = 2**20  # rule of thumb: in such a batch


@dataclass(frozen=True)
class OneBatch:
    """A model with its batch; nothing that is asked of it changes either."""

    workload: Workload
    stack: LaneStack
    batch: Any
    examples: int
    exchangeable: bool = True
    pairs: bool = False
    until: float = math.inf

    @property
    def late(self) -> bool:
        """Whether processor time is up: other processes decide no finding."""
        return time.thread_time() > self.until

    def check_time(self) -> None:
        """Raise TimeoutError when time is up."""
        if self.late:
            raise TimeoutError("forward and backward passes take too long here")

    @property
    def model(self) -> nn.Module:
        """The model, as its weights are now."""
        return self.stack.models[0]

    def rows(self, index: Tensor) -> OneBatch:
        """Return the same model with these rows of the batch, in this order."""
        return replace(self, batch=self.taken(index), examples=len(index))

    def taken(self, index: Tensor) -> Any:
        """Return these rows of the batch; what has no row for each example stays as it is."""
        return self.changed(lambda t: t.index_select(0, index.to(t.device)))

    def changed(self, change: Callable[[Tensor], Tensor], *, only: Tensor | None = None) -> Any:
        """Return the batch with `change` made to each tensor that has a row for each example, or to `only` this one."""
        return tree_map(lambda t: change(t) if self.has_rows(t) and (only is None or t is only) else t, self.batch)

    def has_rows(self, value: Any, *, floating: bool = False) -> bool:
        """Whether it is a tensor with one row for each example, and of floating numbers where asked."""
        rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.examples
        return rows and (not floating or value.is_floating_point())

    def inputs(self) -> list[Tensor]:
        """Return the tensors of the batch that have a row for each example, targets among them."""
        return [t for t in tree_leaves(self.batch) if self.has_rows(t)] if self.exchangeable else []

    @contextlib.contextmanager
    def evaluated(self, *, train: bool, seed: int = 0) -> Iterator[None]:
        """Set the mode and the seed of a forward pass, whose precision is that of training; buffers are put back."""
        self.model.train(train)
        seed_all(seed)
        with buffers_put_back(self.model), autocast(self.stack.device, self.stack.precision):
            yield

    def forward(self, batch: Any = None, *, train: bool = False, grad: bool = False, seed: int = 0) -> Any:
        """Return the outputs for a batch of as many examples (None: its own), in training or evaluation mode, without a trace."""
        self.check_time()
        given = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self.batch if batch is None else batch)
        with self.evaluated(train=train, seed=seed), torch.set_grad_enabled(grad):
            return self.workload.forward(self.model, given)

    def tensors(self, outputs: Any) -> list[Tensor]:
        """Return the floating tensors of the outputs that have a row for each example."""
        return [t for t in tree_leaves(outputs) if self.has_rows(t, floating=True)]

    def flat(self, outputs: Any) -> Tensor:
        """Return all those tensors side by side, shape (examples, values), in float64; no values where there are none."""
        parts = [t.detach().double().reshape(self.examples, -1) for t in self.tensors(outputs)]
        return torch.cat(parts, 1) if parts else torch.empty(self.examples, 0)

    def with_tensors(self, outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return the outputs with `change` made to each tensor of `tensors`."""
        return tree_map(lambda t: change(t) if self.has_rows(t, floating=True) else t, outputs)

    def rolled(self, outputs: Any, shift: int) -> Any:
        """Return the outputs with each row given to the example `shift` places further on."""
        return self.with_tensors(outputs, lambda t: t.roll(shift, 0))

    def unlike(self, outputs: Any) -> Any:
        """Return the outputs with every value up to a tenth nearer to 0, so that no two rows are alike and none leaves its range."""
        return self.with_tensors(
            outputs, lambda t: t * (1 - 0.1 * torch.rand_like(t)) + (t == 0) * 0.1 * torch.rand_like(t)
        )

    def losses(self, outputs: Any, batch: Any = None) -> Tensor:
        """Return the loss of each example, or their mean where the workload's loss is one, detached, in float64; the batch is its own where None is given."""
        with torch.no_grad():
            return self.workload.loss(outputs, self.batch if batch is None else batch).detach().double()


def first_batch(workload: Workload, config: TrainConfig, device: torch.device) -> OneBatch:
    """Return a fresh model and the first batch that it would be trained on, without worker processes."""
    stack, read = LaneStack(workload, [config], device), workload.replace(num_workers=0)
    micro = config.batch_size // config.accumulate_steps
    batch, examples = next(train_batches(read, config, device))[0]
    numbers = sum(t.numel() for t in tree_leaves(batch) if isinstance(t, Tensor)) / micro
    filled = max(micro, min(ENOUGH_EXAMPLES, int(SMALL_NUMBERS / max(numbers, 1))))
    size = min(len(workload.train_data), MOST_EXAMPLES, filled)
    if size > micro:
        larger = config.replace(batch_size=size, accumulate_steps=1, eval_batch_size=None)
        batch, examples = next(train_batches(read, larger, device))[0]
    found = OneBatch(workload, stack, batch, examples)
    half = found.rows(torch.arange(max(1, examples // 2)))
    try:
        some = half.forward()
        mean = bool(half.tensors(some)) and half.losses(some).dim() == 0  # then the outputs alone tell
        cut = bool(half.inputs()) and (mean or tuple(half.losses(some).shape) == (half.examples,))
    except Exception:  # the person's own code, on a batch that was made for this
        cut = False
    if not cut:  # not the examples come first in its tensors
        return replace(found, exchangeable=False)
    sizes = [t.shape[1:].numel() for t in found.tensors(found.forward())]
    found = replace(found, pairs=examples > 1 and sizes != [t.shape[1:].numel() for t in half.tensors(some)])
    return found.rows(torch.arange(MOST_EXAMPLES)) if examples > MOST_EXAMPLES else found
