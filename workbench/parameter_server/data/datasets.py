"""Per-worker datasets: every worker builds its own, from the same function, which may learn where it runs (T4.3, T7, behaviours 29 to 41)."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.parameter_server.context import building_dataset, current_worker
from workbench.parameter_server.errors import ClosureInputError
from workbench.parameter_server.workers.closure import NO_OPTIMIZER
from workbench.parameter_server.workers.worker import WorkerIterator


@dataclass(frozen=True)
class InputContext:
    """What a dataset function is told about where it runs."""

    num_input_pipelines: int = 1  # of the whole cluster; usually one a worker
    input_pipeline_id: int = 0  # this one, from 0
    num_replicas_in_sync: int = 1  # that share one step's batch, on one worker: workers do not wait for each other

    def __post_init__(self) -> None:
        """Check; raise `UsageError`."""
        for name, low in (("num_input_pipelines", 1), ("input_pipeline_id", 0), ("num_replicas_in_sync", 1)):
            check_integer(name, getattr(self, name), low=low, error=UsageError)
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise UsageError(
                f"input_pipeline_id={self.input_pipeline_id} must be below num_input_pipelines={self.num_input_pipelines}: "
                "they count from 0."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the examples that one replica takes of each step's batch; raises `UsageError` where they are not all as many."""
        replicas = self.num_replicas_in_sync
        each, left = divmod(check_integer("global_batch_size", global_batch_size, error=UsageError), replicas)
        if left:
            raise UsageError(
                f"global_batch_size={global_batch_size} must be a multiple of num_replicas_in_sync={replicas}. Give "
                f"{global_batch_size - left or replicas} or {(each + 1) * replicas}."
            )
        return each


@dataclass(frozen=True)
class DatasetCreator:
    """A function that makes a dataset, to be called on every worker (T4.3, T4.6).

    Attributes:
        dataset_fn: from an `InputContext` to a Dataset, a DataLoader or another iterable of batches. Shard before
            shuffling: shards of an unseeded shuffle overlap (T4.5).
        input_options: None. TensorFlow's say how batches are buffered and which device they are copied to; here the dataset itself
            does both, and anything else is refused rather than ignored.
    """

    dataset_fn: Callable[[InputContext], Any]
    input_options: Any = None

    def __post_init__(self) -> None:
        """Refuse what cannot be called with a context, and input options."""
        refuse_input_options("input_options", self.input_options)
        if not callable(self.dataset_fn):
            raise UsageError(
                f"dataset_fn={self.dataset_fn!r} must be a function that takes an InputContext and returns a dataset. "
                "Give `lambda context: dataset`, with the making of the dataset inside."
            )
        error = _refused_arguments(self.dataset_fn, None)
        if error is not None:
            raise UsageError(
                f"dataset_fn takes {inspect.signature(self.dataset_fn)}, and is called with one argument, the InputContext ({error}). "
                "Write `def dataset_fn(context):`."
            )

    def __call__(self, context: InputContext) -> Any:
        """Return the dataset of one worker."""
        return self.dataset_fn(context)


@dataclass(frozen=True)
class DistributedDataset:
    """Calls `dataset_fn` with an `InputContext` on each worker (T7.3)."""

    dataset_fn: Callable[[InputContext], Any]
    num_workers: int

    def __call__(self) -> Any:
        """Return this worker's dataset."""
        here = current_worker()
        if here is None:
            return iter(self)
        return self.dataset_fn(InputContext(self.num_workers, here.index, 1))

    def __iter__(self) -> Iterator[Any]:
        """Refuse: nobody would run it on the workers (behaviour 37)."""
        raise UsageError(
            "A distributed dataset was iterated over without a coordinator. Give it to coordinator.create_per_worker_dataset and schedule a "
            "function with its iterator."
        )


@dataclass(frozen=True)
class DatasetRecipe:
    """Makes a worker's dataset, by a function without arguments or as a copy of an iterable."""

    source: Callable[[], Iterable[Any]] | Iterable[Any]

    def __call__(self) -> Iterable[Any]:
        """Return the dataset; runs on the worker."""
        with _without_parameters():
            made = self.source() if callable(self.source) else self.source
        if not _iterable(made):
            raise UsageError(
                f"A dataset function returned {made!r}; it has to return something to iterate over: a DataLoader, a dataset, a "
                "generator. Is the return missing?"
            )
        return made


@dataclass(frozen=True)
class IteratorRecipe:
    """Makes a worker's iterator, from the start of its dataset; what a function returns may be used up, so that it is called anew."""

    dataset: DatasetRecipe

    def __call__(self) -> WorkerIterator:
        """Return the iterator; runs on the worker."""
        return WorkerIterator(_later(iter(self.dataset())))


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
    hook = nn.modules.module.register_module_parameter_registration_hook(_refuse_parameter)
    try:
        yield
    finally:
        hook.remove()


def _refuse_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:  # noqa: ARG001 - torch's signature
    """Raise where a dataset function makes parameters: each worker would have its own (T5.4, behaviour 32)."""
    here = current_worker()
    if here is not None and here.builds_dataset:
        raise UsageError(
            f"A dataset function made a parameter ({type(module).__name__}.{name}): every worker would train its own. Make layers "
            "with parameters outside of the function and use them inside."
        )


def as_dataset_recipe(source: Any) -> DatasetRecipe:
    """Check what `create_per_worker_dataset` was given: a live iterator cannot be in several places (T7.6, behaviour 34)."""
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
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def takes_context(function: Callable[..., Any]) -> bool:
    """Return whether a dataset function cannot be called without an argument, so that it wants an `InputContext`."""
    return _refused_arguments(function) is not None


def _refused_arguments(function: Callable[..., Any], *arguments: Any) -> TypeError | None:
    """Return why a function cannot be called so; None where it can, or is a built-in that does not say what it takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return error
    return None


def refuse_input_options(name: str, given: Any) -> None:
    """Raise a `UsageError` that says where each of TensorFlow's input options belongs here, unless `given` is None (T4.3)."""
    if given is not None:
        raise UsageError(
            f"{name}={given!r} would change nothing: workers take batches from the dataset as they come. Allowed: None. To read ahead, return "
            "a DataLoader with num_workers= and prefetch_factor=; for another batch size, use context.get_per_replica_batch_size in the "
            "dataset function; copy to a device in the training step."
        )


def refuse_captured(function: Callable[..., Any]) -> None:
    """Refuse a function that would take along from the coordinator a live iterator or a torch optimizer (behaviour 34).

    Looked at are its free variables and, where it is a script's or a notebook's own, the globals that it names.
    """
    try:
        found = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # no Python function, or a name of it has no value yet
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
