"""Per-worker datasets: every worker builds its own, from the same function (T7, behaviours 29 to 41)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from workbench.errors import UsageError
from workbench.parameter_server.context import building_dataset, current_worker
from workbench.parameter_server.errors import ClosureInputError
from workbench.parameter_server.workers.closure import NO_OPTIMIZER
from workbench.parameter_server.workers.worker import WorkerIterator


def refuse_variables(module: nn.Module, name: str, parameter: nn.Parameter) -> None:  # noqa: ARG001 - torch's signature
    """Raise where a dataset function makes parameters: each worker would have its own (T5.4, behaviour 32)."""
    here = current_worker()
    if here is not None and here.builds_dataset:
        raise UsageError(
            f"A dataset function made a parameter ({type(module).__name__}.{name}): every worker would train its own. Make layers "
            "with parameters outside of the function and use them inside."
        )


class DatasetRecipe:
    """Makes a worker's dataset.

    Args:
        source: a function without arguments that returns an iterable, or an iterable that is copied to each worker.
    """

    def __init__(self, source: Callable[[], Iterable[Any]] | Iterable[Any]) -> None:
        self._source = source

    def __call__(self) -> Iterable[Any]:
        """Return the dataset; runs on the worker."""
        with _without_parameters():
            made = self._source() if callable(self._source) else self._source
        if not _iterable(made):
            raise UsageError(
                f"A dataset function returned {type(made).__name__}; it has to return something to iterate over: a DataLoader, a "
                "dataset, a generator."
            )
        return made


class IteratorRecipe:
    """Makes a worker's iterator, from the start of its dataset.

    Args:
        dataset: how the dataset is made: a function is called anew for each iterator, because what it returns may be used up.
    """

    def __init__(self, dataset: DatasetRecipe) -> None:
        self._dataset = dataset

    def __call__(self) -> WorkerIterator:
        """Return the iterator; runs on the worker."""
        return WorkerIterator(_later(iter(self._dataset())))


def _later(items: Iterator[Any]) -> Iterator[Any]:
    """Let what a generator does on its first step count as building, too."""
    while True:
        with building_dataset(), _without_parameters():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    hook = nn.modules.module.register_module_parameter_registration_hook(refuse_variables)
    try:
        yield
    finally:
        hook.remove()


def as_dataset_recipe(source: Any) -> DatasetRecipe:
    """Check what `create_per_worker_dataset` was given.

    Raises:
        UsageError: it is a live iterator, or a function that holds one, which cannot be in several places (T7.6, behaviour 34).
    """
    if isinstance(source, Iterator):
        raise UsageError(
            f"The dataset is an iterator that is under way ({type(source).__name__}): it cannot be on every worker. "
            "Give a function that builds the whole dataset, or the dataset itself."
        )
    if not callable(source) and not _iterable(source):
        raise UsageError(
            f"create_per_worker_dataset got {type(source).__name__}: {source!r}. Give a function without arguments that returns "
            "a dataset, or a dataset."
        )
    return DatasetRecipe(source)


def _iterable(value: object) -> bool:
    """Return whether `iter` takes it: also what has items by number alone, as a map-style dataset does."""
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def refuse_captured(function: Callable[..., Any]) -> None:
    """Refuse a function that would take along from the coordinator what cannot be in several places.

    Looked at are its free variables and, where it is a script's or a notebook's own, the globals that it names.

    Raises:
        ClosureInputError: a live iterator, or a torch optimizer (behaviour 34).
    """
    try:
        found = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:
        return
    own = getattr(function, "__module__", None) == "__main__"
    for name, value in [*found.nonlocals.items(), *(found.globals.items() if own else ())]:
        if isinstance(value, Iterator):
            raise ClosureInputError(
                f"The function uses {name!r}, an iterator that lives on the coordinator: build the whole dataset in the function "
                "that create_per_worker_dataset gets, and give its iterator as an argument."
            )
        if isinstance(value, Optimizer):
            raise ClosureInputError(f"The function uses {name!r}, {NO_OPTIMIZER}")
