"""`DistributedDataset`: a dataset function that learns on which worker it runs (T4.3, T7.3)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.context import current_worker


@dataclass(frozen=True)
class InputContext:
    """What a dataset function is told about where it runs.

    Attributes:
        num_input_pipelines: of the whole cluster; usually one a worker.
        input_pipeline_id: this one, from 0.
        num_replicas_in_sync: replicas that share one step's batch: the devices of one worker, as workers do not wait for each other.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        """Check; raise `UsageError`."""
        for name, low in (("num_input_pipelines", 1), ("input_pipeline_id", 0), ("num_replicas_in_sync", 1)):
            _integer(name, getattr(self, name), low)
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise UsageError(
                f"input_pipeline_id={self.input_pipeline_id} must be below num_input_pipelines={self.num_input_pipelines}: "
                "they count from 0."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the examples that one replica takes of each step's batch.

        Raises:
            UsageError: the batch cannot be shared out evenly.
        """
        _integer("global_batch_size", global_batch_size, 1)
        each, left = divmod(global_batch_size, self.num_replicas_in_sync)
        if left:
            raise UsageError(
                f"global_batch_size={global_batch_size} must be a multiple of num_replicas_in_sync="
                f"{self.num_replicas_in_sync}. Give {global_batch_size - left or self.num_replicas_in_sync} or "
                f"{(each + 1) * self.num_replicas_in_sync}."
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
        """Refuse what cannot be called with a context.

        Raises:
            UsageError: it is a dataset already, or takes no argument, or needs more than one; there are input options.
        """
        refuse_input_options("input_options", self.input_options)
        if not callable(self.dataset_fn):
            raise UsageError(
                f"dataset_fn={self.dataset_fn!r} must be a function that takes an InputContext and returns a dataset. "
                "Give `lambda context: dataset`, with the making of the dataset inside."
            )
        try:
            signature = inspect.signature(self.dataset_fn)
        except (TypeError, ValueError):
            return  # a built-in that does not say what it takes
        try:
            signature.bind(None)
        except TypeError as error:
            raise UsageError(
                f"dataset_fn takes {signature}, and is called with one argument, the InputContext ({error}). Write "
                "`def dataset_fn(context):`."
            ) from error

    def __call__(self, context: InputContext) -> Any:
        """Return the dataset of one worker.

        Raises:
            UsageError: the function returned nothing that batches could be read from.
        """
        dataset = self.dataset_fn(context)
        if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"dataset_fn returned {dataset!r}, and has to return a Dataset, a DataLoader or another iterable of "
                "batches. Is the return missing?"
            )
        return dataset


def refuse_input_options(name: str, given: Any) -> None:
    """Raise a `UsageError` that says where each of TensorFlow's input options belongs here, unless `given` is None (T4.3)."""
    if given is not None:
        raise UsageError(
            f"{name}={given!r} would change nothing: workers take batches from the dataset as they come. Allowed: None. To read ahead, return "
            "a DataLoader with num_workers= and prefetch_factor=; for another batch size, use context.get_per_replica_batch_size in the "
            "dataset function; copy to a device in the training step."
        )


def takes_context(function: Callable[..., Any]) -> bool:
    """Return whether a dataset function cannot be called without an argument, so that it wants an `InputContext`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind()
    except TypeError:
        return True
    return False


def _integer(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"{name}={value!r} must be an integer of at least {low}.")


class DistributedDataset:
    """Calls `dataset_fn` with an `InputContext` on each worker.

    Args:
        dataset_fn: takes an `InputContext` and returns a dataset.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], num_workers: int) -> None:
        self._dataset_fn, self._num_workers = dataset_fn, num_workers

    def __call__(self) -> Any:
        """Return this worker's dataset."""
        here = current_worker()
        if here is None:
            raise UsageError(_USED_DIRECTLY)
        return self._dataset_fn(InputContext(self._num_workers, here.index, 1))

    def __iter__(self) -> Any:
        """Refuse: nobody would run it on the workers (behaviour 37)."""
        raise UsageError(_USED_DIRECTLY)


_USED_DIRECTLY = (
    "A distributed dataset was iterated over without a coordinator. Give it to coordinator.create_per_worker_dataset and schedule a "
    "function with its iterator."
)
