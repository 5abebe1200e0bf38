"""`StrategyOnWorker`: what a strategy is inside of a scheduled function: one replica to run and to reduce over (T5.3, T5.10)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from workbench.errors import UsageError
from workbench.parameter_server.context import current_worker


def run_replicas(function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    """Call `function` for the one replica of this worker; see `ParameterServerStrategy.run`."""
    _warn_outside("run")
    return function(*args)


def reduce_replicas(op: Literal["sum", "mean"], value: Tensor, axis: int | None = None) -> Tensor:
    """Reduce over the one replica, and an axis where one is given; see `ParameterServerStrategy.reduce`."""
    name = str(op).lower()
    if name not in ("sum", "mean"):
        raise UsageError(f"reduce got op={op!r}. Allowed: 'sum', 'mean'.")
    _warn_outside("reduce")
    if axis is None:
        return value
    return value.sum(axis) if name == "sum" else value.mean(axis)


@dataclass(frozen=True)
class StrategyOnWorker:
    """A strategy that travelled to a worker with a function: it runs and reduces; what is made on servers is made on the coordinator."""

    num_workers: int

    def run(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """See `ParameterServerStrategy.run`."""
        return run_replicas(function, args)

    def reduce(self, op: Literal["sum", "mean"], value: Tensor, axis: int | None = None) -> Tensor:
        """See `ParameterServerStrategy.reduce`."""
        return reduce_replicas(op, value, axis)

    def variable(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        refuse_on_worker("a variable")

    def place(self, *_: Any, **__: Any) -> Any:
        """Refuse."""
        refuse_on_worker("a placed module")


def refuse_on_worker(what: str) -> None:
    """Raise `UsageError` where a function on a worker makes what lives on the servers: each run of it would make another one."""
    if current_worker() is not None:
        raise UsageError(
            f"A scheduled function made {what}: each time that it runs there would be another one. Make it on the coordinator, and "
            "give it as an argument."
        )


def _warn_outside(what: str) -> None:
    if current_worker() is None:
        warnings.warn(
            f"strategy.{what} was called outside of a scheduled function: it runs on the coordinator. Use coordinator.schedule.",
            stacklevel=4,
        )
