"""What an example costs in memory, in training and in evaluation: measured, because that is why evaluation batches may be larger (P2.7)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.config import TrainConfig
from workbench.train.batches import eval_batches
from workbench.train.evaluation import eval_mode
from workbench.train.forward import autocast, per_example
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload

__all__ = ["memory_per_example", "peak_bytes"]


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that tensors made by `function` take at a time, on top of those that are there before.

    On CUDA the allocator counts; elsewhere the storages of all results of operations do, from the first tensor to the last. What
    an operation needs inside itself is then not seen.

    Args:
        function: to run once.
        device: where its tensors are.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with _LiveStorages() as live:
        function()
    return int(live.peak)


def memory_per_example(
    workload: Workload, config: TrainConfig, device: torch.device, *, examples: int | None = None
) -> dict[str, float]:
    """Return bytes per example at the peak of a training step and of an evaluation batch.

    The difference between two batch sizes, divided by that of their examples: weights and gradients, which do not grow with the
    batch, drop out. Random state and caller are left as they were.

    Args:
        workload: what is run, on examples of the validation split.
        config: its precision counts.
        device: where.
        examples: of the larger batch, the smaller has half of them; None is the config's batch size. In a batch so small that
            gradients are the larger part of the peak, what an example adds is hidden behind them.
    """
    with isolated_rng():
        model = build_model(workload, config, device)
        small = max(1, min(examples or config.batch_size, len(workload.validation_data)) // 2)
        found = {}
        for name, step in (("training", _train), ("evaluation", _evaluate)):
            peaks = []
            for size in (small, 2 * small):
                batch, count = next(eval_batches(workload, "validation", size, device, config.precision))

                def once(batch: Any = batch, count: int = count, step: Any = step) -> None:
                    with autocast(device, config.precision):
                        step(workload, model, batch, count)

                once()  # gradients, and what is filled at a first call, are there from now on
                peaks.append(peak_bytes(once, device))
            found[f"{name}_bytes_per_example"] = (peaks[1] - peaks[0]) / small
        return found | {"examples": float(small)}


def _train(workload: Workload, model: torch.nn.Module, batch: Any, count: int) -> None:
    model.train()
    _, losses, _ = per_example(workload, model, batch, count)
    losses.mean().backward()  # type: ignore[no-untyped-call]


def _evaluate(workload: Workload, model: torch.nn.Module, batch: Any, count: int) -> None:
    with torch.no_grad(), eval_mode(model):
        per_example(workload, model, batch, count)


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, for as long as each of them lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):  # what was there before does not count
            if isinstance(leaf, Tensor):
                self._meet(leaf, new=False)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf, new=True)
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, tensor: Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0

        def gone(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
