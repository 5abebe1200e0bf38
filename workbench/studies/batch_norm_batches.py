"""What batch norm sees: the statistics of one batch after the other, layer by layer, with the weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.diagnostics.batch_norm_merge import merge_statistics
from workbench.train.batch_norm import batch_norm_layers
from workbench.train.rng import isolated_rng

__all__ = ["BatchStatistics", "batch_statistics", "running_statistics", "statistics_set", "tracking_layers"]


class BatchStatistics(NamedTuple):
    """The batches that one layer saw.

    Attributes:
        mean: of each batch, shape (batches, channels).
        variance: unbiased, the same shape.
        examples: that the layer was given in each batch, shape (batches,).
        values: per channel that make a statistic, shape (batches,): examples times places.
    """

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    examples: NDArray[np.int64]
    values: NDArray[np.int64]

    @property
    def together(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance over all batches, each shape (channels,)."""
        biased = self.variance * ((self.values - 1) / self.values)[:, None]
        merged = merge_statistics(self.mean, biased, self.values)
        return merged.mean, merged.variance

    def average(self, momentum: float | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what running statistics are after these batches, were they warm, each shape (channels,)."""
        count = len(self.mean)
        weight = np.ones(count) if momentum is None else (1 - momentum) ** np.arange(count - 1, -1, -1.0)
        share = (weight / weight.sum())[:, None]
        return (share * self.mean).sum(0), (share * self.variance).sum(0)


def tracking_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norm layers that keep running statistics, by name."""
    return {name: layer for name, layer in batch_norm_layers(model).items() if layer.running_mean is not None}


def running_statistics(layer: _BatchNorm) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Return a layer's running mean and variance, each shape (channels,), and the batches that it has seen."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    batches = 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
    return _array(layer.running_mean), _array(layer.running_var), batches


def batch_statistics(
    model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any]
) -> dict[str, BatchStatistics]:
    """Return the statistics of every batch in every layer; model and random state are left bit for bit as they were.

    The forward pass is that of training, dropout included, without gradients. Layers that a forward pass does not reach are left
    out. A layer with a set number of statistic examples reports those of its subsample.

    Args:
        model: whose weights are used; layers without running statistics are left out.
        batches: inputs, one after the other.
        forward: called with the model and a batch.
    """
    layers = tracking_layers(model)
    rows: dict[str, list[tuple[NDArray[np.float64], NDArray[np.float64], int, int]]] = {name: [] for name in layers}
    given: dict[str, tuple[int, int]] = {}
    handles = [layer.register_forward_pre_hook(_noting(given, name)) for name, layer in layers.items()]
    try:
        with _probed(model, layers.values()), torch.no_grad(), isolated_rng():
            for batch in batches:
                given.clear()
                forward(model, batch)
                for name, (examples, places) in given.items():
                    mean, variance, _ = running_statistics(layers[name])
                    used = min(examples, int(getattr(layers[name], "stat_examples", None) or examples))
                    rows[name].append((mean, variance, used, used * places))
    finally:
        for handle in handles:
            handle.remove()
    return {name: BatchStatistics(*map(np.array, zip(*seen, strict=True))) for name, seen in rows.items() if seen}


@contextmanager
def statistics_set(
    model: nn.Module, statistics: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
) -> Iterator[nn.Module]:
    """Have other running statistics in the model inside the block: a mean and a variance for each named layer."""
    layers = tracking_layers(model)
    kept = [
        (b, b.clone()) for layer in layers.values() for b in (layer.running_mean, layer.running_var) if b is not None
    ]
    try:
        for name, values in statistics.items():
            for own, array in zip((layers[name].running_mean, layers[name].running_var), values, strict=True):
                assert own is not None
                own.copy_(torch.from_numpy(array))
        yield model
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


def _noting(given: dict[str, tuple[int, int]], name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def note(module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
        given[name] = (len(args[0]), int(args[0][0, 0].numel()) if len(args[0]) else 0)

    return note


@contextmanager
def _probed(model: nn.Module, layers: Iterable[_BatchNorm]) -> Iterator[None]:
    """Let running statistics be those of the last batch inside the block, and put modes, buffers and momentum back after it."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    momenta = [(layer, layer.momentum) for layer in layers]
    try:
        model.train()
        for layer, _ in momenta:
            layer.momentum = 1.0
        yield
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in momenta:
            layer.momentum = momentum
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _array(tensor: Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = tensor.detach().cpu().double().numpy().copy()
    return values
