"""Variables that every worker has for itself, such as a metric's counts (behaviour 38)."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.workers.worker import Call, ResourceRef

_IDS = itertools.count()  # of all coordinators of this process: they may have the same workers


@dataclass(frozen=True)
class Recipe:
    """How a worker makes a resource.

    Attributes:
        make: called on the worker.
        needs: argument of `make` -> id of a resource that is there already.
    """

    make: Callable[..., Any]
    needs: Mapping[str, int] = field(default_factory=dict)


class ResourceTable:
    """The recipes of all resources that somebody still holds, in the order in which they have to be made."""

    def __init__(self) -> None:
        self._recipes: dict[int, Recipe] = {}
        self._lock = threading.Lock()

    def add(self, recipe: Recipe) -> int:
        """Note a recipe and return the id of what it makes."""
        with self._lock:
            resource = next(_IDS)
            self._recipes[resource] = recipe
            return resource

    def remove(self, resource: int) -> None:
        """Forget a recipe."""
        with self._lock:
            self._recipes.pop(resource, None)

    def __contains__(self, resource: int) -> bool:
        """Return whether somebody still holds it."""
        return resource in self._recipes

    def __iter__(self) -> Iterator[tuple[int, Recipe]]:
        """Go through (id, recipe) as they stand now."""
        with self._lock:
            return iter(list(self._recipes.items()))


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
