"""`ParameterServerStrategy`: where variables are placed, and how a module's parameters come to live on the servers (T3)."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from workbench.checks import check_integer
from workbench.errors import UsageError, nearest
from workbench.parameter_server.context import current_worker
from workbench.parameter_server.data.datasets import DistributedDataset, refuse_input_options
from workbench.parameter_server.servers.layout import Partitioner, check_placeable, lay_out, split_rows
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.server import Place
from workbench.parameter_server.servers.tables import Embeddings
from workbench.parameter_server.servers.variable import ShardedVariable, Variable

if TYPE_CHECKING:
    from workbench.config import TrainConfig
    from workbench.parameter_server.cluster.cluster import Cluster


def compute_average_loss(
    per_example_loss: Tensor, sample_weight: Any = None, global_batch_size: int | None = None
) -> Tensor:
    """Return the sum of losses, each times its weight, over the size of the global batch (T5.9).

    Where several workers share a batch, their results and their gradients add up to those of the whole, however unequal the shares.

    Args:
        per_example_loss: (examples, ...), not reduced: reduction="none" of torch's losses.
        sample_weight: one number, one an example or one a loss. As in TensorFlow the sum is not divided by the weights' sum.
        global_batch_size: examples of all shares together; None is those that are given.
    """
    losses = per_example_loss
    if not isinstance(losses, Tensor) or not losses.dim():
        raise UsageError(f"per_example_loss={losses!r} must be a tensor of one loss an example: reduction='none'.")
    size = check_integer(
        "global_batch_size", len(losses) if global_batch_size is None else global_batch_size, error=UsageError
    )
    if sample_weight is None:
        return losses.sum() / size
    weights = torch.as_tensor(sample_weight).to(losses)
    if weights.dim() == losses.dim() + 1:
        weights = weights.squeeze(-1)
    try:
        each = weights.reshape(*weights.shape, *[1] * (losses.dim() - weights.dim())).expand_as(losses)
    except RuntimeError:
        raise UsageError(
            f"sample_weight of shape {tuple(weights.shape)} does not go with losses of shape {tuple(losses.shape)}: give one weight an example."
        ) from None
    return (losses * each).sum() / size


class OneReplica:
    """What a strategy is on a worker and on the coordinator alike: one replica to run and to reduce over (T5.3, T5.10)."""

    num_replicas_in_sync: ClassVar[int] = 1  # of a worker: workers do not wait for each other

    if not TYPE_CHECKING:  # which finds a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            """Say what there is, where something that needs several replicas of a worker is asked for."""
            raise AttributeError(
                f"A wb.ps.Strategy has no {name!r}: a worker has one replica, on the CPU, and `run` returns its result as it is; start more workers "
                f"in place of devices.{nearest(name, [each for each in dir(self) if not each.startswith('_')])}"
            )

    def run(
        self, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `function` once for each replica of this worker and return its result; a worker here has one.

        Outside of a scheduled function it runs on the coordinator, and warns (behaviour 22).
        """
        _warn_outside("run")
        return function(*args, **kwargs or {})

    def reduce(self, op: Literal["sum", "mean"], value: Tensor, axis: int | None = None) -> Tensor:
        """Reduce the replicas' values, and an axis of them where one is given, to one."""
        name = str(op).lower()
        if name not in ("sum", "mean"):
            raise UsageError(f"reduce got op={op!r}. Allowed: 'sum', 'mean'.")
        _warn_outside("reduce")
        if axis is None:
            return value
        return value.sum(axis) if name == "sum" else value.mean(axis)


@dataclass(frozen=True)
class StrategyOnWorker(OneReplica):
    """A strategy that travelled to a worker with a function; what lives on servers is made on the coordinator."""

    num_workers: int

    def variable(self, *_: Any, **__: Any) -> Any:
        """Refuse, and so does `place`."""
        refuse_on_worker("a variable or placed a module")

    place = variable


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
            stacklevel=3,
        )


class ParameterServerStrategy(OneReplica):
    """Places variables on the parameter servers of a cluster, in turn (T3.8), in shards where a partitioner says so (T3.3).

    Args:
        variable_partitioner: called with shape and dtype of every variable; returns the number of shards along each axis.
        exactly_once: a function that runs again because its worker died does not write twice. False is the source's behaviour,
            at least once (T6.4).

    Raises:
        UsageError: `cluster` is none, or the partitioner no function.
    """

    def __init__(
        self, cluster: Cluster, *, variable_partitioner: Partitioner | None = None, exactly_once: bool = True
    ) -> None:
        if not hasattr(cluster, "engine"):
            raise UsageError(
                f"wb.ps.Strategy takes a cluster that is up, not {type(cluster).__name__}: create_in_process_cluster(num_workers, num_ps)."
            )
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise UsageError(
                f"variable_partitioner={variable_partitioner!r} must be a function of shape and dtype that returns the number of shards along "
                "each axis, such as FixedShardsPartitioner(2)."
            )
        self.cluster, self.exactly_once = cluster, exactly_once
        self._partitioner = variable_partitioner
        self._servers = itertools.cycle(range(cluster.num_ps))
        self.coordinator: Callable[[], Any] = lambda: None  # returns that of this strategy, where it has one

    def __reduce__(self) -> tuple[type[StrategyOnWorker], tuple[int]]:
        """Travel to a worker as what can be used there."""
        return StrategyOnWorker, (self.num_workers,)

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return self.cluster.num_workers

    @contextlib.contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Return itself, for programs that have this line: what is placed on servers is what `variable` and `place` make, wherever."""
        yield self

    def variable(self, value: Any, *, name: str | None = None) -> Variable | ShardedVariable:
        """Place a variable on the servers.

        Args:
            value: initial value, a number, array or tensor.
            name: unique; None counts. The servers free what nobody holds any more.

        Raises:
            UsageError: inside a dataset function (T5.4), or any function on a worker; a name that is taken; a partitioner that returns nonsense.
        """
        here = current_worker()
        if here is not None and here.builds_dataset:
            raise UsageError(
                "A dataset function made a variable: every worker would make its own. Make variables outside of the function."
            )
        refuse_on_worker("a variable")
        self.cluster.sweep()
        name = self.cluster.unique(name or "variable")
        whole = torch.as_tensor(value).detach().cpu()
        shape, dtype = whole.shape, whole.dtype
        shards = split_rows(self._partitioner, shape, dtype)
        made = []
        for number, (offset, count) in enumerate(shards):
            part_shape = (count, *shape[1:]) if shape else ()
            given = whole[offset : offset + count] if shape else whole
            label = name if len(shards) == 1 else f"{name}/shard_{number}"
            place = Place(next(self._servers), label)
            self.cluster.engine.plane.ask(place.server, "create", label, given.contiguous().reshape(-1))
            made.append(Variable(label, part_shape, dtype, place, self.cluster.id, exactly_once=self.exactly_once))
            self.cluster.frees(made[-1], label, [place])
        return made[0] if len(made) == 1 else ShardedVariable(made, name)

    def place(
        self, module: nn.Module, config: TrainConfig, *, name: str | None = None, embeddings: Embeddings = None
    ) -> PlacedModule:
        """Let the parameters of a module live on the servers, updated there (T1.1).

        The shards of all its parameters on one server lie together, their optimizer slots beside them (behaviour 72).

        Args:
            module: with its initial values; it is left as it is. What needs no gradient stays in it, and is placed nowhere.
            config: optimizer, its constants, lr schedule and max_grad_norm of the updates. Parts of a model that shall have different
                ones are placed one by one.
            name: unique; None counts.
            embeddings: how each trained `nn.Embedding` and `nn.EmbeddingBag` is kept. A worker asks for the rows of its batch and
                sends their gradient alone; it never holds the table, and the module that it computes with has no such parameter. None does so
                for tables of 256 KiB and more, and updates them as the config's optimizer updates a whole parameter, rows that the
                batch did not have included. "sgd", "lazy_momentum", "lazy_adam", "adagrad" or "ftrl", or a `RowRule`, updates the rows of
                the batch alone, in time that does not grow with the table. "whole" lets tables travel as any other parameter does.

        Raises:
            UsageError: the module or the config is none that servers can train; see `check_placeable`.
        """
        refuse_on_worker("a placed module")
        check_placeable(module, config)
        self.cluster.sweep()
        name = self.cluster.unique(name or type(module).__name__.lower())
        parts, tables = lay_out(
            module, embeddings, self._partitioner, self._servers, name=name, cluster=self.cluster.id
        )
        placed = PlacedModule(
            module, config, parts, tables, name=name, cluster=self.cluster.id, exactly_once=self.exactly_once
        )
        self.cluster.frees(placed, placed.name, [*placed.all_places, placed.settings])
        return placed

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: Any = None
    ) -> Callable[[], Any]:
        """Return a function for `create_per_worker_dataset` that calls `dataset_fn` with this worker's `InputContext` (T7.3)."""
        refuse_input_options("options", options)
        return DistributedDataset(dataset_fn, self.num_workers)
