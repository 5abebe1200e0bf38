"""`DistributedDataset`: a dataset function that learns on which worker it runs (T4.3, T7.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.context import current_worker
from workbench.parameter_server.data.input_context import InputContext

__all__ = ["DistributedDataset"]


class DistributedDataset:
    """Calls `dataset_fn` with an `InputContext` on each worker.

    Args:
        dataset_fn: takes an `InputContext` and returns a dataset.
        num_workers: of the cluster.
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
