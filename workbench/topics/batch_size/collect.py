"""The gradient noise scale: how many examples a gradient needs until its noise is as large as itself (F6.5)."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.train.batches import train_batches
from workbench.train.checkpoint import load_model
from workbench.train.forward import explained
from workbench.train.gradients import LoopGradients
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload
from workbench.workloads.batch_norm import batch_norm_layers

GROUPS = 8  # of micro-batches, each left out once for the interval (rule of thumb)
MAX_BYTES = 4 * 2**30  # what the sums of the groups may take; a larger model is not measured (rule of thumb)
COLUMNS = 2**20  # parameters whose products are summed in float64 at a time


class NoiseScale(NamedTuple):
    """The noise scale of one model on its training data, in examples.

    Attributes:
        value: trace of the covariance of the examples' gradients over the squared length of their mean; inf where the mean
            cannot be told from noise.
        low, high: 95 % interval; high is inf where the interval of the squared length reaches 0.
        examples, micro_batch: gradients of how many examples went in, and how many a measured gradient is the mean of.
    """

    value: float
    low: float
    high: float
    examples: int
    micro_batch: int


def measure_noise_scale(
    workload: Workload, config: TrainConfig, device: torch.device, *, checkpoint: Path | None = None, micro_batches: int = 64,
    micro_batch: int | None = None, max_bytes: int = MAX_BYTES,
) -> NoiseScale | str:  # fmt: skip
    """Measure the noise scale B_simple on training data, with the model in training mode, or say in words why there is none.

    Unbiased estimates of the squared gradient and of the trace from the spread of micro-batch gradients, its interval by
    leaving out one of eight groups at a time, on the logarithm. Where batch norm is used, an example's gradient depends on
    its micro-batch, and so does what is measured. The caller's random state is left bit for bit as it was.

    Args:
        checkpoint: weights to load; None is the model at its initialisation.
        micro_batches: how many gradients, at most; fewer where the training data do not last.
        micro_batch: examples in each; None is a quarter of the batch, or less where the training data are few, at least one, or two
            where there is batch norm.
        max_bytes: that eight sums of gradients may take: 32 bytes a parameter in float32, 64 in float64.

    Source: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1.
    """
    data: Any = workload.train_data
    there = len(data) if hasattr(data, "__len__") else math.inf
    with isolated_rng():
        stack = LaneStack(workload, [config], device)
        model = stack.models[0].train()
        size = micro_batch or max(
            2 if batch_norm_layers(model) else 1, int(min(config.batch_size // 4, there // (2 * GROUPS)))
        )
        count = int(min(micro_batches, there // size))
        per_group = count // GROUPS
        if per_group < 2:
            return f"the training data have {count} micro-batches of {size}, and the noise scale takes {2 * GROUPS}"
        if checkpoint is not None:
            load_model(model, checkpoint).train()
        needed = GROUPS * stack.values.shape[1] * _sum_type(stack.grad).itemsize
        if needed > max_bytes:
            gib, limit = (f"{count / 2**30:.2g} GiB" for count in (needed, max_bytes))
            return f"the sums of {GROUPS} groups of gradients would take {gib}, more than the limit of {limit}"
        small = config.replace(batch_size=size, accumulate_steps=1, eval_batch_size=None)
        products, squares = _collect(workload, small, stack, device, per_group)
    if not (torch.isfinite(products).all() and torch.isfinite(squares).all()):
        return "a gradient is not finite"
    return _estimate(products, squares, per_group, size)


def _collect(
    workload: Workload, config: TrainConfig, stack: LaneStack, device: torch.device, per_group: int
) -> tuple[Tensor, Tensor]:
    """Return the products of the groups' sums of gradients, (groups, groups), and the sums of squared lengths, (groups,)."""

    def wide(part: Tensor) -> Tensor:
        return (part.cpu() if part.device.type == "mps" else part).double()  # mps has no float64

    gradients = LoopGradients(workload, stack)
    batches: Iterator[Any] = train_batches(workload, config, device)
    sums = torch.zeros(GROUPS, stack.values.shape[1], dtype=_sum_type(stack.grad), device=device)
    squares = torch.zeros(GROUPS, dtype=torch.float64)
    for group in range(GROUPS):
        for _ in range(per_group):
            with explained(workload, "in a gradient of its noise scale"):
                gradients([next(batches)])
            sums[group] += stack.grad[0]
            for part in torch.split(stack.grad[0], COLUMNS):
                squares[group] += float(wide(part).square().sum())
    products = torch.zeros(GROUPS, GROUPS, dtype=torch.float64)
    for part in torch.split(sums, COLUMNS, dim=1):
        products += (wide(part) @ wide(part).T).cpu()
    return products, squares


def _sum_type(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _estimate(products: Tensor, squares: Tensor, per_group: int, size: int) -> NoiseScale:
    """Return the noise scale from what `_collect` returns: all that it needs are squared lengths of sums over groups."""

    def parts(kept: Tensor) -> tuple[float, float]:
        """Return unbiased estimates of the trace for one example and of the squared length of the true gradient."""
        count = int(kept.sum()) * per_group
        squared_mean = float(products[kept][:, kept].sum()) / count**2
        variance = max(float(squares[kept].sum()) - count * squared_mean, 0.0) / (count - 1)
        return size * variance, squared_mean - variance / count

    groups = torch.arange(GROUPS)
    (trace, signal), *left_out = [parts(groups != k) for k in range(-1, GROUPS)]
    examples = GROUPS * per_group * size
    quantile = float(stats.t.ppf(0.975, GROUPS - 1))
    value = trace / signal if signal > 0 else math.inf
    error = quantile * _jackknife([s for _, s in left_out])
    if min(signal, *(s for _, s in left_out)) <= 0 or trace <= 0:
        most = max(signal + error, 0.0)
        low, high = (trace / most if most > 0 else math.inf), (math.inf if trace > 0 else value)
        return NoiseScale(value, low, high, examples, size)
    reach = quantile * _jackknife([math.log(max(t, trace * 1e-9) / s) for t, s in left_out])
    high = math.inf if signal <= error else value * math.exp(reach)
    return NoiseScale(value, value * math.exp(-reach), high, examples, size)


def _jackknife(left_out: list[float]) -> float:
    """Return the standard error from estimates that each leave out one group."""
    values = np.asarray(left_out)
    return math.sqrt((len(values) - 1) / len(values) * float(np.square(values - values.mean()).sum()))


def collect_noise_scale(session: Session, *, checkpoints: int | None = None) -> None:
    """Store the noise scale of the untrained model and of the baseline's checkpoints, where it is not there yet (F6.5)."""

    def measured() -> list[dict[str, Any]]:
        """Return a row for each moment that could be measured; `WorkloadError` says why there is none."""
        trial = session.trial(session.config, stage=Role.BASELINE)
        kept = [(int(p.name.partition("-")[2]), p) for p in sorted((trial.folder / "checkpoints").glob("step-*"))]
        trained = [(step, path) for step, path in kept if step > 0]
        latest = trained if checkpoints is None else trained[max(0, len(trained) - checkpoints) :]
        moments: list[tuple[int, Path | None]] = [(0, None), *latest]
        known = session.workload, session.config, session.device
        found = {step: measure_noise_scale(*known, checkpoint=path) for step, path in moments}
        rows = [{"step": step} | one._asdict() for step, one in found.items() if isinstance(one, NoiseScale)]
        if not rows:
            raise WorkloadError("; ".join(dict.fromkeys(map(str, found.values()))))
        return rows

    session.collect("noise_scale", measured)
