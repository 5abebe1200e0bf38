"""Variables that every worker has for itself, such as a metric's counts (behaviour 38)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.workers.worker import Call, ResourceRef


class PerWorkerValues:
    """A container with one value a worker, each of which stays on its worker (T7.1).

    As an argument of a scheduled function it is replaced by what the worker that runs the function holds (T7.2). When nobody holds
    the container any more, the workers forget their values.
    """

    def __init__(self, resource: int, what: str, count: int, forget: Callable[[int], None]) -> None:
        self.ref = ResourceRef(resource)
        self._what, self._count = what, count
        self._finalizer = weakref.finalize(self, forget, resource)

    def __repr__(self) -> str:
        """Say what it holds."""
        return f"PerWorkerValues({self._what}, one on each of {self._count} workers)"

    def __len__(self) -> int:
        """Return the number of workers."""
        return self._count

    def __next__(self) -> Any:
        """Refuse: the values are on the workers (behaviour 29)."""
        raise UsageError(
            f"next() of a container of {self._what}: its values are on the workers. Give the container to schedule(function, "
            "args=(container,)) and call next() inside the function."
        )


class WorkerVariable:
    """One worker's value, from its initial one on."""

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
