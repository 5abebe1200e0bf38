"""`TrainerWatch`: the same facts of `workbench.Trainer`, which updates all parameters at once and by no torch optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from workbench.topics.hosts.audit.buffers import BufferWatch
from workbench.topics.hosts.audit.hashing import hash_of
from workbench.topics.hosts.audit.loaders import LoaderWatch
from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State, looked_at
from workbench.topics.hosts.audit.updates import UpdateWatch
from workbench.workloads.items import in_its_own_order

__all__ = ["TrainerWatch"]


class TrainerWatch:
    """Watches the trainer where the training that is observed uses it; nothing of it is loaded otherwise.

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
        updates: takes the updates.
        loaders: takes the orders of the examples.
        buffers: takes running statistics of checkpoints.
    """

    def __init__(
        self, state: State, patches: Patches, updates: UpdateWatch, loaders: LoaderWatch, buffers: BufferWatch
    ) -> None:
        self._state, self._patches = state, patches
        self._updates, self._loaders, self._buffers = updates, loaders, buffers
        self._installed = False
        self.install()

    def install(self) -> None:
        """Begin to watch, if the trainer has been imported; it is asked again when a process group begins."""
        run = sys.modules.get("workbench.train.loop")
        if run is None or self._installed:
            return
        self._installed = True
        self._patches.wrap(run, "Step", self._on_step)
        self._patches.wrap(run, "clip_by_norm", self._on_clip)
        self._patches.wrap(run, "Checkpoint", self._on_checkpoint)
        self._patches.wrap(sys.modules["workbench.train.batches"], "_positions", self._on_positions)
        self._patches.wrap(
            sys.modules["workbench.train.distributed.process_group"].HostGroup, "sum_and_gather", self._on_sum
        )
        self._patches.wrap(sys.modules["workbench.train.distributed.data_parallel"], "evaluate_shard", self._on_shard)
        self._loaders.known.add("train")

    def _on_step(self, original: Any) -> Callable[..., Any]:
        """A step is described when its update is known and before it is made: the parameters are those before it."""

        def step(*fields: Any) -> Any:
            made = original(*fields)
            if looked_at(self._state.step):
                used, norm = hash_of([made.grad]), hash_of([made.grad_norm])
                self._updates.begin(0, self._state.step, [made.params], used=used, before_clip=norm)
            self._updates.end()
            return made

        return step

    def _on_clip(self, original: Any) -> Callable[..., Any]:
        def clip(grad: Tensor, norm: Tensor, max_grad_norm: Any, **kwargs: Any) -> Any:
            limit = max_grad_norm.flatten()[0] if isinstance(max_grad_norm, Tensor) else max_grad_norm
            self._updates.clipped("clip_grad_norm_", limit, norm.flatten()[0].clone())
            return original(grad, norm, max_grad_norm, **kwargs)

        return clip

    def _on_checkpoint(self, original: Any) -> Callable[..., Any]:
        def checkpoint(step: int, model: Mapping[str, Tensor], *rest: Any) -> Any:
            ends = ("running_mean", "running_var")
            names = [name.removesuffix(ends[0]) for name in model if name.endswith(ends[0])]
            self._buffers.note([(model[n + ends[0]], model[n + ends[1]]) for n in names], "checkpoint")
            return original(step, model, *rest)

        return checkpoint

    def _on_positions(self, original: Any) -> Callable[..., Any]:
        def positions(examples: int, config: Any, whole: int, *args: Any) -> Iterator[Tensor]:
            for order in original(examples, config, whole, *args):
                if order.shape[1] < whole:  # not the batches by which one host knows the workload again
                    self._loaders.add_order(examples, order)
                yield order

        return positions

    def _on_shard(self, original: Any) -> Callable[..., Any]:
        def evaluate_shard(workload: Any, model: Any, shard: int, shards: int, *, split: str, **kwargs: Any) -> Any:
            data = workload.data(split)
            if not in_its_own_order(data):
                self._loaders.add_evaluation(data, range(shard, len(data), shards))
            self._loaders.known.add(split)
            try:
                return original(workload, model, shard, shards, split=split, **kwargs)
            finally:
                self._loaders.known.discard(split)

        return evaluate_shard

    def _on_sum(self, original: Any) -> Callable[..., Any]:
        def sum_and_gather(*args: Any, **kwargs: Any) -> Any:
            with self._state.waiting("the average of the gradients"):
                return original(*args, **kwargs)

        return sum_and_gather
