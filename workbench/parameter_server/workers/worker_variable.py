"""Variables that every worker has for itself, such as a metric's counts (behaviour 38)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.parameter_server.workers.resources import PerWorkerValues
from workbench.parameter_server.workers.worker import Call

__all__ = ["PerWorkerVariable", "WorkerVariable"]


class WorkerVariable:
    """One worker's value.

    Args:
        value: its initial value.
    """

    def __init__(self, value: Any) -> None:
        self._value = torch.as_tensor(value).clone()

    def read(self) -> Tensor:
        """Return a copy of the value."""
        return self._value.clone()

    def assign(self, value: Any) -> None:
        """Replace the value."""
        self._value.copy_(torch.as_tensor(value))

    def assign_add(self, value: Any) -> None:
        """Add to the value."""
        self._value += torch.as_tensor(value, dtype=self._value.dtype)


class PerWorkerVariable:
    """A variable on every worker; as an argument of a function it is the `WorkerVariable` of the worker that runs it."""

    def __init__(self, values: PerWorkerValues, on_every_worker: Callable[[Call], list[Any]]) -> None:
        self.values = values
        self.ref = values.ref
        self._on_every_worker = on_every_worker

    def read_all(self) -> list[Tensor]:
        """Return the value of each worker, by its index."""
        return self._on_every_worker(Call(WorkerVariable.read, [self.ref]))

    def assign_all(self, value: Any) -> None:
        """Replace the value of every worker."""
        self._on_every_worker(Call(WorkerVariable.assign, [self.ref, value]))
