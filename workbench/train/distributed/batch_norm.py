"""Batch norm over all processes of a group (P6.3, on CPU as well, where torch's `SyncBatchNorm` refuses), and running statistics merged by the law of total variance (P6.7).

An average of running variances leaves out how far the means of the processes lie apart.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _get_current_dispatch_mode

from workbench.errors import UsageError
from workbench.train.distributed.merge_statistics import merge_statistics
from workbench.workloads.batch_norm import (
    GhostBatchNorm,
    batch_norm_layers,
    drawn_examples,
    like,
    normalise,
    plain_name,
    swap_batch_norm,
    track,
)

Group = Any  # A `torch.distributed.ProcessGroup`; None is the default one


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of the batches of all processes together, forward and backward (P6.3).

    Made by `synchronise_batch_norm`. What a process would compute on the whole batch, each computes on its part: batches may
    differ in size from one process to the next, and may be empty. One exchange of 2 numbers per channel forward, one backward;
    every process has to call each layer equally often. In evaluation nothing is exchanged.
    """

    group: Group
    stat_examples: int | None
    """Examples of all processes in a statistic, each of them contributing an equal part; None is all."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised part of this process, shape (examples, channels, ...)."""
        self._check_input_dim(input)
        rank, world = place(self.group) if self.training else (0, 1)
        if not self.training or (world == 1 and self.stat_examples is None):
            return super().forward(input)
        sample = input
        if self.stat_examples is not None:
            share = self.stat_examples // world + (rank < self.stat_examples % world)
            sample = input[drawn_examples(len(input), share, input.device)] if share < len(input) else input
        wide = torch.float32 if input.dtype in (torch.bfloat16, torch.float16) else input.dtype
        values = sample.numel() // self.num_features
        mean, var = _moments(sample.to(wide))
        counted = mean.new_tensor(values)
        if world > 1:
            if _get_current_dispatch_mode() is not None:
                float(mean.detach().sum())  # a recorder of operations refuses this, and must not repeat an exchange
            mean, var, counted = _Merge.apply(mean, var, values, self.group)  # type: ignore[no-untyped-call]
        if values < 2 and float(counted) < 2:  # in this order: reading the sum waits for the device
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {values} in {world} process(es)"
            )
        if self.running_mean is not None:
            track(self, mean.detach(), var.detach() * (counted / (counted - 1)))
        return normalise(self, input, mean, var)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"expected an input of shape (examples, {self.num_features}, ...), got {tuple(input.shape)}"
            )


def _moments(sample: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel; zeros for no examples, from which gradients still flow."""
    dims = [0, *range(2, sample.dim())]
    if not sample.numel():
        nothing = sample.sum(dims)
        return nothing, nothing
    var, mean = torch.var_mean(sample, dim=dims, correction=0)
    return mean, var


class _Merge(torch.autograd.Function):
    """Mean and variance of all processes' values from those of each, by the law of total variance."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, values: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and number of the values of all processes."""
        own = torch.cat([mean, var, mean.new_tensor([values])])
        parts = [torch.empty_like(own) for _ in range(place(group)[1])]
        dist.all_gather(parts, own, group=group)
        rows = torch.stack(parts)
        means, variances, counts = rows[:, : len(mean)], rows[:, len(mean) : -1], rows[:, -1:]
        total = counts.sum().clamp(min=1)
        share = counts / total
        together = (share * means).sum(0)
        spread = (share * (means - together) ** 2).sum(0)
        ctx.group, ctx.share = group, values / float(total)
        ctx.save_for_backward(mean - together)
        counted = counts.sum()
        ctx.mark_non_differentiable(counted)
        return together, (share * variances).sum(0) + spread, counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return what all processes' losses ask of this process's mean and variance."""
        both = torch.cat(grads[:2]).contiguous()
        dist.all_reduce(both, group=ctx.group)
        (apart,) = ctx.saved_tensors
        for_mean, for_var = both[: len(apart)], both[len(apart) :]
        return ctx.share * (for_mean + 2 * apart * for_var), ctx.share * for_var, None, None


def synchronise_batch_norm(model: nn.Module, group: Group = None) -> nn.Module:
    """Return the model with every batch norm layer taking its statistics over all processes of a group.

    Parameters and buffers stay the same objects, and checkpoints fit both ways. A layer with a set number of statistic examples
    (`bn_stat_examples`) takes so many of all processes together. A model without batch norm is returned as it is.

        model = wb.batch_norm.synchronise(model)  # before DistributedDataParallel(model)

    Args:
        model: changed in place; the returned one differs where it is a batch norm layer itself.
        group: of processes; None is the default one.

    Raises:
        ConfigError: a layer has a `forward` of its own.

    Source: P6.3, P7.3; on CUDA it does what `torch.nn.SyncBatchNorm.convert_sync_batchnorm` does, which refuses CPU tensors.
    """

    def synchronised(layer: _BatchNorm) -> nn.Module:
        asked = layer.stat_examples if isinstance(layer, (GhostBatchNorm, SynchronisedBatchNorm)) else None
        return like(layer, SynchronisedBatchNorm, stat_examples=asked, group=group)

    return swap_batch_norm(model, synchronised)


def statistic_processes(layer: nn.Module) -> int:
    """Return how many processes' batches make one statistic of a batch norm layer."""
    if isinstance(layer, SynchronisedBatchNorm):
        return place(layer.group)[1]
    if isinstance(layer, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(layer.process_group)
    return 1


def place(group: Group) -> tuple[int, int]:
    """Return the rank and the number of processes of a group; (0, 1) where nothing is distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    started = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if started > 1:
        raise UsageError(
            f"WORLD_SIZE={started}, but the process group is not initialised, so batch norm cannot reach the other processes: call "
            "torch.distributed.init_process_group(...) first."
        )
    return 0, 1


class LayerStatistics(NamedTuple):
    """Running statistics of one batch norm layer on every process: mean and variance have the shape (processes, channels)."""

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    batches: NDArray[np.float64]  # seen by each process, shape (processes,)
    examples: NDArray[np.float64]  # that stand for each process, shape (processes,)


def gather_running_statistics(
    model: nn.Module, group: Group = None, *, examples: float = 1.0
) -> dict[str, LayerStatistics]:
    """Return the running statistics of every process, the same on all of them; every process has to call it.

    Args:
        model: the module of this process, wrapped or not.
        group: of processes; None is the default one. Without one, this process is the only one.
        examples: that this process's statistics stand for; equal numbers, such as the default, weigh all processes alike.

    Raises:
        UsageError: the processes' models do not have the same batch norm layers, or `examples` is negative.
    """
    if not 0 <= examples < float("inf"):
        raise UsageError(f"examples={examples!r} must be finite and at least 0: what this process has trained on.")
    layers = _tracking(model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    buffers = [
        b for layer in layers.values() for b in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    ]
    parts = [
        torch.tensor([examples], dtype=torch.float64),
        *(buffer.detach().reshape(-1) for buffer in buffers if buffer is not None),
    ]
    rows = _gathered(torch.cat([part.to(device=device, dtype=torch.float64) for part in parts]), group)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    weight, *columns = np.split(rows, ends, axis=1)
    return {
        name: LayerStatistics(mean, variance, batches[:, 0], weight[:, 0])
        for name, mean, variance, batches in zip(layers, columns[::3], columns[1::3], columns[2::3], strict=True)
    }


def merge_running_statistics(
    model: nn.Module, group: Group = None, *, examples: float = 1.0
) -> dict[str, LayerStatistics]:
    """Make the running statistics of all processes equal, in place, and return what they were; every process has to call it.

    Do it before evaluating and before writing a checkpoint (P6.7, P7.3), not at every step. Layers that are equal already
    keep their bits. Training that goes on from merged variances forgets the spread of the means again; to evaluate in
    the middle of it, `merged_running_statistics` puts each process's own statistics back.

    Args:
        model: the module of this process, wrapped or not.
        group: of processes; None is the default one.
        examples: that this process's statistics stand for: its weight.

    Raises:
        UsageError: the processes' models do not have the same batch norm layers, or an argument is out of its range.

    Source: P6.7, P7.3.
    """
    found = gather_running_statistics(model, group, examples=examples)
    layers = _tracking(model)
    for name, each in found.items():
        if (each.mean == each.mean[0]).all() and (each.variance == each.variance[0]).all():
            continue
        merged = merge_statistics(each.mean, each.variance, each.examples)
        for buffer, value in ((layers[name].running_mean, merged.mean), (layers[name].running_var, merged.variance)):
            assert buffer is not None
            buffer.copy_(torch.from_numpy(value))
    return found


@contextmanager
def merged_running_statistics(model: nn.Module) -> Iterator[dict[str, LayerStatistics]]:
    """Have merged running statistics inside the block, and each process its own again after it."""
    layers = _tracking(model).values()
    kept = [(b, b.clone()) for layer in layers for b in (layer.running_mean, layer.running_var) if b is not None]
    try:
        yield merge_running_statistics(model)
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _tracking(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers with running statistics by name, whatever the model is wrapped in."""
    return {
        plain_name(name): layer
        for name, layer in batch_norm_layers(model).items()
        if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None
    }


def _gathered(own: Tensor, group: Group) -> NDArray[np.float64]:
    """Return the vector of every process, shape (processes, numbers)."""
    _, world = place(group)
    if world == 1:
        return own.cpu().numpy()[None].astype(np.float64)
    length = torch.tensor([len(own)], device=own.device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    if len({int(n) for n in lengths}) > 1:
        raise UsageError(
            f"the processes hold {', '.join(str(int(n) - 1) for n in lengths)} numbers of running statistics: every process "
            "must have the same model."
        )
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts).cpu().numpy().astype(np.float64)
